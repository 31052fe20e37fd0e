"""Mistakes in a target's config.json, as errors that name the key.

transformers raises whatever its code meets: a TypeError for a null, a RuntimeError for a negative size. The key is
found by building the configuration without each key in turn.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from drafters.common.wording import shortened

# Whole numbers of 1 or more (a window may be 0: unused); a null stands for none, or for transformers' default.
SIZES: tuple[str, ...] = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
LAYERS, MOST_LAYERS = "num_hidden_layers", 4096  # above every real model; a module of a million takes an hour to make
METHODS = {"quant_method", "load_in_8bit", "load_in_4bit"}  # keys that name one; the last two in older files
LONGEST = 200  # characters of transformers' reason


def check_values(name: str, config: PretrainedConfig) -> None:
    """Raise ValueError if one of ``SIZES`` is no positive whole number, or the quantisation has no method."""
    for size in SIZES:
        key = config.attribute_map.get(size, size)
        if _is_no_size(size, value := vars(config).get(key)):
            most = f", at most {MOST_LAYERS:,}" if size == LAYERS else ""
            raise _wrong(name, key, value, f"{size}: a whole number of 1 or more{most}")
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, dict) and not METHODS & quantization.keys():
        raise _wrong(name, "quantization_config", quantization, "without quant_method")


def wrong_key(
    name: str, error: Exception, values: Mapping[str, Any], build: Callable[[dict[str, Any]], object]
) -> ValueError | None:
    """Return the error that names the key of ``values`` that made ``build`` raise ``error``; None if unknown."""
    for key, value, rest in _without_one(values):
        if key in SIZES and _is_no_size(key, value):
            return _wrong(name, key, value, reason_of(error))
        with contextlib.suppress(Exception):  # the next key may be the one
            build(rest)
            return _wrong(name, key, value, reason_of(error))
    return None


def reason_of(error: Exception) -> str:
    """Return the line of transformers' error that has the reason: the last one after a title, else the first."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = lines[-1 if lines[0].endswith(":") else 0].strip()
    return reason if len(reason) <= LONGEST else f"{reason[:LONGEST]}..."


def _is_no_size(size: str, value: Any) -> bool:
    if value is None:
        return False
    return type(value) is not int or value < (size != "sliding_window") or (size == LAYERS and value > MOST_LAYERS)


def _wrong(name: str, key: str, value: Any, reason: str) -> ValueError:
    shown = "null" if value is None else shortened(value)
    return ValueError(f"{name}: {key} is {shown} in config.json ({reason}); correct it, or take it out")


def _without_one(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each key, its value, and ``values`` without it; keys of a mapping come before the mapping itself."""
    for key, value in values.items():
        rest = {name: other for name, other in values.items() if name != key}
        if isinstance(value, Mapping):
            for inner, one, part in _without_one(value):
                yield f"{key}.{inner}", one, rest | {key: part}
        yield key, value, rest
