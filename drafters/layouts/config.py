"""``config.json`` of a head in the form of its authors or of an engine. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.common.paths import readable
from drafters.common.wording import json_object, shortened
from drafters.hub.declared import Layout

CONFIG_FILE = "config.json"
MADE_FROM = "made_from"  # our key in config.json: which drafter, for which target
EXPORT_FIRST = "export it first: python -m drafters.export CHECKPOINT --to vllm --out FOLDER"
LOADS_AS_IT_IS = "load_drafter reads it as it is"


def read_config(folder: Path, source: str, own: str) -> dict[str, Any]:
    """Return the content of ``config.json`` in ``folder``.

    Args:
        own: what the error says to do if the folder is a checkpoint of this toolkit.

    Raises:
        ValueError: no such file, no JSON object in it, or a checkpoint of this toolkit.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{source} holds no {path.name}; a released head is a folder of that and one file of weights")
    found = json_object(readable(path), f"{source}: {path.name}")
    if "drafter_type" in found:
        raise ValueError(f"{source} is a drafter of this toolkit; {own}")
    return found


def made_from(config: Mapping[str, Any]) -> dict[str, Any]:
    """The origin that our exports write; empty for other heads."""
    found = config.get(MADE_FROM)
    return found if isinstance(found, dict) else {}


def group(config: Mapping[str, Any], key: str, source: str) -> Mapping[str, Any]:
    """The object under ``key``, empty if that is absent or null; raises ValueError for another value."""
    found = config.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"{source}: {key} must be an object of keys and values, found {shortened(found)}")
    return found or {}


def tensors(config: Mapping[str, Any], layout: Layout, bias: bool = False) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a head with this ``config``.

    Raises:
        ValueError: a size is missing or wrong.
    """
    wide = size(config, "hidden_size")
    heads = size(config, "num_attention_heads")
    head_dim = size(config, "head_dim", wide // heads)
    queries, keys = heads * head_dim, size(config, "num_key_value_heads", heads) * head_dim
    projections = {"q": [queries, wide], "k": [keys, wide], "v": [keys, wide], "o": [wide, queries]}
    found = {f"layers.0.self_attn.{name}_proj.weight": shape for name, shape in projections.items()}
    if config.get("model_type") == "qwen2" or config.get("qkv_bias"):
        found |= {f"layers.0.self_attn.{name}_proj.bias": projections[name][:1] for name in "qkv"}
    sizes = {"H": wide, "2H": 2 * wide}
    if any("I" in shape for shape in layout.tensors.values()):
        sizes["I"] = size(config, "intermediate_size")
    found |= {name: [sizes[symbol] for symbol in shape.split()] for name, shape in layout.tensors.items()}
    return found | ({layout.bias: [wide]} if bias and layout.bias else {})


def size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size in ``config``; raises ValueError if it is no whole number of at least 1."""
    value = config.get(key) if config.get(key) is not None else default
    if type(value) is not int or value < 1:
        raise ValueError(f"{CONFIG_FILE}: {key} must be a whole number of at least 1, found {shortened(value)}")
    return value


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE in the keys of transformers 5, read from these or from the older keys: type, theta, numbers of a scaling.

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
        given = {key: value for key, value in config.items() if key.startswith("rope_")}
        raise ValueError(f"{CONFIG_FILE}: RoPE is given as {shortened(given)}, which cannot be read") from None


def older_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE as readers before transformers 5 find it, which look only at ``rope_theta`` and ``rope_scaling``.

    Raises:
        ValueError: values of other types.
    """
    theta, scaling = config.get("rope_theta"), config.get("rope_scaling") or {}
    if isinstance(scaling, Mapping):
        scaling = {key: value for key, value in scaling.items() if key != "rope_theta"}
    return rope({"rope_theta": theta, "rope_scaling": scaling})


def older_keys(turning: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` of those readers, for what ``rope`` returned."""
    scaling = {key: value for key, value in turning.items() if key != "rope_theta"}
    kind = turning["rope_type"]
    return {
        "rope_theta": turning["rope_theta"],
        "rope_scaling": None if kind == "default" else scaling | {"type": kind},  # the key of the oldest readers
    }
