"""What the forms of heads that read the target's states have in common: EAGLE-3, DFlash and DSpark.

Such a head has one or more Llama or Qwen3 layers of the target's width, ``fc`` over the target's states, and the
target's LM head or its own over a draft vocabulary (``d2t``, ``t2d``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from drafters.common.states import disorder, state_name
from drafters.common.wording import shortened
from drafters.hub.declared import READERS
from drafters.layouts.config import CONFIG_FILE, made_from, older_keys, rope, size
from drafters.layouts.released import (
    DSPARK_HEADS,
    EMBEDDING,
    T2D,
    another_target,
    rope_problems,
    tensor_problems,
    weights_text,
)
from drafters.model.draft_head import D2T, draft_ids
from drafters.model.layers import ROPES

LM_HEAD = "lm_head.weight"
TAPS_KEY = '"made_from": {"taps": [...]}'  # of an export of ours; another config.json may have it, too
SPECULATORS_VERSION = "0.9.0"  # whose form is written
_LEFT_OUT = ("verifier_norm.weight", "verifier_lm_head.weight")  # speculators': the target's, not read again
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
_ROWS = {  # of the layers' matrices
    "self_attn.q_proj": ("num_attention_heads", "head_dim"),
    "self_attn.k_proj": ("num_key_value_heads", "head_dim"),
    "mlp.gate_proj": ("intermediate_size",),
}
_LAYER = "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act "
_LAYER += "max_position_embeddings initializer_range rms_norm_eps bos_token_id eos_token_id pad_token_id"


class Reading(NamedTuple):
    """What a head's config.json and tensors say.

    Attributes:
        notes: for the user. doubts: notes on what may lower acceptance; an import tells them, the check refuses them.
    """

    options: dict[str, Any]
    notes: list[str]
    doubts: list[str]


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


def renamed(weights: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors under our names, without the copies of the target's; ``names``: parts of names, and ours for them.

    Raises:
        ValueError: two tensors of one name.
    """
    found: dict[str, Tensor] = {}
    for given, value in weights.items():
        name = given.removeprefix("model.")
        for old, new in names.items():
            name = name.replace(old, new)
        if name in found:
            raise ValueError(f"two tensors of the file are {name} (one is called {given}); remove one of them")
        if name not in _LEFT_OUT:
            found[name] = value
    return found


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


def check_sizes(flat: Mapping[str, Any], weights: Mapping[str, Tensor], target: PretrainedConfig, source: str) -> None:
    """Raise ValueError for sizes of another target, and for what the heads here have not."""
    for key in ("hidden_size", "vocab_size"):
        if size(flat, key) != getattr(target, key):
            raise ValueError(
                f"{source}: {key} is {flat[key]:,} in {CONFIG_FILE}, and {getattr(target, key):,} in the target; give "
                "the model that it was trained for: --target MODEL"
            )
    if (width := flat.get("target_hidden_size")) not in (None, flat["hidden_size"]):
        raise ValueError(
            f"{source}: target_hidden_size is {shortened(width)}, and hidden_size {flat['hidden_size']}; a head of "
            "another width than its target has an embedding of its own, and cannot be read here"
        )
    named = [name for name in weights if name.endswith(".bias") and not name.startswith(DSPARK_HEADS)]
    biases = [name for name in named if weights[name].any()]
    stated = [f"{key}: true" for key in ("attention_bias", "mlp_bias", "bias") if flat.get(key)]
    if biases or stated:
        raise ValueError(f"{source} has biases ({', '.join(biases or stated)}), and a head here has none")
    if (activation := flat.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{source}: hidden_act is {shortened(activation)}, and a head here has 'silu'")
    if (scale := flat.get("logit_scale", 1.0)) != 1.0:
        raise ValueError(f"{source}: logit_scale is {shortened(scale)}, and a head here has none")


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
    if said not in (None, rows):
        raise ValueError(f"{source}: draft_vocab_size is {shortened(said)}, and {LM_HEAD} has {rows:,} rows")
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


def told_state(tap: int, layers: int) -> str:
    """The target's hidden state ``tap`` in all numberings; the last one is no ``hidden_states`` of transformers, which
    norms it."""
    if tap == layers:
        return f"output of layer {tap - 1}, before the target's final norm"
    return f"input of layer {tap} = {state_name(tap)}"


def with_draft_vocabulary(weights: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The tensors of an export: t2d beside the d2t of a part of the vocabulary, no d2t for all of it."""
    found = dict(weights)
    if (offsets := found.pop(D2T, None)) is not None and len(offsets) < vocab_size:
        chosen = torch.zeros(vocab_size, dtype=torch.bool)
        chosen[draft_ids(offsets, vocab_size)] = True
        found |= {D2T: offsets, T2D: chosen}
    return found


def layer_keys(shape: Any, kind: str, layers: int) -> dict[str, Any]:
    """Keys of ``config.json`` that describe the decoder layers; ``shape``: their configuration."""
    turning = rope(shape.to_dict())
    found = {key: getattr(shape, key) for key in _LAYER.split()} | {"model_type": kind}
    found |= {"num_hidden_layers": layers, "attention_bias": False, "mlp_bias": False}
    return found | {"tie_word_embeddings": False, "rope_parameters": turning, **older_keys(turning)}


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


def problems(
    config: Mapping[str, Any],
    flat: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    head: Callable[[], nn.Module],
    target: PretrainedConfig,
    positions: int,
) -> list[str]:
    """What engines would load without a word, in words: RoPE, positions, and tensors that are not those of ``head``.

    Args:
        flat: ``config`` with the layer's keys beside the head's. weights: under our names.
        head: makes the module. positions: what an absent ``max_position_embeddings`` means.
    """
    layer = config.get("transformer_layer_config", config)
    found = rope_problems(layer)
    if (trained := made_from(config).get("rope")) not in (None, rope(layer)):
        found.append(f"RoPE is {rope(layer)}, and was {trained} in training")
    if (longest := flat.get("max_position_embeddings") or positions) < target.max_position_embeddings:
        found.append(
            f"max_position_embeddings is {longest:,}, and {target.max_position_embeddings:,} in the target: acceptance "
            "falls to nothing there"
        )
    with torch.device("meta"):
        wanted = {name: list(value.shape) for name, value in head().state_dict().items()}
    said = flat.get("dtype") or flat.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    return found + tensor_problems(weights, wanted, (EMBEDDING, T2D), said)


def loaded_by(
    to: str, refused: Mapping[str, str | None], no_target: Mapping[str, str | None]
) -> tuple[tuple[str, ...], list[str]]:
    """The programs that load a head in the form of ``to``, and a notice if ``to`` cannot run its target.

    Args:
        refused: for each program, why it does not serve the head; None if it does. no_target: why it cannot run the
            target beside such a head.
    """
    able = tuple(one for one in READERS if refused[one] is None and (one == to or no_target[one] is None))
    if no_target[to] is None:
        return able, []
    return able, [f"{READERS[to]} cannot serve this today: {no_target[to]}; the folder has its layout"]


def served_text(
    folder: Path,
    noun: str,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    refused: Mapping[str, str | None],
    notes: Sequence[str],
    to: str | None,
    target: str,
) -> str:
    """What a checked folder is, in words, and its ``notes`` in lines below.

    Args:
        refused: for each program, why it does not serve the head as it was trained. to: the one that must; None: any.

    Raises:
        ValueError: ``to`` does not, or none does, or the head is for another target.
    """
    if found := another_target(config, target):
        raise ValueError(f"{folder}: {found}")
    if to is not None and refused[to] is not None:
        raise ValueError(f"{folder} is not for {READERS[to]}: {refused[to]}")
    if not (able := [READERS[one] for one, reason in refused.items() if reason is None]):
        reasons = "; ".join(f"not for {READERS[one]}: {reason}" for one, reason in refused.items())
        raise ValueError(f"{folder} is a head that none of its readers can serve: {reasons}")
    found = f"{folder} is {noun} for {' and '.join(able)}, {weights_text(weights)}, for {target}"
    return "\n".join([found, *(f"note: {note}" for note in notes)])
