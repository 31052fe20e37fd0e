"""``config.json`` of a head in the form of its authors or of an engine. Imports no torch.

``Keys`` has the types of the keys that several heads have; a head's forms add their own. Readers need not check types.
Null means absent.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from drafters.common.paths import readable
from drafters.common.wording import json_object, shortened
from drafters.config import Amount, Config, Layers, Vocabulary, Width, validate

# The programs that load heads.
READERS = {
    "official": "the official code",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "speculators": "speculators",
    "llama.cpp": "llama.cpp",
}
CONFIG_FILE = "config.json"
MADE_FROM = "made_from"  # our key in config.json: which drafter, for which target
EXPORT_FIRST = "export it first: python -m drafters.export CHECKPOINT --to vllm --out FOLDER"
LOADS_AS_IT_IS = "load_drafter reads it as it is"
Dimension = Annotated[Width, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]


class Part(Config):
    """Base of these schemas: other keys are left alone, and a number in quotes is no number."""

    model_config = ConfigDict(extra="allow", strict=True)


class Rope(Part):
    """``rope_parameters``, or ``rope_scaling`` of older programs."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: Positive | None = None
    factor: Positive | None = None
    low_freq_factor: Positive | None = None
    high_freq_factor: Positive | None = None
    original_max_position_embeddings: Amount | None = Field(None, ge=1)
    attention_factor: Positive | None = None
    beta_fast: Positive | None = None
    beta_slow: Positive | None = None


class Origin(Part):
    """``made_from``, which our exports write."""

    target: str | None = None
    target_fingerprint: str | None = None
    layer: str | None = None
    exit_layer: Layers | None = None
    layout: str | None = None
    taps: list[Layers] | None = None
    trained_steps: Amount | None = None
    rope: Rope | None = None


class Keys(Part):
    """The keys of a head and of its layers, at the top of ``config.json`` and in the groups of some forms."""

    architectures: list[str] | None = None
    model_type: str | None = None
    speculators_model_type: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    # Sizes.
    hidden_size: Dimension | None = None
    target_hidden_size: Dimension | None = None
    intermediate_size: Dimension | None = None
    num_attention_heads: Dimension | None = None
    num_key_value_heads: Dimension | None = None
    head_dim: Dimension | None = None
    num_hidden_layers: Layers | None = Field(None, ge=1)
    num_target_layers: Layers | None = Field(None, ge=1)
    vocab_size: Vocabulary | None = Field(None, ge=1)
    draft_vocab_size: Vocabulary | None = Field(None, ge=1)
    max_position_embeddings: Amount | None = Field(None, ge=1)
    # The layers.
    rms_norm_eps: float | None = Field(None, gt=0, lt=1)
    rope_theta: Positive | None = None
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    hidden_act: str | None = None
    bias: bool = True  # null is refused: to the official code it is false, and an absent one true
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    logit_scale: float | None = None
    layer_types: list[str] | None = None
    sliding_window: Amount | None = Field(None, ge=1)
    use_sliding_window: bool | None = None
    # States of the target.
    eagle_aux_hidden_state_layer_ids: list[Layers] | None = None
    aux_hidden_state_layer_ids: list[Layers] | None = None
    target_layer_ids: list[Layers] | None = None
    num_aux_hidden_states: Layers | None = None
    use_aux_hidden_state: bool | None = None
    # Groups of such keys.
    transformer_layer_config: "Keys | None" = None
    made_from: Origin | None = None


def read_config(folder: Path, source: str, own: str) -> dict[str, Any]:
    """Return the content of ``config.json`` in ``folder``, without the keys that are null.

    Args:
        own: what the error says to do if the folder is a checkpoint of this toolkit.

    Raises:
        ValueError: no such file, no JSON object in it, a checkpoint of this toolkit, or a key of another type.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{source} holds no {path.name}; a released head is a folder of that and one file of weights")
    found = json_object(readable(path), f"{source}: {path.name}")
    if "drafter_type" in found:
        raise ValueError(f"{source} is a drafter of this toolkit; {own}")
    validate(Keys, found, f"{source}: {path.name}")
    return _without_nulls(found)


def _without_nulls(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value is not None
    }


def made_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """The origin that our exports write; empty for other heads."""
    found: dict[str, Any] = config.get(MADE_FROM, {})
    return found


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size in ``config``; raises ValueError if it is no whole number of at least 1."""
    value = config.get(key) if config.get(key) is not None else default
    if type(value) is not int or value < 1:
        raise ValueError(f"{CONFIG_FILE}: {key} must be a whole number of at least 1, found {shortened(value)}")
    return value


def check_said(config: Mapping[str, Any], key: str, value: Any, why: str, source: str) -> None:
    """Raise ValueError if ``config`` has another ``value`` for ``key``; ``why``: the reason for this one."""
    if (said := config.get(key)) not in (None, value):
        raise ValueError(f"{source}: {key} is {shortened(said)}, and {why}")


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE in the keys of transformers 5, read from these or from the older keys: type, theta, numbers of a scaling."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind, thetas = found.pop("type", "default"), (found.get("rope_theta"), config.get("rope_theta"))
    theta = next((theta for theta in thetas if theta is not None), 10000.0)
    return found | {"rope_type": found.get("rope_type", kind), "rope_theta": float(theta)}


def older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as readers before transformers 5 find it, which look only at ``rope_theta`` and ``rope_scaling``."""
    scaling = {key: value for key, value in (config.get("rope_scaling") or {}).items() if key != "rope_theta"}
    return rope({"rope_theta": config.get("rope_theta"), "rope_scaling": scaling})


def older_keys(turning: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of those readers, for what ``rope`` returned."""
    scaling = {key: value for key, value in turning.items() if key != "rope_theta"}
    kind = turning["rope_type"]
    return {
        "rope_theta": turning["rope_theta"],
        "rope_scaling": None if kind == "default" else scaling | {"type": kind},  # the key of the oldest readers
    }
