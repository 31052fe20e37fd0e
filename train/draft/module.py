"""A causal LM in training: its layers on packed dialogues, up to its LM head, whole or with LoRA."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from drafters.model.files import SUPPORTED, load_config_only, sliding_windows
from drafters.model.loading import load_model, merged_lora
from drafters.model.stock import logit_change
from train.core.attention import NAME, Dialogues, compare_dialogues
from train.core.config import Lora
from train.core.lora import load_base, with_lora


class DraftModule(nn.Module):
    """A draft model (or a tuned target) from token ids up to its LM head.

    Args:
        model: transformers' model.
        lora: freeze it, and add low-rank matrices.
        name: name of the base model, for the adapter's config.

    Attributes:
        model: the model, or peft's model around it.
    """

    def __init__(self, model: PreTrainedModel, lora: Lora | None, name: str) -> None:
        super().__init__()
        self.model: Any = model if lora is None else with_lora(model, lora, name)
        self.lora = lora

    @property
    def base(self) -> Any:
        """transformers' model."""
        return self.model if self.lora is None else self.model.get_base_model()

    @property
    def lm_head(self) -> nn.Linear:
        """The LM head that the output enters."""
        head: nn.Linear = self.base.get_output_embeddings()
        return head

    def ends(self) -> list[nn.Parameter]:
        """The weights of embeddings and LM head, which may be one."""
        return [self.base.get_input_embeddings().weight, self.lm_head.weight]

    def forward(self, input_ids: Tensor, position_ids: Tensor, mask: Dialogues | None = None) -> Tensor:
        """Ids and positions ``[R, L]`` -> inputs of the LM head, ``[R, L, h]``; row i is about token i + 1."""
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "dialogues": mask}
        normed: Tensor = self.base.model(**inputs, use_cache=False).last_hidden_state
        return normed

    def merged(self) -> PreTrainedModel:
        """transformers' model with LoRA merged into its weights; this module must not be used afterwards."""
        model: PreTrainedModel = self.model if self.lora is None else merged_lora(self.model)
        return model


def draft_module(name: str, lora: Lora | None, attention: str = NAME) -> DraftModule:
    """The module of the model in the folder or Hub repository ``name``, with random weights.

    Raises:
        ValueError: no such model, or one whose layers cannot be trained.
    """
    return causal_module("draft_model", name, load_config_only(name), lora, attention)


def causal_module(
    key: str, name: str, config: PretrainedConfig, lora: Lora | None, attention: str = NAME
) -> DraftModule:
    """The module of a model of this configuration, with random weights.

    Args:
        key: key of the run's config that names the model ``name``, for errors.

    Raises:
        ValueError: a model whose layers cannot be trained.
    """
    what, config = f"{key}: {name}", copy.deepcopy(config)
    if any(sliding_windows(config)):
        raise ValueError(f"{what} has layers with a sliding window; choose a model without (sliding_window: null)")
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.get_default_dtype(), attn_implementation="sdpa", trust_remote_code=False
    )
    if missing := [part for part in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(model.model, part)]:
        raise ValueError(f"{what} ({type(model).__name__}) has no {', '.join(missing)}; use {SUPPORTED}")
    if model.get_output_embeddings().bias is not None:
        raise ValueError(f"{what} has an LM head with a bias, which would not be trained; use {SUPPORTED}")
    if logit_change(model) is not None:
        raise ValueError(f"{what} scales or caps its logits after the LM head; use {SUPPORTED}")
    module = DraftModule(model, lora, name)
    module.base.config._attn_implementation = attention
    return module


def check_attention(module: DraftModule, what: str) -> None:
    """Raise ValueError if the attention of ``what`` does not take packed dialogues."""
    ids = torch.arange(8)[None] % module.base.config.vocab_size
    compare_dialogues(module, [ids], lambda reason: ValueError(f"{what}: {reason}; use {SUPPORTED}"))


def load_weights(module: DraftModule, name: str, revision: str | None = None) -> None:
    """Read the weights and the generation config of the model ``name`` into its module.

    Raises:
        ValueError: nothing loadable there.
    """
    disable_progress_bar()  # transformers' own, beside the training's
    model, _ = load_model(name, "float32", "cpu", revision, None, (0, 0))
    load_base(module.base, model.state_dict())
    module.base.generation_config = model.generation_config


def names_of(module: nn.Module, weights: list[nn.Parameter]) -> tuple[str, ...]:
    """The names of some of a module's weights."""
    return tuple(name for name, parameter in module.named_parameters() if parameter in {*weights})
