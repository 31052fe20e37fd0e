"""Causal LMs of text models for which transformers has none: those of Qwen2.5-VL, Qwen3-VL and GLM-4V folders.

There the LM head belongs to the multimodal class. For text it is the text model and a product, as of any causal LM.
"""

from functools import cache
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING,
    MODEL_MAPPING_NAMES,
)


class TextLM(PreTrainedModel, GenerationMixin):
    """A text model and an LM head, under Llama's names."""

    base_model_prefix = "model"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_sdpa = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        kind: Any = MODEL_MAPPING[type(config).__base__]  # see _own_class
        self.model = kind(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, logits_to_keep: int = 0, **named: Any) -> CausalLMOutputWithPast:
        """Ids ``[B, T]`` (or ``inputs_embeds``) -> logits ``[B, T, V]``, or those of the last ``logits_to_keep``."""
        output = self.model(input_ids=input_ids, **named)
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


def with_causal_lm(config: PretrainedConfig) -> bool:
    """Have ``AutoModelForCausalLM`` make a model of a text model's configuration, in place; False if it cannot."""
    kind = config.model_type
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return True
    if not kind.endswith("_text") or kind not in MODEL_MAPPING_NAMES:
        return False
    config_class: Any = type(config)
    config.__class__ = _own_class(config_class)
    return True


@cache
def _own_class(kind: Any) -> Any:
    """A configuration class with a causal LM. transformers ignores what is registered for classes of its own."""
    config_class: Any = type(kind.__name__, (kind,), {"__module__": __name__})
    model: Any = type(f"{kind.__name__.removesuffix('Config')}ForCausalLM", (TextLM,), {"config_class": config_class})
    AutoModelForCausalLM.register(config_class, model)
    return config_class
