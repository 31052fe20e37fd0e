"""Heads as their authors and other engines have them: what the files hold, and whether a folder is such a one.

``EAGLE``: ``fc`` and one decoder layer without its input layernorm, embedding and LM head being the target's.
``Kangaroo``: a decoder layer without its MLP, and a norm. ``config.json`` is that of a Llama with one layer. Who loads
them says little where something is wrong (see ``problems``), which is why all of it is checked here.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import torch
from pydantic import Field, create_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafters.common.choices import HeadLayer
from drafters.common.paths import check_loadable, readable
from drafters.common.wording import dtype_name, shortened
from drafters.config import Config, Length, Vocabulary, validate
from drafters.hub.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from drafters.hub.model_card import is_hub_id
from drafters.model.layers import ROPES, default_layer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PICKLED_FILE = "pytorch_model.bin"
INDEXES = (f"{WEIGHTS_FILE}.index.json", f"{PICKLED_FILE}.index.json")
HOT_TOKENS = "hot_token_ids.pt"  # of SGLang's --speculative-token-map
MADE_FROM = "made_from"  # our key in config.json: which drafter, for which target
PLAIN = "LlamaForCausalLM"  # vLLM puts Eagle in front of it
BIASED = "EagleWithBiasForCausalLM"  # no engine knows it: vLLM has no bias in fc, and would leave it out in silence
SGLANG = {"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle"}  # by the target's family
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EMBEDDING = "embed_tokens.weight"
WHO = {"official": "the official code", "vllm": "vLLM", "sglang": "SGLang"}
# Families of targets, by model_type, that a reader can run beside an EAGLE-1/2 head: the official code's own models
# (February 2026), SGLang's classes that hand out embedding and LM head (0.5.23). vLLM 0.32 asks no more of a target.
_TARGETS = {
    "official": ("llama", "mixtral", "qwen2", "qwen3"),
    "sglang": ("apertus", "ernie4_5", "exaone4", "glm4", "gpt_oss", "llama", "ministral3", "mistral", "phi3")
    + ("qwen2", "qwen3", "qwen3_moe"),
}
_ROPE_DEFAULTS = ("beta_fast", "beta_slow")  # keys of ROPES that all readers have the same default for
_Positive = Annotated[float, Field(gt=0)]


class _Head(Config, extra="ignore", strict=True):
    """Base of the schemas of a head's config.json: other keys may be there, and nothing is converted."""


_ROPE_NUMBERS: dict[str, Any] = dict.fromkeys(("rope_theta", *chain(*ROPES.values())), (_Positive | None, None))
_Rope = create_model("_Rope", __base__=_Head, rope_type=(str | None, None), type=(str | None, None), **_ROPE_NUMBERS)


class _HeadConfig(_Head):
    """Keys that no tensor's shape tells."""

    vocab_size: Vocabulary = Field(ge=1)
    max_position_embeddings: Length | None = Field(None, ge=1)
    tie_word_embeddings: bool | None = None
    hidden_act: str | None = None
    rms_norm_eps: float = Field(1e-6, gt=0, lt=1)
    rope_theta: _Positive | None = None
    rope_parameters: _Rope | None = None  # type: ignore[valid-type]
    rope_scaling: _Rope | None = None  # type: ignore[valid-type]


def read_weights(folder: Path, source: str) -> tuple[Path, dict[str, Tensor]]:
    """The one file of weights in a folder, and what it holds. A pickled one is read for its tensors alone.

    Raises:
        ValueError: there is none, several parts of one, or a file that is damaged or holds more than tensors.
    """
    check_loadable(folder)
    path = next((folder / name for name in (WEIGHTS_FILE, PICKLED_FILE) if (folder / name).is_file()), None)
    if path is None:
        if index := next((name for name in INDEXES if (folder / name).is_file()), None):
            raise ValueError(
                f"{source} has its weights in parts ({index}), and a head is one layer; put them into one "
                f"{WEIGHTS_FILE}, or check that this is a head and not a whole model"
            )
        names = sorted(entry.name for entry in folder.iterdir())
        raise ValueError(
            f"{source} holds no {WEIGHTS_FILE} and no {PICKLED_FILE}; found: {', '.join(names) or 'nothing'}"
        )
    if path.name == WEIGHTS_FILE:
        try:
            return path, load_file(readable(path))
        except SafetensorError as error:
            raise ValueError(f"{source}: {path.name} cannot be read ({error}); it may be cut off") from None
    try:
        found = torch.load(readable(path), map_location="cpu", weights_only=True)
    except Exception as error:  # what a stranger wrote can fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{source}: {path.name} is no file of tensors alone, or is cut off ({shortened(reason)}). To load more "
            "than tensors could run code, and is not done; ask its author for safetensors"
        ) from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise ValueError(f"{source}: {path.name} must hold tensors by name, found {shortened(found)}")
    return path, {name: value.contiguous() for name, value in found.items()}


def made_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """What an export of ours says of where it is from; of others', nothing."""
    found = config.get(MADE_FROM)
    return found if isinstance(found, dict) else {}


def head_layer(config: Mapping[str, Any], target: "PretrainedConfig", eagle: bool) -> HeadLayer:
    """The kind of layer of a head with such a ``config.json``, which an export of ours tells."""
    if not eagle:
        return "target"
    said = made_from(config).get("layer")
    if (known := next((layer for layer in get_args(HeadLayer) if layer == said), None)) is not None:
        return known
    return default_layer(target) if rope(config)["rope_type"] in ROPES else "target"  # a Llama layer has one of ROPES


def no_target(to: str, family: str) -> str | None:
    """Why ``to`` cannot run targets of this ``family`` (a model_type) beside an EAGLE head; None: it can."""
    if to not in _TARGETS or family in _TARGETS[to]:
        return None
    return f"it runs no targets of the family {family!r} with EAGLE heads"


def shown(name: str) -> str:
    """A model's name for others, to whom a local path is no help."""
    return name if is_hub_id(name) else Path(name).name


def is_eagle(weights: Mapping[str, Tensor]) -> bool:
    """Whether these are, or were to be, an EAGLE head's; else a Kangaroo adapter's."""
    return any("fc." in name or "mlp." in name for name in weights)


def tensors(config: Mapping[str, Any], eagle: bool, fc_bias: bool = False) -> dict[str, list[int]]:
    """Names and shapes of what a head holds whose ``config.json`` says ``config``.

    Raises:
        ValueError: a size is not there, or is none.
    """
    wide = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    head_dim = _size(config, "head_dim", wide // heads)
    queries, keys = heads * head_dim, _size(config, "num_key_value_heads", heads) * head_dim
    projections = {"q": [queries, wide], "k": [keys, wide], "v": [keys, wide], "o": [wide, queries]}
    found = {f"layers.0.self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
    if config.get("model_type") == "qwen2" or config.get("qkv_bias"):
        found |= {f"layers.0.self_attn.{name}_proj.bias": projections[name][:1] for name in "qkv"}
    if not eagle:
        return found | {"layers.0.input_layernorm.weight": [wide], "norm.weight": [wide]}
    inner = _size(config, "intermediate_size")
    found |= {f"layers.0.mlp.{name}_proj.weight": [inner, wide] for name in ("gate", "up")}
    found |= {"layers.0.mlp.down_proj.weight": [wide, inner], "layers.0.post_attention_layernorm.weight": [wide]}
    return found | {"fc.weight": [wide, 2 * wide]} | ({"fc.bias": [wide]} if fc_bias else {})


def _size(config: Mapping[str, Any], key: str, otherwise: int | None = None) -> int:
    value = config.get(key) if config.get(key) is not None else otherwise
    if type(value) is not int or value < 1:
        raise ValueError(f"{CONFIG_FILE}: {key} must be a whole number of at least 1, found {shortened(value)}")
    return value


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """How positions turn, as transformers 5 says it, from that or from the older keys: type, theta and a scaling's.

    Raises:
        ValueError: values of other types.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    try:
        found = dict(given)
        kind, thetas = found.pop("type", "default"), (found.get("rope_theta"), config.get("rope_theta"))
        theta = next((theta for theta in thetas if theta is not None), 10000.0)
        return found | {"rope_type": found.get("rope_type", kind), "rope_theta": float(theta)}
    except (TypeError, ValueError):
        said = {key: value for key, value in config.items() if key.startswith("rope_")}
        raise ValueError(f"{CONFIG_FILE}: RoPE is told as {shortened(said)}, which cannot be read") from None


def older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same as readers before transformers 5 find it: they look at ``rope_theta`` and ``rope_scaling`` alone.

    Raises:
        ValueError: values of other types.
    """
    theta, scaling = config.get("rope_theta"), config.get("rope_scaling") or {}
    if isinstance(scaling, Mapping):
        scaling = {key: value for key, value in scaling.items() if key != "rope_theta"}
    return rope({"rope_theta": theta, "rope_scaling": scaling})


def older_keys(turning: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``, where those readers look for what ``rope`` gives."""
    scaling = {key: value for key, value in turning.items() if key != "rope_theta"}
    kind = turning["rope_type"]
    return {
        "rope_theta": turning["rope_theta"],
        "rope_scaling": None if kind == "default" else scaling | {"type": kind},  # as the oldest call it
    }


def differences(config: Mapping[str, Any], target: "PretrainedConfig", eagle: bool) -> list[str]:
    """Where a head with such a ``config.json`` is not one layer of ``target``, in words; its tensors may have the same
    shapes all the same. ``target``: its configuration as ``layer_config`` gives it for the head's kind of layer."""
    wide, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    theirs = {"num_key_value_heads": heads, "head_dim": wide // heads, "hidden_act": "silu"}
    theirs |= {key: value for key, value in config.items() if value is not None}
    ours = {"head_dim": target.hidden_size // target.num_attention_heads}
    ours |= {key: value for key, value in target.to_dict().items() if value is not None}
    keys = ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    keys += ["intermediate_size", "hidden_act"] if eagle else []
    pairs = [(key, theirs.get(key), ours.get(key)) for key in keys] + [("RoPE", rope(theirs), rope(ours))]
    return [f"{key} is {one} in {CONFIG_FILE}, {other} in the target" for key, one, other in pairs if one != other]


def why_not(to: str, config: Mapping[str, Any], eagle: bool, fc_bias: bool) -> str | None:
    """Why ``to`` cannot load a head with such a ``config.json``; None: it can."""
    turning = rope(config)
    own_heads = config.get("head_dim") not in (None, config["hidden_size"] // config["num_attention_heads"])
    if not eagle and to != "official":
        return f"{WHO[to]} has no Kangaroo"
    if to == "vllm" and fc_bias:
        return "its fc has no bias: it would leave fc.bias out, draft worse and say nothing"
    if to != "official" and (activation := config.get("hidden_act", "silu")) != "silu":
        return f"its layer has the activation silu alone, and this one {shortened(activation)}"
    if to != "official" and turning["rope_type"] not in ROPES:
        return f"it computes RoPE of type {turning['rope_type']!r} otherwise than in training; train with layer=llama"
    if to == "official" and own_heads:
        return f"its heads are hidden_size / num_attention_heads wide, and these are head_dim {config['head_dim']}"
    if to == "official" and turning["rope_type"] != "default":
        return f"it knows no RoPE of type {turning['rope_type']!r}"
    if to == "official" and not eagle and turning["rope_theta"] != 10000.0:
        return f"its adapter has rope_theta 10000 whatever config.json says, and this one {turning['rope_theta']:g}"
    return None


def problems(config: Mapping[str, Any], weights: Mapping[str, Tensor], pickled: bool) -> list[str]:
    """What is wrong with a head in the form of its authors or of an engine, each in words; none: an empty list."""
    eagle = is_eagle(weights)
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "not given"
    fc_bias = architecture in (BIASED, *SGLANG.values())
    found = _config_problems(config, architecture, eagle) + ([] if eagle or pickled else [_NOT_PICKLED])
    wanted = tensors(config, eagle, fc_bias)
    if missing := sorted(wanted.keys() - weights.keys()):
        found.append(f"missing tensors: {', '.join(missing)} (they would be left random)")
    if eagle and EMBEDDING in weights:  # which may be there: who serves it drafts with it
        wanted[EMBEDDING] = [_size(config, "vocab_size"), _size(config, "hidden_size")]
    if unknown := sorted(weights.keys() - wanted.keys()):
        found.append(f"unknown tensors: {', '.join(unknown)}")
    for name in sorted(wanted.keys() & weights.keys()):
        if list(weights[name].shape) != wanted[name]:
            found.append(f"{name} is {list(weights[name].shape)}, and {CONFIG_FILE} says {wanted[name]}")
        elif weights[name].dtype in DTYPES and not torch.isfinite(weights[name]).all():
            found.append(f"{name} holds NaN or infinite values")
    dtypes = {value.dtype for value in weights.values()}
    said = config.get("dtype") or config.get("torch_dtype")
    if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        names = ", ".join(sorted(map(dtype_name, dtypes)))
        found.append(f"the tensors are {names}; all must be one of {', '.join(map(dtype_name, DTYPES))}")
    elif said is not None and dtype_name(said) != dtype_name(next(iter(dtypes), said)):
        found.append(f"the tensors are {dtype_name(next(iter(dtypes)))}, and {CONFIG_FILE} says dtype {said!r}")
    return found


_NOT_PICKLED = f"a Kangaroo adapter in {WEIGHTS_FILE}: the official code reads {PICKLED_FILE} alone"


def _config_problems(config: Mapping[str, Any], architecture: str, eagle: bool) -> list[str]:
    found = []
    if eagle and architecture not in (PLAIN, BIASED, *SGLANG.values()):
        found.append(f"architectures is {architecture}; known: {', '.join((PLAIN, BIASED, *SGLANG.values()))}")
    family = next((name for name, value in SGLANG.items() if value == architecture), "llama")
    if config.get("model_type") != family:
        found.append(f"model_type is {shortened(config.get('model_type'))}, and must be {family!r}")
    if config.get("num_hidden_layers") != 1:
        found.append(f"num_hidden_layers is {shortened(config.get('num_hidden_layers'))}, and a head has 1")
    bias, wanted = config.get("bias", "absent"), architecture == BIASED
    if eagle and bias is not wanted:
        found.append(
            f"bias is {shortened(bias) if bias != 'absent' else bias}, and must be {str(wanted).lower()}: "
            + (
                "fc.bias would be left out"
                if wanted
                else "the official code takes an absent one for true and leaves fc.bias random, and with true vLLM and "
                "SGLang expect biases of the attention, draft nonsense and say nothing"
            )
        )
    found += [f"{key} is true, and a head has none" for key in ("attention_bias", "mlp_bias") if config.get(key)]
    turning, older = rope(config), older_rope(config)
    try:
        validate(_HeadConfig, dict(config), source=CONFIG_FILE)
        wanted_keys = [key for key in ROPES.get(turning["rope_type"], ()) if key not in _ROPE_DEFAULTS]
        if absent := [key for key in wanted_keys if turning.get(key) is None]:
            found.append(f"RoPE of type {turning['rope_type']} has no {', '.join(absent)}")
    except ValueError as error:
        found.append(str(error))
    for key in sorted(turning.keys() | older.keys()):
        if turning.get(key) != older.get(key):
            one, other = (f"{x:g}" if isinstance(x, float) else x for x in (turning.get(key), older.get(key)))
            found.append(
                f"{key} is {one} in rope_parameters and {other} for readers older than transformers 5, which look at "
                "the top for rope_theta and rope_scaling"
            )
    return found
