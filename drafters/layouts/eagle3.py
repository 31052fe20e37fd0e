"""EAGLE-3 heads in the forms of their trainers and engines: what their config.json and tensors mean.

The forms share tensors and differ in names, in the numbers of the target's states, and in what an absent key means. A
wrong guess costs acceptance and no program reports it, so a config.json with two readings is refused here.

What engines take an absent key for (vLLM 0.32, SGLang 0.5.23, the official code of February 2026):

===========================================  ===========================================================
absent key                                   reading
===========================================  ===========================================================
``eagle_aux_hidden_state_layer_ids``         hidden states [2, n // 2, n - 3]: all of them
``norm_before_residual``                     false; in the form of speculators: vLLM true, speculators false
``norm_before_fc``, ``fc_norm``              false
``norm_output``                              false (SpecForge up to 0.3.0: true, for the input of the LM head)
``rope_theta``, ``rms_norm_eps``             10000, 1e-6
``draft_vocab_size``                         the target's vocabulary
``lm_head.weight``                           the target's LM head (vLLM, SGLang, llama.cpp)
``num_key_value_heads``, ``head_dim``        ``num_attention_heads``, ``hidden_size / num_attention_heads``
===========================================  ===========================================================
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from drafters.common.states import from_inputs, from_outputs
from drafters.common.wording import shortened
from drafters.layouts.config import CONFIG_FILE, made_from, rope, size
from drafters.methods.eagle3 import Eagle3Options, head_kind
from drafters.model.draft_head import D2T, draft_ids
from drafters.model.layers import ROPES

METHOD = "eagle3"
T2D = "t2d"  # bool [V]: which of the target's tokens are draft tokens
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Architectures by who gives them. vLLM loads all three: it puts Eagle3 in front of the first.
OFFICIAL = "LlamaForCausalLM"
SGLANG = "LlamaForCausalLMEagle3"  # SpecForge's and SGLang's, which number the target's states by layers' outputs
VLLM = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}  # by kind of layer; inputs of layers
SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
ADD_TAPS = f'add "made_from": {{"taps": [...]}} to {CONFIG_FILE}, with the numbers of the hidden states'
_NAMES = {"midlayer.": "layers.0."} | {
    f"aux_norm_{name}.": f"fc_norm.{place}." for place, name in enumerate(("low", "mid", "high"))
}
_LEFT_OUT = ("verifier_norm.weight", "verifier_lm_head.weight")  # speculators': the target's, not read again
_SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")


class Reading(NamedTuple):
    """What a head's config.json and tensors say: options of ``Eagle3Options``, and notes for the user."""

    options: dict[str, Any]
    notes: list[str]


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of ``Eagle3Head``, without the copies of the target's.

    Raises:
        ValueError: two tensors of one name.
    """
    found: dict[str, Tensor] = {}
    for given, value in weights.items():
        name = given.removeprefix("model.")
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        if name in found:
            raise ValueError(f"two tensors of the file are {name} (one is called {given}); remove one of them")
        if name not in _LEFT_OUT:
            found[name] = value
    return found


def own_weights(weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that ``Eagle3Head`` has with these ``options``; those left out say nothing more.

    These are t2d, the d2t of a whole vocabulary, and biases of zeros.
    """
    left_out = {T2D} if "draft_vocab_size" in options else {T2D, D2T}
    kept = {name: value for name, value in weights.items() if name not in left_out and not name.endswith(".bias")}
    return kept | ({D2T: kept[D2T].long()} if D2T in kept else {})


def standard_taps(layers: int) -> list[int]:
    """The hidden states that engines hand over of a target with this number of layers, unless config.json names others;
    of fewer than 7 layers these are not ``eagle3_taps``."""
    return [2, layers // 2, layers - 3]


def read(config: Mapping[str, Any], weights: Mapping[str, Tensor], target: PretrainedConfig, source: str) -> Reading:
    """Read what a head is from its ``config.json`` and its ``weights`` (``renamed``).

    Args:
        target: configuration of the model that it was trained for.

    Raises:
        ValueError: keys that contradict each other, the tensors or the target, or have two readings.
    """
    flat, notes = flattened(config, source), list[str]()
    _check_sizes(flat, weights, target, source)
    options = _flags(config, flat, weights, source, notes)
    count = _taps_of_fc(weights, flat["hidden_size"], flat, source)
    options["taps"] = read_taps(config, count, target.num_hidden_layers, source, notes)
    options |= _vocabulary(flat, weights, target.vocab_size, source)
    options["layer"] = "qwen3" if "layers.0.self_attn.q_norm.weight" in weights else "llama"
    options["layers"] = size(flat, "num_hidden_layers", 1)
    if shape := _shape(flat, options, target, source):
        options["shape"] = shape
    longest = flat.get("max_position_embeddings")
    if isinstance(longest, int) and longest < target.max_position_embeddings:
        notes.append(
            f"max_position_embeddings is {longest:,} in its {CONFIG_FILE}, and {target.max_position_embeddings:,} in "
            "the target: engines would stop drafting there; here it drafts as far as the target goes"
        )
    kinds, window = {*(flat.get("layer_types") or ())}, flat.get("sliding_window")
    if kinds == {"sliding_attention"} and isinstance(window, int):
        options["sliding_window"] = window
    elif "sliding_attention" in kinds or flat.get("use_sliding_window"):
        window = shortened(window)
        notes.append(f"it was trained with a window of {window} tokens; here its layers attend to all tokens before")
    defaults = Eagle3Options(taps=options["taps"]).model_dump()
    return Reading({key: value for key, value in options.items() if value != defaults[key] or key == "taps"}, notes)


def flattened(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``config.json`` with the layer's keys beside the head's, as all forms but speculators' have them.

    Raises:
        ValueError: a form of speculators without ``transformer_layer_config``.
    """
    if "speculators_model_type" not in config:
        return dict(config)
    if (kind := config["speculators_model_type"]) != METHOD:
        raise ValueError(f"{source}: speculators_model_type is {shortened(kind)}, and an EAGLE-3 head has 'eagle3'")
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, Mapping):
        raise ValueError(f"{source}: {CONFIG_FILE} has no transformer_layer_config, which describes the layer")
    # speculators writes only what differs from the defaults of the family's configuration.
    family: Any = Qwen3Config if nested.get("model_type", "qwen3") == "qwen3" else LlamaConfig
    known = ("hidden_size", "vocab_size", "hidden_act", "max_position_embeddings", "num_hidden_layers", *_SIZES)
    filled = family(**{key: nested[key] for key in known if nested.get(key) is not None})
    layer = {"model_type": family.model_type} | {key: getattr(filled, key) for key in known} | dict(nested)
    return layer | {key: value for key, value in config.items() if key in (*FLAGS, "draft_vocab_size", IDS)}


def read_taps(config: Mapping[str, Any], count: int, layers: int, source: str, notes: list[str]) -> list[int]:
    """Numbers of the hidden states that a head with ``count`` of them reads; 2 is the input of layer 2.

    One key has two meanings: vLLM, speculators and llama.cpp read numbers of layers whose input is taken, SpecForge
    and SGLang of layers whose output is taken, one lower. Which one is meant follows from the architecture, else from
    the numbers themselves, or not at all.

    Raises:
        ValueError: the numbers do not fit fc or the target, or have two readings.
    """
    made = made_from(config).get("taps")
    eagle = config.get("eagle_config") or {}
    nested, ids, usual = eagle.get(IDS), config.get(IDS) or eagle.get(IDS), standard_taps(layers)
    for key, value in (("made_from: taps", made), (IDS, ids)):
        if value is not None and not (isinstance(value, list) and all(type(number) is int for number in value)):
            raise ValueError(f"{source}: {key} must be a list of whole numbers, found {shortened(value)}")
        if value is not None and len(value) != count:
            raise ValueError(
                f"{source}: {key} names {len(value)} states, {value}, and fc.weight takes {count} of the target's width"
            )
    if nested is not None and config.get(IDS) not in (None, nested):
        raise ValueError(f"{source}: {IDS} is {config[IDS]}, and {nested} in eagle_config; correct one of them")
    if ids is None and made is None:
        if count != len(usual):
            raise ValueError(f"{source} does not say which {count} hidden states of the target it reads; {ADD_TAPS}")
        notes.append(f"its {CONFIG_FILE} names no states: it reads {usual}, as in all engines")
        return usual
    found: list[int] = made if ids is None else _numbered(config, ids, usual, layers, source, notes)  # type: ignore
    if made is not None and made != found:
        raise ValueError(f"{source}: {IDS} {ids} means the hidden states {found}, and made_from says {made}")
    if min(found) < 0 or max(found) > layers:
        raise ValueError(f"{source} reads the hidden states {found}, and the target has 0 (embeddings) to {layers}")
    return found


def _numbered(
    config: Mapping[str, Any], ids: list[int], usual: list[int], layers: int, source: str, notes: list[str]
) -> list[int]:
    """The hidden states that ``ids`` mean."""
    architecture, after = architecture_of(config), from_outputs(ids)
    made = made_from(config).get("taps")
    if architecture != SGLANG or config.get(IDS):  # vLLM's and speculators' forms
        return from_inputs(ids)
    if made is not None:
        return ids if made == ids else after
    if after == usual:
        notes.append(f"its {IDS} {ids} are outputs of layers, as in SpecForge and SGLang: hidden states {after}")
        return after
    if ids == usual or max(ids) == layers:  # no layer has the output of this number
        notes.append(f"its {IDS} {ids} are inputs of layers, as in vLLM; SGLang would read the states {after}")
        return ids
    raise ValueError(
        f"{source}: {IDS} {ids} may mean the hidden states {after} (SGLang, SpecForge) or {ids} (vLLM), and the "
        f"architecture {architecture} is used with both; {ADD_TAPS}"
    )


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first of ``architectures``; empty if there is none."""
    found = config.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else ""


def _check_sizes(flat: Mapping[str, Any], weights: Mapping[str, Tensor], target: PretrainedConfig, source: str) -> None:
    """Raise ValueError for sizes of another target, and for what the head here has not."""
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
    biases = [name for name in weights if name.endswith(".bias") and weights[name].any()]
    if biases or any(flat.get(key) for key in ("attention_bias", "mlp_bias", "bias")):
        raise ValueError(f"{source} has biases ({', '.join(biases) or 'by its config.json'}), and a head here has none")
    if (activation := flat.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{source}: hidden_act is {shortened(activation)}, and a head here has 'silu'")
    if (scale := flat.get("logit_scale", 1.0)) != 1.0:
        raise ValueError(f"{source}: logit_scale is {shortened(scale)}, and a head here has none")


def _flags(
    config: Mapping[str, Any], flat: Mapping[str, Any], weights: Mapping[str, Tensor], source: str, notes: list[str]
) -> dict[str, Any]:
    """The four flags, which must agree with the tensors."""
    eagle = config.get("eagle_config") or {}
    found: dict[str, Any] = {}
    for flag in FLAGS:
        given = [part[flag] for part in (eagle, flat) if part.get(flag) is not None]
        if any(type(value) is not bool for value in given):
            raise ValueError(f"{source}: {flag} must be true or false, found {shortened(given)}")
        if len({*given}) > 1:
            raise ValueError(f"{source}: {flag} is {given[0]} in eagle_config and {given[1]} beside it; remove one")
        found[flag] = bool(given and given[0])
    if "speculators_model_type" in config and flat.get("norm_before_residual") is None:
        raise ValueError(
            f"{source}: norm_before_residual is absent, which vLLM takes for true and speculators for false; add it to "
            f"{CONFIG_FILE} as it was trained"
        )
    found["fc_norm"] |= bool(flat.get("use_aux_norm"))  # SGLang's former name
    norms = {"fc_norm": "fc_norm.0.weight", "norm_before_fc": "input_norm.weight"}
    for flag, name in norms.items():
        if found[flag] != (name in weights):
            held, said = ("holds", "is not true") if name in weights else ("does not hold", "is true")
            raise ValueError(
                f"{source} {held} {name}, and {flag} {said} in {CONFIG_FILE}: engines would skip the norm or leave it "
                f'as it was initialised; set "{flag}": {str(name in weights).lower()}, or complete the file'
            )
    if found["fc_norm"] and found["norm_before_fc"]:
        raise ValueError(
            f"{source}: norm_before_fc and fc_norm are both true, two norms in one place; set one to false"
        )
    if found["norm_output"] and architecture_of(config) == SGLANG and not made_from(config):
        notes.append(
            "norm_output is true, so the output after the final norm is fed back, as in SGLang and vLLM. SpecForge up "
            f'to 0.3.0 fed back the one before it: if that trained it, set "norm_output": false in {CONFIG_FILE}'
        )
    return found


def _taps_of_fc(weights: Mapping[str, Tensor], wide: int, flat: Mapping[str, Any], source: str) -> int:
    """The number of hidden states that ``fc`` takes."""
    if (fc := weights.get("fc.weight")) is None or fc.dim() != 2:
        raise ValueError(f"{source} holds no matrix fc.weight, which an EAGLE-3 head has")
    count, rest = divmod(fc.shape[1], wide)
    if rest or not count:
        raise ValueError(f"{source}: fc.weight is {list(fc.shape)}, and its inputs must be a multiple of {wide}")
    if (said := flat.get("num_aux_hidden_states")) not in (None, count):
        raise ValueError(
            f"{source}: num_aux_hidden_states is {shortened(said)}, and fc.weight {list(fc.shape)} takes {count} states"
        )
    return count


def _vocabulary(flat: Mapping[str, Any], weights: Mapping[str, Tensor], vocab_size: int, source: str) -> dict[str, Any]:
    """Options of the LM head; d2t, t2d, the LM head's rows and ``draft_vocab_size`` must agree."""
    head, offsets, chosen = (weights.get(name) for name in ("lm_head.weight", D2T, T2D))
    said = flat.get("draft_vocab_size")
    if head is None:
        if offsets is not None or said not in (None, vocab_size):
            raise ValueError(
                f"{source} has a draft vocabulary ({D2T}, {said}), and no lm_head.weight: it is incomplete"
            )
        return {"own_lm_head": False}
    rows = len(head)
    if said not in (None, rows):
        raise ValueError(f"{source}: draft_vocab_size is {shortened(said)}, and lm_head.weight has {rows:,} rows")
    if offsets is None:
        if rows != vocab_size:
            raise ValueError(
                f"{source}: lm_head.weight has {rows:,} rows for {vocab_size:,} tokens, and there is no {D2T}, which "
                "says for which tokens; the file is incomplete"
            )
        return {}
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
    return {} if rows == vocab_size else {"draft_vocab_size": rows}


def _shape(
    flat: Mapping[str, Any], options: Mapping[str, Any], target: PretrainedConfig, source: str
) -> dict[str, Any]:
    """Where the layer differs from the one that the target would give."""
    kind = head_kind(target, Eagle3Options(**{key: options[key] for key in ("taps", "layer", "layers")}))
    ours: Any = kind.config
    heads = size(flat, "num_attention_heads")
    theirs: dict[str, Any] = {
        "intermediate_size": size(flat, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": size(flat, "num_key_value_heads", heads),
        "head_dim": size(flat, "head_dim", flat["hidden_size"] // heads),
        "rms_norm_eps": float(flat.get("rms_norm_eps", 1e-6)),
    }
    found = {key: value for key, value in theirs.items() if value != getattr(ours, key)}
    turning = rope(flat)
    if turning["rope_type"] not in ROPES:
        raise ValueError(f"{source}: its RoPE is of type {turning['rope_type']!r}; a head here has {', '.join(ROPES)}")
    if turning != rope(ours.to_dict()):
        found["rope_parameters"] = turning
    return found
