"""Adapters as peft saves them: merged into the model that they were trained on, which then costs what it did before.

Of ``adapter_config.json`` nothing is taken but LoRA's numbers: peft's own class of it may name modules to import.
"""

import json
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, HTTPError
from safetensors.torch import load_file
from torch import nn

from drafters.common.paths import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, readable
from drafters.common.wording import shortened

Model = TypeVar("Model", bound=nn.Module)
BASE = "base_model_name_or_path"
# What changes the weights that LoRA adds; of everything else only that it is off.
TAKEN = ("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out")
OFF = (
    "bias",
    "modules_to_save",
    "use_dora",
    "trainable_token_indices",
    "layer_replication",
    "target_parameters",
    "lora_bias",
)
MERGE = "merge it with peft, and give the folder of the merged model"


def adapter_config(name: str, revision: str | None = None) -> dict[str, Any] | None:
    """The adapter's configuration in a folder or Hub repository; None where there is no adapter.

    Raises:
        ValueError: it is damaged, or of another kind than LoRA.
    """
    path = _fetch(name, ADAPTER_CONFIG_FILE, revision)
    if path is None:
        return None
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
        kind, base = found["peft_type"], found[BASE]
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{path} is damaged ({error}); save the adapter again") from None
    if kind != "LORA":
        raise ValueError(f"{name} is an adapter of type {shortened(kind)}, and only LORA is merged; {MERGE}")
    if on := [key for key in OFF if found.get(key) not in (None, False, "none", [])]:
        raise ValueError(f"{name} is an adapter with {', '.join(on)}, and only plain LoRA is merged; {MERGE}")
    if not isinstance(base, str) or base in ("", name):
        raise ValueError(
            f"{path}: {BASE} is {shortened(base)}; set it to the folder or Hub repository of the model "
            "that the adapter is for"
        )
    return found


def merge_adapter(model: Model, name: str, config: dict[str, Any], revision: str | None) -> Model:
    """``model`` with the LoRA adapter ``name`` in its weights.

    Raises:
        ValueError: peft is not installed, no safetensors weights, or weights that are not the model's.
    """
    try:
        import peft
    except ImportError:
        raise ValueError(f"{name} is a LoRA adapter, and peft is not installed; pip install peft") from None
    path = _fetch(name, ADAPTER_WEIGHTS_FILE, revision)
    if path is None:
        raise ValueError(f"{name} has no {ADAPTER_WEIGHTS_FILE}; save the adapter again, as safetensors")
    given = {key: config[key] for key in TAKEN if config.get(key) is not None}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**given))
    weights = load_file(path)
    wanted = peft.get_peft_model_state_dict(wrapped)
    shapes, known = ({key: value.shape for key, value in each.items()} for each in (weights, wanted))
    if differing := sorted(key for key in {*shapes, *known} if shapes.get(key) != known.get(key)):
        raise ValueError(
            f"{path} does not fit the base model {config[BASE]}: {len(differing)} weights are "
            f"missing, unknown or of another shape, for example {shortened(differing[0])}"
        )
    peft.set_peft_model_state_dict(wrapped, weights)
    merged: Model = wrapped.merge_and_unload()
    return merged


def _fetch(name: str, file: str, revision: str | None) -> Path | None:
    """One file's path, downloaded if it is on the Hub; None where there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return readable(path) if path.is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, HTTPError, OSError):
        return None  # there is no adapter, or the loader of models says what is wrong
