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
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from drafters.common.states import from_inputs, from_outputs
from drafters.common.wording import shortened
from drafters.config import validate
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.layouts import state_heads
from drafters.layouts.config import CONFIG_FILE, made_from
from drafters.layouts.released import T2D
from drafters.layouts.state_heads import (
    TAPS_KEY,
    Reading,
    architecture_of,
    as_option,
    check_list,
    check_sizes,
    check_states,
    either,
    layer_of,
    nested_layer,
    own_rows,
    shape_of,
    states_of,
    states_of_fc,
    too_short,
)
from drafters.model.draft_head import D2T
from drafters.model.layers import layer_kind

METHOD = "eagle3"
IDS = "eagle_aux_hidden_state_layer_ids"
STATES = "use_aux_hidden_state"  # false: the head reads the output of the target's final norm, without fc
GROUP = "eagle_config"  # of keys that other forms have at the top
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Architectures by who gives them. vLLM loads all three: it puts Eagle3 in front of the first.
OFFICIAL = "LlamaForCausalLM"
SGLANG = "LlamaForCausalLMEagle3"  # SpecForge's and SGLang's, which number the target's states by layers' outputs
VLLM = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}  # by kind of layer; inputs of layers
SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
ARCHITECTURES = (OFFICIAL, SGLANG, *VLLM.values(), *SPECULATORS)
_NAMES = {"midlayer.": "layers.0."} | {
    f"aux_norm_{name}.": f"fc_norm.{place}." for place, name in enumerate(("low", "mid", "high"))
}


def renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of ``Eagle3Head``, without the copies of the target's; raises as
    ``state_heads.renamed``."""
    return state_heads.renamed(weights, _NAMES)


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


def read(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    target: PretrainedConfig,
    source: str,
    taps: list[int] | None = None,
) -> Reading:
    """Read what a head is from its ``config.json`` and its ``weights`` (``renamed``).

    Args:
        target: configuration of the model that it was trained for.
        taps: the hidden states that it reads, as the user says, where the folder does not.

    Raises:
        ValueError: keys that contradict each other, the tensors or the target, or have two readings.
    """
    flat, notes, doubts = flattened(config, source), list[str](), list[str]()
    if (architecture := architecture_of(config)) not in ARCHITECTURES:
        doubts.append(f"architectures is {architecture or 'not given'}; known: {', '.join(ARCHITECTURES)}")
    check_sizes(flat, weights, target, source)
    options = _flags(config, flat, weights, source, doubts)
    count = states_of_fc(weights, flat["hidden_size"], source, "an EAGLE-3 head")
    if (said := flat.get("num_aux_hidden_states")) not in (None, count):
        raise ValueError(
            f"{source}: num_aux_hidden_states is {shortened(said)}, and fc.weight takes {count} states of the target"
        )
    options["taps"] = read_taps(config, count, target.num_hidden_layers, source, notes, taps)
    rows = own_rows(flat, weights, target.vocab_size, source)
    options |= {"own_lm_head": rows is not None} | ({"draft_vocab_size": rows} if rows != target.vocab_size else {})
    options["layer"] = layer_of(flat, weights, source, notes)
    options["layers"] = flat.get("num_hidden_layers", 1)
    options["shape"] = shape_of(flat, weights, layer_kind(target, options["layer"]).config, source)
    notes += too_short(flat, target)
    kinds, window = {*(flat.get("layer_types") or ())}, flat.get("sliding_window")
    if kinds == {"sliding_attention"} and window is not None:
        options["sliding_window"] = window
    elif "sliding_attention" in kinds or flat.get("use_sliding_window"):
        doubts.append(
            f"its window of {shortened(window)} tokens is not that of all layers by layer_types, so here they attend "
            'to all tokens before; if it was trained with the window, set "layer_types": ["sliding_attention", ...]'
        )
    if (steps := made_from(config).get("trained_steps")) is not None:
        options["trained_steps"] = steps
    found = validate(Eagle3Shape, options, source).model_dump(exclude_defaults=True, exclude_none=True)
    return Reading(found | {"taps": options["taps"]}, notes, doubts)


def flattened(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """``config.json`` with the layer's keys beside the head's, as all forms but speculators' have them.

    Raises:
        ValueError: a form of speculators without ``transformer_layer_config``.
    """
    if "speculators_model_type" not in config:
        return dict(config)
    if (kind := config["speculators_model_type"]) != METHOD:
        raise ValueError(f"{source}: speculators_model_type is {shortened(kind)}, and an EAGLE-3 head has 'eagle3'")
    layer = nested_layer(config, source)
    return layer | {key: value for key, value in config.items() if key in (*FLAGS, "draft_vocab_size", IDS, STATES)}


def read_taps(
    config: Mapping[str, Any],
    count: int,
    layers: int,
    source: str,
    notes: list[str],
    given: list[int] | None = None,
) -> list[int]:
    """Numbers of the hidden states that a head with ``count`` of them reads; 2 is the input of layer 2.

    One key has two meanings: vLLM, speculators and llama.cpp read numbers of layers whose input is taken, SpecForge
    and SGLang of layers whose output is taken, one lower. Which one is meant follows from what made_from or the user
    (``given``) says, else from the architecture, else from the numbers themselves, or not at all.

    Raises:
        ValueError: the numbers do not fit fc or the target, or have two readings.
    """
    nested = config.get(GROUP, {}).get(IDS)
    told = {"made_from: taps": made_from(config).get("taps"), "--taps": given}
    ids, usual = config.get(IDS) or nested or None, standard_taps(layers)  # an empty list means an absent one
    for key, value in (*told.items(), (IDS, ids)):
        check_list(value, count, key, source)
    if nested and config.get(IDS) not in (None, [], nested):
        raise ValueError(f"{source}: {IDS} is {config[IDS]}, and {nested} in {GROUP}; correct one of them")
    stated = next((value for value in told.values() if value is not None), None)
    if ids is None and stated is None:
        if count != len(usual):
            raise ValueError(
                f"{source} does not say which {count} hidden states of the target it reads ({IDS} in {GROUP} is "
                f"absent); import it with --taps and the numbers that it was trained with, or add {TAPS_KEY} to "
                f"{CONFIG_FILE}. State k is the one after k layers, before the target's final norm"
            )
        notes.append(f"its {CONFIG_FILE} names no states: it reads {usual}, as in all engines")
        return usual
    found: Any = stated if ids is None else _numbered(config, ids, layers, source, notes, stated)
    for key, value in told.items():
        if value not in (None, found):
            first = "made_from: taps" if ids is None else f"{IDS} {ids}"
            raise ValueError(f"{source}: {first} means the hidden states {found}, and {key} {value}; correct one")
    notes += check_states(found, layers, IDS if ids is not None else "--taps", source)
    return found


def _numbered(
    config: Mapping[str, Any],
    ids: list[int],
    layers: int,
    source: str,
    notes: list[str],
    stated: list[int] | None,
) -> list[int]:
    """The hidden states that ``ids`` mean; ``stated``: by made_from or the user."""
    architecture, usual = architecture_of(config), standard_taps(layers)
    if architecture != SGLANG or config.get(IDS):  # vLLM's and speculators' forms
        return states_of(ids, from_inputs, f"{IDS} (architectures: {architecture or 'not given'})", source)
    after = states_of(ids, from_outputs, IDS, source)
    if stated is not None:
        return ids if stated == ids else after
    if after == usual or min(ids) < 0:  # -1 is the embeddings' output, and no layer's input
        notes.append(f"its {IDS} {ids} are outputs of layers, as in SpecForge and SGLang: hidden states {after}")
        return after
    if ids == usual or max(ids) == layers:  # no layer has the output of this number
        notes.append(f"its {IDS} {ids} are inputs of layers, as in vLLM; SGLang would read the states {after}")
        return ids
    raise ValueError(
        f"{source}: {IDS} {ids} may mean the hidden states {after} (SGLang, SpecForge) or {ids} (vLLM), and the "
        f"architecture {architecture} is used with both. {either(source, TAPS_KEY, as_option(after), as_option(ids))}"
    )


def _flags(
    config: Mapping[str, Any], flat: Mapping[str, Any], weights: Mapping[str, Tensor], source: str, doubts: list[str]
) -> dict[str, Any]:
    """The four flags, which must agree with the tensors."""
    eagle = config.get(GROUP, {})
    if False in (eagle.get(STATES), flat.get(STATES)):
        raise ValueError(
            f"{source}: {STATES} is false: it reads the output of the target's final norm in place of hidden states, "
            "which is not supported. If it was trained on hidden states, set it to true"
        )
    found: dict[str, Any] = {}
    for flag in FLAGS:
        given = [part[flag] for part in (eagle, flat) if part.get(flag) is not None]
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
    if found["norm_output"] and architecture_of(config) == SGLANG and not made_from(config):
        doubts.append(
            "norm_output is true, so the output after the final norm is fed back, as in SGLang and vLLM. SpecForge up "
            f'to 0.3.0 fed back the one before it: if that trained it, set "norm_output": false in {CONFIG_FILE}, else '
            'state it with "made_from": {"norm_output": true}'
        )
    return found
