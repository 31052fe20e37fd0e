"""LoRA by peft: low-rank matrices are trained beside the frozen ones of a model or a trained drafter.

A drafter's adapter is saved as peft saves it, beside a ``config.json`` that says which drafter it is for; see
``drafters/model/head_adapter.py``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafters.common.files import replace_json, replacing_files
from drafters.common.paths import ADAPTER_CONFIG_FILE
from drafters.common.wording import first_line
from drafters.hub.checkpoint import CARD_FILE, CONFIG_FILE, parse_config
from train.core.config import Lora

AS_THEY_ARE = ("lm_head", "markov_w2")  # projections of a drafter whose weights the loss multiplies with


def with_lora(model: nn.Module, lora: Lora, name: str | None) -> Any:
    """peft's model around ``model``: ``model`` is frozen, and its projections get matrices of rank ``lora.r``; not a
    drafter's LM head and W2 of its Markov head, whose weights the loss reads as they are.

    Args:
        name: name of the base model, for the adapter's config.

    Raises:
        ValueError: ``lora.targets`` that the model does not have, or a drafter's LM head.
    """
    import peft

    targets, pretrained = lora.targets, isinstance(model, PreTrainedModel)
    if targets == "all-linear" and not pretrained:
        linear = [path for path, part in model.named_modules() if isinstance(part, nn.Linear)]
        targets = [path for path in linear if not path.endswith(AS_THEY_ARE)]
    elif not pretrained and (wrong := [name for name in targets if name.endswith(AS_THEY_ARE)]):
        raise ValueError(f"lora.targets: a drafter's {wrong[0]} stays as it is; leave it out")
    settings = peft.LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM" if pretrained else None,
    )
    # By the config of a family with experts, peft takes targets for the experts' joined matrices, which stay frozen.
    config = None if pretrained else vars(model).pop("config", None)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of its own calls
            adapter = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise ValueError(f"lora.targets: {first_line(error)}") from error
    finally:
        if config is not None:
            model.config = config
    settings.base_model_name_or_path = name  # peft takes it from a model, not from a module
    return adapter


@torch.no_grad()
def load_base(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy ``weights``, by the names of a model without LoRA, into the frozen matrices of ``model``."""
    matrices = {name.replace(".base_layer.", "."): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, value in weights.items():
        matrices[name].copy_(value)


def copy_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give ``model`` copies of ``weights``, in their dtype."""
    for name, value in model.state_dict(keep_vars=True).items():
        value.data = weights[name].clone()


def save_adapter(adapter: Any, config: dict[str, Any], out: Path) -> None:
    """Write a drafter's adapter (peft's model) into the top of the run folder, replacing an older one.

    A process killed meanwhile leaves the older one, the new one, or a folder that does not load.
    """
    checked = parse_config(config, source=f"the config to be saved in {out}")
    with replacing_files(out, last=(ADAPTER_CONFIG_FILE, CONFIG_FILE)) as folder:
        adapter.save_pretrained(folder, save_embedding_layers=False)  # "auto" looks for the base's, and warns
        (folder / CARD_FILE).unlink(missing_ok=True)  # written by peft
        replace_json(folder / CONFIG_FILE, checked.model_dump())
