"""What a learned method declares about itself: how its head is stored, and how it is trained and measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The programs that load heads.
READERS = {
    "official": "the official code",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "speculators": "speculators",
    "llama.cpp": "llama.cpp",
}
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


@dataclass(frozen=True)
class Recipe:
    """How ``train.start`` trains and measures a method.

    Attributes:
        learning_rate: of the paper; targets of up to 1,024 hidden states get the rate measured here.
        keys: keys of the training's config. small: others for targets of up to 1,024 hidden states.
        short: keys for short runs on a CPU.
        rows: rows of the speed report by label, each with its options; the first is the method's default.
        certified: options with which every step has a draft, for the certificate of losslessness.
        knobs: options with the values that eval.tune tries; empty if the method chooses them itself.
        start: options that eval.tune starts from.
    """

    learning_rate: float
    rows: Mapping[str, Mapping[str, Any]]
    keys: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    short: Mapping[str, Any] = field(default_factory=dict)
    certified: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, list[Any]] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
