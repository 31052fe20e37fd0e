"""What the forms of heads that read the target's states have in common: EAGLE-3, DFlash and DSpark.

Such a head has one or more Llama or Qwen3 layers of the target's width, ``fc`` over the target's states, and the
target's LM head or its own over a draft vocabulary (``d2t``, ``t2d``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from drafters.common.states import disorder
from drafters.heads.forms import T2D, Stored
from drafters.heads.keys import CONFIG_FILE, check_said, rope, size
from drafters.model.draft_head import D2T, draft_ids
from drafters.model.layers import ROPES

LM_HEAD = "lm_head.weight"
TAPS_KEY = '"made_from": {"taps": [...]}'  # of an export of ours; another config.json may have it, too
SPECULATORS_VERSION = "0.9.0"  # whose form is written
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
_ROWS = {  # of the layers' matrices
    "self_attn.q_proj": ("num_attention_heads", "head_dim"),
    "self_attn.k_proj": ("num_key_value_heads", "head_dim"),
    "mlp.gate_proj": ("intermediate_size",),
}


def as_option(taps: Sequence[int]) -> str:
    """``[2, 12, 21]`` -> ``"--taps 2,12,21"``."""
    return f"--taps {','.join(map(str, taps))}"


def either(source: str, key: str, one: str, other: str) -> str:
    """What to do with a folder that has two readings: ``one`` and ``other`` are options of drafters.convert, ``key``
    is the key of config.json that tells them apart."""
    return (
        f"State it by {key} in {CONFIG_FILE}, or import it both ways: python -m drafters.convert {source} --target T "
        f"--out OUT {one} (and {other}). Then python -m eval.parity --checkpoint OUT --target T --engine ours says "
        "which accepts more"
    )


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of ``architectures``; empty if there is none."""
    found = config.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else ""


def nested_layer(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The layer's keys in a ``config.json`` of speculators, which writes only what differs from the defaults of the
    family's configuration.

    Raises:
        ValueError: there is no ``transformer_layer_config``.
    """
    if (nested := config.get("transformer_layer_config")) is None:
        raise ValueError(f"{source}: {CONFIG_FILE} has no transformer_layer_config, which describes the layer")
    known = ["hidden_size", "vocab_size", "hidden_act", "max_position_embeddings", "num_hidden_layers", *_SIZES]
    defaults: Any = Qwen3Config()
    if nested.get("model_type", "qwen3") != "qwen3":
        defaults = LlamaConfig()
        known = [key for key in known if key not in ("num_key_value_heads", "head_dim")]  # follow from other keys
    return {"model_type": defaults.model_type} | {key: getattr(defaults, key) for key in known} | dict(nested)


def check_sizes(
    flat: Mapping[str, Any], stored: Stored, target: PretrainedConfig, own_biases: tuple[str, ...] = ()
) -> None:
    """Raise ValueError for sizes of another target, and for what the heads here have not.

    ``own_biases``: beginnings of the names of tensors that may have one.
    """
    weights, source = stored.weights, stored.source
    for key in ("hidden_size", "vocab_size"):
        if size(flat, key) != getattr(target, key):
            raise ValueError(
                f"{source}: {key} is {flat[key]:,} in {CONFIG_FILE}, and {getattr(target, key):,} in the target; give "
                "the model that it was trained for: --target MODEL"
            )
    width = f"hidden_size {flat['hidden_size']}; a head of another width than its target has an embedding of its own, "
    check_said(flat, "target_hidden_size", flat["hidden_size"], f"{width}and cannot be read here", source)
    named = [name for name in weights if name.endswith(".bias") and not name.startswith(own_biases)]
    biases = [name for name in named if weights[name].any()]
    stated = [f"{key}: true" for key in ("attention_bias", "mlp_bias", "bias") if flat.get(key)]
    if biases or stated:
        raise ValueError(f"{source} has biases ({', '.join(biases or stated)}), and a head here has none")
    check_said(flat, "hidden_act", "silu", "a head here has 'silu'", source)
    check_said(flat, "logit_scale", 1.0, "a head here has none", source)


def states_of_fc(weights: Mapping[str, Tensor], wide: int, source: str, noun: str) -> int:
    """The number of the target's states that ``fc`` takes.

    Raises:
        ValueError: no such matrix.
    """
    if (fc := weights.get("fc.weight")) is None or fc.dim() != 2:
        raise ValueError(f"{source} holds no matrix fc.weight, which {noun} has")
    count, rest = divmod(fc.shape[1], wide)
    if rest or not count:
        raise ValueError(f"{source}: fc.weight is {list(fc.shape)}, and its inputs must be a multiple of {wide}")
    return count


def check_list(value: list[int] | None, count: int, key: str, source: str) -> None:
    """Raise ValueError unless ``value`` is None, or the numbers of as many states as ``fc`` takes."""
    if value is not None and len(value) != count:
        raise ValueError(
            f"{source}: {key} names {len(value)} states, {value}, and fc.weight takes {count} of the target's width"
        )


def states_of(ids: Sequence[int], read: Callable[[Sequence[int]], list[int]], key: str, source: str) -> list[int]:
    """The states of the numbers ``ids`` under ``key``; ``read``: ``from_inputs`` or ``from_outputs``."""
    try:
        return read(ids)
    except ValueError as error:
        raise ValueError(f"{source}: {key} is {list(ids)}: {error}") from None


def check_states(taps: Sequence[int], layers: int, key: str, source: str) -> list[str]:
    """The note on states named twice or in another order than the target's, empty for others; ``key`` names them.

    Raises:
        ValueError: a target of this number of layers has no such states.
    """
    if min(taps) < 0 or max(taps) > layers:
        raise ValueError(
            f"{source} reads the hidden states {list(taps)}, and the target has 0 (embeddings) to {layers}; correct "
            f"{key}"
        )
    if (wrong := disorder(taps)) is None:
        return []
    return [
        f"it reads the hidden states {list(taps)} by {key} ({wrong.partition(';')[0]}); engines hand over each once, "
        "in the order of the layers. Make sure that it was trained so"
    ]


def agreed_states(
    found: Mapping[str, list[int] | None], layers: int, source: str, notes: list[str], fix: str
) -> list[int] | None:
    """The states by the keys that name them; None if none does.

    Raises:
        ValueError: two keys name different ones, or a target of this number of ``layers`` has no such states.
    """
    known = {key: taps for key, taps in found.items() if taps is not None}
    if not known:
        return None
    first, taps = next(iter(known.items()))
    if other := next((key for key, value in known.items() if value != taps), None):
        raise ValueError(f"{source}: {first} means the hidden states {taps}, and {other} {known[other]}; {fix}")
    notes += check_states(taps, layers, first, source)
    return taps


def own_rows(flat: Mapping[str, Any], weights: Mapping[str, Tensor], vocab_size: int, source: str) -> int | None:
    """Rows of the head's own LM head; None if it drafts with the target's.

    Raises:
        ValueError: d2t, t2d, the LM head's rows and ``draft_vocab_size`` do not agree.
    """
    head, offsets, chosen = (weights.get(name) for name in (LM_HEAD, D2T, T2D))
    said = flat.get("draft_vocab_size")
    if head is None:
        if offsets is not None or said not in (None, vocab_size):
            what = D2T if offsets is not None else f"draft_vocab_size {said:,}"
            raise ValueError(f"{source} has a draft vocabulary ({what}), and no {LM_HEAD}: it is incomplete")
        return None
    rows = len(head)
    check_said(flat, "draft_vocab_size", rows, f"{LM_HEAD} has {rows:,} rows", source)
    if offsets is None:
        if rows != vocab_size:
            raise ValueError(
                f"{source}: {LM_HEAD} has {rows:,} rows for {vocab_size:,} tokens, and there is no {D2T}, which "
                "says for which tokens; the file is incomplete"
            )
        return rows
    if offsets.dtype not in (torch.int64, torch.int32) or list(offsets.shape) != [rows]:
        kind = str(offsets.dtype).removeprefix("torch.")
        raise ValueError(f"{source}: {D2T} is {list(offsets.shape)} of {kind}, and must be [{rows}] of int64")
    try:
        ids = draft_ids(offsets.long(), vocab_size)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    if chosen is not None:
        expected = torch.zeros(vocab_size, dtype=torch.bool)
        expected[ids] = True
        if chosen.shape != expected.shape or not torch.equal(chosen.bool(), expected):
            raise ValueError(
                f"{source}: {T2D} {list(chosen.shape)} marks {int(chosen.sum()):,} tokens, which are not the {rows:,} "
                f"of {D2T}: they are of different trainings"
            )
    return rows


def layer_of(flat: Mapping[str, Any], weights: Mapping[str, Tensor], source: str, notes: list[str]) -> str:
    """The kind of the layers, by their tensors; raises ValueError for Qwen3's layers without their norms."""
    norm, said = "layers.0.self_attn.q_norm.weight", flat.get("model_type")
    if norm not in weights and said == "qwen3":
        raise ValueError(
            f"{source}: model_type is 'qwen3', whose layers have norms of queries and keys, and there is no {norm}: "
            'the file is incomplete. If it was trained without them, set "model_type": "llama"'
        )
    if norm in weights and said == "llama":
        notes.append(f"model_type is 'llama' in its {CONFIG_FILE}, and its layers have Qwen3's norms: read as qwen3")
    return "qwen3" if norm in weights else "llama"


def shape_of(flat: Mapping[str, Any], weights: Mapping[str, Tensor], ours: Any, source: str) -> dict[str, Any]:
    """Where the layers differ from those that the target would give, which have the configuration ``ours``.

    Raises:
        ValueError: RoPE of another kind, or other sizes than the tensors'.
    """
    heads = size(flat, "num_attention_heads")
    theirs: dict[str, Any] = {
        "intermediate_size": size(flat, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": flat.get("num_key_value_heads") or heads,
        "head_dim": flat.get("head_dim") or flat["hidden_size"] // heads,
        "rms_norm_eps": float(flat.get("rms_norm_eps") or 1e-6),
    }
    _check_layers(flat, theirs, weights, source)
    found = {key: value for key, value in theirs.items() if value != getattr(ours, key)}
    turning = rope(flat)
    if (kind := turning["rope_type"]) not in ROPES:
        raise ValueError(f"{source}: its RoPE is of type {kind!r} (rope_type); a head here has {', '.join(ROPES)}")
    if turning != rope(ours.to_dict()):
        found["rope_parameters"] = turning
    return found


def _check_layers(
    flat: Mapping[str, Any], sizes: Mapping[str, Any], weights: Mapping[str, Tensor], source: str
) -> None:
    """Raise ValueError unless the tensors have as many layers, and as many rows, as config.json says."""
    layers, said = len({name.split(".")[1] for name in weights if name.startswith("layers.")}), "num_hidden_layers"
    if flat.get(said, 1) != layers:
        raise ValueError(f"{source}: {said} is {flat.get(said, 1)} in {CONFIG_FILE}, and its tensors are of {layers}")
    for name, keys in _ROWS.items():
        rows = math.prod(sizes[key] for key in keys)
        if (matrix := weights.get(f"layers.0.{name}.weight")) is not None and len(matrix) != rows:
            raise ValueError(
                f"{source}: {' * '.join(keys)} is {rows:,} by {CONFIG_FILE}, and {name} has {len(matrix):,} rows"
            )


def too_short(flat: Mapping[str, Any], target: PretrainedConfig) -> list[str]:
    """The note that engines would stop drafting at a position before the target's last."""
    longest = flat.get("max_position_embeddings")
    if longest is None or longest >= target.max_position_embeddings:
        return []
    return [
        f"max_position_embeddings is {longest:,} in its {CONFIG_FILE}, and {target.max_position_embeddings:,} in "
        "the target: engines would stop drafting there; here it drafts as far as the target goes"
    ]


def speculators_keys(
    algorithm: str, architecture: str, tokens: int, layer: Mapping[str, Any], target: PretrainedConfig, name: str
) -> dict[str, Any]:
    """Keys of ``config.json`` in the form of speculators; ``tokens``: of a draft. ``name``: of the target."""
    proposal = {"proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1}
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | {"accept_tolerance": 0.0}],
            "verifier": {"name_or_path": name, "architectures": list(target.architectures or [])},
        },
        "transformer_layer_config": dict(layer),
    }
