"""Causal LMs of text models for which transformers has none: those of Qwen2.5-VL, Qwen3-VL and GLM-4V folders.

There the LM head belongs to the multimodal class. For text it is the text model and a product, as of any causal LM.
"""

from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES


class TextLM(PreTrainedModel, GenerationMixin):
    """A text model and an LM head, under Llama's names."""

    base_model_prefix = "model"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_sdpa = True

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.model = AutoModel.from_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None, logits_to_keep: int = 0, **named: Any) -> CausalLMOutputWithPast:
        """Ids ``[B, T]`` (or ``inputs_embeds``) -> logits ``[B, T, V]``, or those of the last ``logits_to_keep``."""
        output = self.model(input_ids=input_ids, **named)
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:])
        return CausalLMOutputWithPast(logits=logits, past_key_values=output.past_key_values)


def has_causal_lm(config: PretrainedConfig) -> bool:
    """Return True if ``AutoModelForCausalLM`` makes a model of a text model's configuration, or does from now on."""
    kind = config.model_type
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return True
    if not kind.endswith("_text") or kind not in MODEL_MAPPING_NAMES:
        return False
    name = type(config).__name__.removesuffix("Config")
    made: Any = type(f"{name}ForCausalLM", (TextLM,), {"config_class": type(config), "__module__": __name__})
    AutoModelForCausalLM.register(type(config), made, exist_ok=True)
    return True
