"""Heads in the form of their authors or of an engine: read the weights, tell the method, find what is wrong.

The programs that load such heads report few mistakes: a missing tensor is left random. So everything is checked here.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafters.common.fingerprints import same_weights
from drafters.common.paths import check_loadable, readable
from drafters.common.wording import dtype_name, shortened
from drafters.config import HeadLayer
from drafters.hub.checkpoint import WEIGHTS_FILE
from drafters.hub.declared import READERS, Layout
from drafters.layouts.config import CONFIG_FILE, made_from, older_rope, rope, size, tensors
from drafters.methods import drafter_class, method_names
from drafters.methods.eagle import Eagle3Drafter
from drafters.model.draft_head import D2T
from drafters.model.ends import load_frozen_ends
from drafters.model.layers import ROPES, default_layer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from drafters.learned import LearnedDrafter

PICKLED_FILE = "pytorch_model.bin"
INDEXES = (f"{WEIGHTS_FILE}.index.json", f"{PICKLED_FILE}.index.json")
PLAIN = "LlamaForCausalLM"  # vLLM puts Eagle in front of it
BIASED = "EagleWithBiasForCausalLM"  # known to no engine: vLLM has no bias in fc, and would drop it silently
SGLANG = {"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle"}  # by the target's family
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EMBEDDING = "embed_tokens.weight"
T2D = "t2d"  # bool [V]: which of the target's tokens are draft tokens
DSPARK_HEADS = ("markov_head.", "confidence_head.")  # which have biases
# Families of targets, by model_type, that a reader can run beside a head: the official code's own models (February
# 2026), SGLang's classes that hand out embedding and LM head (0.5.23). vLLM 0.32 takes any.
_TARGETS = {
    "official": ("llama", "mixtral", "qwen2", "qwen3"),
    "sglang": ("apertus", "ernie4_5", "exaone4", "glm4", "gpt_oss", "llama", "ministral3", "mistral", "phi3")
    + ("qwen2", "qwen3", "qwen3_moe"),
}
_ROPE_DEFAULTS = ("beta_fast", "beta_slow")  # keys of ROPES with the same default in all readers


def read_weights(folder: Path, source: str) -> tuple[Path, dict[str, Tensor]]:
    """The file of weights in a folder, and its tensors. Of a pickled file only tensors are read.

    Raises:
        ValueError: no such file, several parts of one, or a file that is damaged or holds more than tensors.
    """
    check_loadable(folder)
    path = next((folder / name for name in (WEIGHTS_FILE, PICKLED_FILE) if (folder / name).is_file()), None)
    if path is None:
        if index := next((name for name in INDEXES if (folder / name).is_file()), None):
            raise ValueError(f"{source} has its weights in parts ({index}); put them into one {WEIGHTS_FILE}")
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
    except Exception as error:  # a stranger's file can fail in any way
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        what = f"{path.name} holds more than tensors, or is cut off ({shortened(reason)})"
        raise ValueError(f"{source}: {what}; ask its author for safetensors") from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise ValueError(f"{source}: {path.name} must hold tensors by name, found {shortened(found)}")
    return path, {name: value.contiguous() for name, value in found.items()}


def block_method(weights: Mapping[str, Tensor]) -> str | None:
    """The method of a block drafter's head with these tensors, dflash or dspark; None for other heads."""
    names = {name.removeprefix("model.") for name in weights}
    if "hidden_norm.weight" not in names:
        return None
    return "dspark" if any(name.startswith(DSPARK_HEADS) for name in names) else "dflash"


def exportable() -> list[type["LearnedDrafter"]]:
    """The methods that declare who can load their heads."""
    kinds: list[Any] = [drafter_class(name) for name in method_names()]
    return [kind for kind in kinds if getattr(kind, "layout", Layout()).readers]


def kind_of(weights: Mapping[str, Tensor]) -> type["LearnedDrafter"]:
    """The method that these tensors belong to: the one with the most of their names.

    EAGLE-3 heads, which have names of several forms, all have a norm of the feature. Block heads have it outside of
    their layers.
    """
    if (method := block_method(weights)) is not None:
        return drafter_class(method)  # type: ignore[return-value]
    if any(name.endswith("hidden_norm.weight") for name in weights):
        return Eagle3Drafter
    kinds = [kind for kind in exportable() if kind.layout.tensors]  # the others were told by their norms
    return max(kinds, key=lambda kind: len(kind.layout.names & weights.keys()))


def head_layer(config: Mapping[str, Any], target: "PretrainedConfig", kind: type["LearnedDrafter"]) -> HeadLayer:
    """The kind of decoder layer of a head with this ``config.json``."""
    if "layer" not in kind.shape.model_fields:
        return "target"
    exported = made_from(config).get("layer")
    if (known := next((layer for layer in get_args(HeadLayer) if layer == exported), None)) is not None:
        return known
    return default_layer(target) if rope(config)["rope_type"] in ROPES else "target"  # a Llama layer has one of ROPES


def no_target(to: str, family: str) -> str | None:
    """Why ``to`` cannot run targets of this ``family`` (a model_type) beside a head; None if it can."""
    if to not in _TARGETS or family in _TARGETS[to]:
        return None
    return f"it runs no targets of the family {family!r} with EAGLE heads"


def differences(config: Mapping[str, Any], target: "PretrainedConfig", layout: Layout) -> list[str]:
    """The differences, in words, between a head with this ``config.json`` and one layer of ``target``.

    Tensors may have equal shapes in spite of them. ``target`` is what ``layer_config`` returns for the head's layer.
    """
    wide, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    theirs = {"num_key_value_heads": heads, "head_dim": wide // heads, "hidden_act": "silu"}
    theirs |= {key: value for key, value in config.items() if value is not None}
    ours = {"head_dim": target.hidden_size // target.num_attention_heads}
    ours |= {key: value for key, value in target.to_dict().items() if value is not None}
    keys = ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    keys += ["intermediate_size", "hidden_act"] if any(".mlp." in name for name in layout.tensors) else []
    pairs = [(key, theirs.get(key), ours.get(key)) for key in keys] + [("RoPE", rope(theirs), rope(ours))]
    return [f"{key} is {one} in {CONFIG_FILE}, {other} in the target" for key, one, other in pairs if one != other]


def why_not(to: str, config: Mapping[str, Any], layout: Layout, bias: bool) -> str | None:
    """Why ``to`` cannot load a head with this ``config.json``; None if it can."""
    turning = rope(config)
    own_heads = config.get("head_dim") not in (None, config["hidden_size"] // config["num_attention_heads"])
    if to not in layout.readers:
        return f"{READERS[to]} does not load {layout.noun}"
    if to == "vllm" and bias:
        return f"its fc has no bias: it would leave {layout.bias} out, draft worse and say nothing"
    if to != "official" and (activation := config.get("hidden_act", "silu")) != "silu":
        return f"its layer has only the activation silu, and this one {shortened(activation)}"
    if to != "official" and turning["rope_type"] not in ROPES:
        return f"it computes RoPE of type {turning['rope_type']!r} otherwise than in training; train with layer=llama"
    if to == "official" and own_heads:
        return f"its heads are hidden_size / num_attention_heads wide, and these are head_dim {config['head_dim']}"
    if to == "official" and turning["rope_type"] != "default":
        return f"it knows no RoPE of type {turning['rope_type']!r}"
    if to == "official" and layout.rope_theta not in (None, turning["rope_theta"]):
        return f"it has rope_theta {layout.rope_theta:g} for every config.json, and this one {turning['rope_theta']:g}"
    return None


def problems(config: Mapping[str, Any], weights: Mapping[str, Tensor], pickled: bool) -> list[str]:
    """What is wrong with a head in the form of its authors or of an engine, in words."""
    layout = kind_of(weights).layout
    architectures = config.get("architectures")
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "not given"
    found = _config_problems(config, architecture, layout)
    if layout.pickled and not pickled:
        found.append(f"{layout.noun} in {WEIGHTS_FILE}: the official code reads only {PICKLED_FILE}")
    wanted = tensors(config, layout, architecture in (BIASED, *SGLANG.values()))
    if "vllm" in layout.readers and EMBEDDING in weights:  # allowed: engines draft with it
        wanted[EMBEDDING] = [size(config, "vocab_size"), size(config, "hidden_size")]
    return found + tensor_problems(weights, wanted, (), config.get("dtype") or config.get("torch_dtype"))


def tensor_problems(
    weights: Mapping[str, Tensor], wanted: Mapping[str, list[int]], others: Sequence[str], said: object
) -> list[str]:
    """What is wrong with the names, shapes, values and dtypes of a head's tensors, in words.

    Args:
        wanted: shapes by name. others: names that may be there, too. said: the dtype in config.json, or None.
    """
    found = []
    if missing := sorted(wanted.keys() - weights.keys()):
        found.append(f"missing tensors: {', '.join(missing)} (they would be left random)")
    if unknown := sorted(weights.keys() - {*wanted, *others}):
        found.append(f"unknown tensors: {', '.join(unknown)}")
    for name in sorted(wanted.keys() & weights.keys()):
        if list(weights[name].shape) != wanted[name]:
            found.append(f"{name} is {list(weights[name].shape)}, and {CONFIG_FILE} says {wanted[name]}")
        elif weights[name].dtype in DTYPES and not torch.isfinite(weights[name]).all():
            found.append(f"{name} holds NaN or infinite values")
    dtypes = {value.dtype for name, value in weights.items() if name not in (D2T, T2D)}
    names = ", ".join(sorted(map(dtype_name, dtypes)))
    if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        found.append(f"the tensors are {names}; all must be one of {', '.join(map(dtype_name, DTYPES))}")
    elif said is not None and dtypes and dtype_name(said) != names:
        found.append(f"the tensors are {names}, and {CONFIG_FILE} says dtype {said!r}")
    return found


def _config_problems(config: Mapping[str, Any], architecture: str, layout: Layout) -> list[str]:
    found, known = [], (PLAIN, BIASED, *SGLANG.values())
    if layout.bias and architecture not in known:
        found.append(f"architectures is {architecture}; known: {', '.join(known)}")
    family = next((name for name, value in SGLANG.items() if value == architecture), "llama")
    if config.get("model_type") != family:
        found.append(f"model_type is {shortened(config.get('model_type'))}, and must be {family!r}")
    if config.get("num_hidden_layers") != 1:
        found.append(f"num_hidden_layers is {shortened(config.get('num_hidden_layers'))}, and a head has 1")
    bias, wanted = config.get("bias", "absent"), architecture == BIASED
    if layout.bias and bias is not wanted:
        why = (
            f"{layout.bias} would be left out"
            if wanted
            else f"the official code takes an absent one for true and leaves {layout.bias} random; with true vLLM and "
            "SGLang expect biases of the attention, draft nonsense and say nothing"
        )
        shown = bias if bias == "absent" else shortened(bias)
        found.append(f"bias is {shown}, and must be {str(wanted).lower()}: {why}")
    found += [f"{key} is true, and a head has none" for key in ("attention_bias", "mlp_bias") if config.get(key)]
    return found + rope_problems(config)


def rope_problems(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the RoPE of a ``config.json``, in words: a missing number, or two readings.

    Raises:
        ValueError: values of other types.
    """
    turning, older = rope(config), older_rope(config)
    found, wanted = [], [key for key in ROPES.get(turning["rope_type"], ()) if key not in _ROPE_DEFAULTS]
    if absent := [key for key in wanted if turning.get(key) is None]:
        found.append(f"RoPE of type {turning['rope_type']} has no {', '.join(absent)}")
    for key in sorted(turning.keys() | older.keys()):
        if turning.get(key) != older.get(key):
            one, other = (f"{x:g}" if isinstance(x, float) else x for x in (turning.get(key), older.get(key)))
            found.append(
                f"{key} is {one} in rope_parameters and {other} for readers older than transformers 5, which look at "
                "the top for rope_theta and rope_scaling"
            )
    return found


def another_target(config: Mapping[str, Any], name: str) -> str | None:
    """What an export of ours says if it was made for another target than ``name``."""
    if (known := made_from(config).get("target_fingerprint")) is None:
        return None
    fingerprint = load_frozen_ends(name, device="meta").fingerprint
    if same_weights(str(known), fingerprint, f"a head made for {made_from(config).get('target')}"):
        return None
    return f"it is for another target (fingerprint {known}) than {name} (fingerprint {fingerprint})"


def in_one_dtype(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All in one dtype: a merged LoRA has matrices in float32 and norms in 16 bits, which become float32."""
    dtypes = {value.dtype for value in weights.values() if value.is_floating_point()}
    wide = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return {name: value.to(wide) if value.is_floating_point() else value for name, value in weights.items()}


def weights_text(weights: Mapping[str, Tensor]) -> str:
    """Number and dtype of the weights, in words."""
    kept = [value for value in weights.values() if value.is_floating_point()]
    return f"{sum(value.numel() for value in kept):,} weights in {dtype_name(kept[0].dtype)}"
