"""What a method declares of its head's stored form, so that ``drafters.export`` and ``drafters.convert`` know it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

READERS = {"official": "the official code", "vllm": "vLLM", "sglang": "SGLang"}  # the programs that load heads
ATTENTION = tuple(f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo")
MLP = {
    "layers.0.mlp.gate_proj.weight": "I H",
    "layers.0.mlp.up_proj.weight": "I H",
    "layers.0.mlp.down_proj.weight": "H I",
    "layers.0.post_attention_layernorm.weight": "H",
}


@dataclass(frozen=True)
class Layout:
    """Stored form of a head of one decoder layer: ``config.json`` of a Llama with one layer, and one file of weights.

    Attributes:
        noun: the head in words, with its article.
        tensors: shapes by name, beside the attention's; H is the hidden size, I the width of the MLP.
        code: how the official code loads it; {target}, {out} and {exit_layer} are filled in. note: its limits.
        readers: the names in ``READERS`` of those that can load it.
        families: ``model_type`` of targets whose own decoder layer the readers have as a draft layer.
        options: values of the drafter's options that the readers take for granted.
        bias: name of a bias that a head may have; the option is this name with ``_`` for the dot.
        pickled: the official code reads pytorch_model.bin only.
        rope_theta: base of RoPE in the official code, where config.json cannot change it.
    """

    noun: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    note: str = ""
    readers: tuple[str, ...] = ()
    families: tuple[str, ...] = ("llama",)
    options: Mapping[str, Any] = field(default_factory=dict)
    bias: str | None = None
    pickled: bool = False
    rope_theta: float | None = None

    @property
    def names(self) -> set[str]:
        """Names of the tensors that every such head has."""
        return {*ATTENTION, *self.tensors}

    def has_bias(self, options: Mapping[str, Any]) -> bool:
        """True if a drafter with these ``options`` has the bias."""
        return self.bias is not None and bool(options.get(self.bias.replace(".", "_")))
