"""Block heads in the forms of their trainers and engines: what their config.json and tensors mean.

The forms have the same tensors. They differ in the places of keys, in the numbers of the target's states, and in what
an absent ``sample_from_anchor`` means. With the wrong layout almost no draft is accepted and no program reports it, so
a folder is refused where neither a key nor the definition of its form tells the layout (z-lab's code of August 2026,
DeepSpec, SpecForge 0.3.0, speculators 0.9.0, vLLM 0.32, SGLang 0.5.23, llama.cpp of September 2026):

==============================  ========================  ================================================
form                            states                    without ``sample_from_anchor``
==============================  ========================  ================================================
``DFlashDraftModel``            outputs of layers         fill-in: z-lab, SpecForge, vLLM, SGLang, llama.cpp
``DFlash2DraftModel``           outputs of layers         fill-in: z-lab, vLLM, SGLang
``Qwen3DSparkModel``            outputs of layers         anchor-first: DeepSpec, vLLM, SGLang, llama.cpp
``DSparkDraftModel``            outputs of layers         refused: SpecForge trains anchor-first, decodes fill-in
speculators, ``dflash(2)``      inputs of layers          fill-in: speculators, vLLM
speculators, ``dspark``         inputs of layers          refused: speculators anchor-first, vLLM fill-in
==============================  ========================  ================================================
"""

from collections.abc import Mapping
from typing import Any, get_args

import torch
from pydantic import Field
from torch import Tensor

from drafters.common.states import dflash_taps, from_inputs, from_outputs
from drafters.common.wording import shortened
from drafters.config import Amount, Vocabulary, Width
from drafters.heads.block.shape import ANCHOR_FIRST, FILL_IN, MarkovKind
from drafters.heads.forms import T2D
from drafters.heads.keys import CONFIG_FILE, Keys, check_said, made_from
from drafters.heads.states import (
    agreed_states,
    architecture_of,
    as_option,
    check_list,
    either,
    nested_layer,
    states_of,
)
from drafters.model.draft_head import D2T

DSPARK_HEADS = ("markov_head.", "confidence_head.")  # which have biases
SELECTOR, CONVS = "candidate_selector.", ("attention_conv.", "mlp_conv.")  # DFlash2's
NON_CAUSAL = "sliding_window_non_causal"  # speculators'; for its DFlash folders vLLM reads it for all layers
ANCHOR = "sample_from_anchor"  # true: anchor-first
# Architectures by who gives them.
ZLAB, DEEPSPEC, SPECFORGE = "DFlashDraftModel", "Qwen3DSparkModel", "DSparkDraftModel"
ZLAB2 = "DFlash2DraftModel"
CLASSES = {"dflash": (ZLAB, DEEPSPEC, SPECFORGE), "dspark": (DEEPSPEC, SPECFORGE, ZLAB), "dflash2": (ZLAB2,)}
SPECULATORS = "speculators_model_type"
IDS, AUX_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"  # outputs and inputs of layers
_DEFINED = {ZLAB: FILL_IN, ZLAB2: FILL_IN, DEEPSPEC: ANCHOR_FIRST}  # by architecture; the others have two readings
_GROUPS = ("dflash_config", "dspark_config")  # of keys that other forms have at the top
_STATED = f'"{ANCHOR}": true ({ANCHOR_FIRST}) or false ({FILL_IN})'
# Keys of heads that compute something else, the values that change nothing, and whose they are.
_VARIANTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "projector_type": ((*CLASSES,), "a head with another projector, as Domino's"),
    "conv_kernel_size": ((0,), "a DFlash2 head without the tensors of its convolutions and selector"),
    "selector_rank": ((0,), "a DFlash2 head without the tensors of its convolutions and selector"),
    "gru_hidden_dim": ((), "a Domino head"),
    "attention_sink_bias": ((False,), "a head with attention sinks"),
    "attention_value_scale": ((1.0,), "a head whose values are scaled"),
    "output_multiplier": ((1.0,), "a head whose logits are scaled"),
    "final_logit_softcapping": ((0.0,), "a head whose logits are capped"),
    "input_embedding_scale": ((1.0,), "a head whose embeddings are scaled"),
    "is_neox_style": ((True,), "a head with interleaved RoPE"),
    "rope_is_neox_style": ((True,), "a head with interleaved RoPE"),
    "partial_rotary_factor": ((1.0,), "a head whose RoPE turns a part of each head"),
    "use_aux_hidden_state": ((True,), "a head without fc"),
    "dspark_block_size": ((), "a head inside DeepSeek-V4's checkpoint"),
}


class BlockKeys(Keys):
    """Keys of ``config.json`` of a block head."""

    block_size: Amount | None = None
    mask_token_id: Vocabulary | None = None
    layout: str | None = None
    sample_from_anchor: bool | None = None
    dspark_bonus_anchor: bool | None = None
    is_causal: bool | None = None
    causal: bool | None = None
    sliding_window_non_causal: bool | None = None
    use_swa: bool | None = None
    swa_window_size: Amount | None = Field(None, ge=1)
    markov_rank: Width | None = None
    markov_head_type: str | None = None
    enable_confidence_head: bool | None = None
    confidence_head_with_markov: bool | None = None
    conv_kernel_size: Width | None = None
    conv_group_size: Width | None = None
    selector_rank: Width | None = None
    selector_top_k: Amount | None = None
    dflash_config: "BlockKeys | None" = None
    dspark_config: "BlockKeys | None" = None
    transformer_layer_config: "BlockKeys | None" = None


def flattened(config: Mapping[str, Any], method: str, noun: str, source: str) -> dict[str, Any]:
    """``config.json`` with the keys of its groups and of speculators' layer at the top.

    Raises:
        ValueError: a key has two values, or the form is another method's.
    """
    found, kind = dict(config), config.get(SPECULATORS)
    if kind is not None:
        if kind != method:
            raise ValueError(
                f"{source}: {SPECULATORS} is {shortened(kind)}, and its tensors are those of {noun}; "
                f"supported: {', '.join(CLASSES)}"
            )
        found = nested_layer(config, source) | {
            key: value for key, value in config.items() if key not in ("architectures", "model_type")
        }
    layer = config.get("transformer_layer_config", {})
    windows = {key: layer[key] for key in ("layer_types", "sliding_window") if key in layer}
    groups = {name: config.get(name, {}) for name in _GROUPS} | {"transformer_layer_config": windows}
    for name, group in groups.items():
        for key, value in group.items():
            if found.get(key) not in (None, value):
                raise ValueError(
                    f"{source}: {key} is {shortened(value)} in {name} and {shortened(found[key])} beside it; "
                    "correct one of them"
                )
            found[key] = value
    return found


def own_weights(weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that the module has with these ``options``: without t2d; d2t of a whole vocabulary is zeros."""
    kept = {name: value for name, value in weights.items() if name not in (T2D, D2T)}
    if (rows := options.get("draft_vocab_size")) is not None:
        kept[D2T] = weights[D2T].long() if D2T in weights else torch.zeros(rows, dtype=torch.int64)
    return kept


def refuse_variants(config: Mapping[str, Any], flat: Mapping[str, Any], method: str, source: str) -> None:
    """Raise ValueError for a head that computes something else, or that its engines would read as another method."""
    architecture = architecture_of(config)
    if config.get(SPECULATORS) is None and architecture not in CLASSES[method]:
        raise ValueError(
            f"{source}: architectures is {architecture or 'not given'}, and a DFlash or DSpark head here is "
            f"{ZLAB} (z-lab, SpecForge), {DEEPSPEC} (DeepSpec) or {SPECFORGE} (SpecForge), and a DFlash2 head {ZLAB2}; "
            f"its tensors are those of {method}"
        )
    for key, (harmless, whose) in _VARIANTS.items():
        own = method == "dflash2" and key in ("conv_kernel_size", "selector_rank")
        if flat.get(key) is not None and flat[key] not in harmless and not own:
            raise ValueError(f"{source}: {key} is {shortened(flat[key])}: it is {whose}, which is not supported")
    if architecture == ZLAB and config.get(SPECULATORS) is None and method == "dspark":
        raise ValueError(
            f"{source}: architectures is {ZLAB}, whose readers drop the Markov head among its tensors; set it to "
            f"{DEEPSPEC} or {SPECFORGE}, as it was trained"
        )


def layout_of(config: Mapping[str, Any], flat: Mapping[str, Any], method: str, source: str, given: str | None) -> str:
    """The layout by the keys that state it, else by the definition of the form, else as ``given``."""
    stated = {"made_from: layout": made_from(config).get("layout"), "layout": flat.get("layout")}
    for key, anchor_first in ((ANCHOR, True), ("dspark_bonus_anchor", False)):
        if (value := flat.get(key)) is not None:
            stated[key] = ANCHOR_FIRST if value is anchor_first else FILL_IN
    if config.get(SPECULATORS) is not None:
        defined = None if method == "dspark" else FILL_IN
    else:
        defined = _DEFINED.get(architecture_of(config))
    known = {key: value for key, value in stated.items() if value is not None}
    if not known and defined is not None:
        known = {f"{architecture_of(config)} by definition": defined}
    if not known and given is None:
        raise ValueError(
            f"{source} does not say its layout: {ANCHOR} is absent, and programs that load this form take it for "
            f"true or for false. {either(source, _STATED, f'--layout {ANCHOR_FIRST}', f'--layout {FILL_IN}')}"
        )
    if given is not None:
        known |= {"--layout": given}
    if wrong := [value for value in known.values() if value not in (FILL_IN, ANCHOR_FIRST)]:
        raise ValueError(f"{source}: layout is {shortened(wrong[0])}, and must be {FILL_IN} or {ANCHOR_FIRST}")
    if len({*known.values()}) > 1:
        told = ", ".join(f"{value} ({key})" for key, value in known.items())
        raise ValueError(f"{source} has two layouts: {told}; correct {CONFIG_FILE} or leave one of them out")
    return next(iter(known.values()))


def taps_of(
    config: Mapping[str, Any],
    flat: Mapping[str, Any],
    count: int,
    layers: int,
    source: str,
    notes: list[str],
    given: list[int] | None,
) -> list[int]:
    """Numbers of the hidden states that it reads; 2 is the output of the second layer."""
    # An empty list means an absent one.
    ids, inputs, made = flat.get(IDS) or None, flat.get(AUX_IDS) or None, made_from(config).get("taps")
    if config.get(SPECULATORS) is None and inputs is None:
        inputs = flat.get("eagle_aux_hidden_state_layer_ids") or None  # vLLM's, beside the other numbers
    for key, value in ((IDS, ids), (AUX_IDS, inputs), ("made_from: taps", made), ("--taps", given)):
        check_list(value, count, key, source)
    found = {
        IDS: None if ids is None else states_of(ids, from_outputs, IDS, source),
        AUX_IDS: None if inputs is None else states_of(inputs, from_inputs, AUX_IDS, source),
        "made_from": made,
        "--taps": given,
    }
    meaning = f"{IDS} numbers outputs of layers (hidden states - 1), {AUX_IDS} inputs (hidden states)"
    if (taps := agreed_states(found, layers, source, notes, meaning)) is None:
        key = f'"{IDS}": [...], one less each'
        key = key if config.get(SPECULATORS) is None else f'"{AUX_IDS}": [...]'
        usual = f" (the usual ones: {as_option(dflash_taps(layers, count))})" if count < layers else ""
        raise ValueError(
            f"{source} does not say which {count} hidden states of the target it reads; import it with --taps and the "
            f"numbers that it was trained with{usual}, or add them to {CONFIG_FILE} as {key}"
        )
    return taps


def number(flat: Mapping[str, Any], key: str, least: int, source: str) -> int:
    value = flat.get(key)
    if type(value) is not int or value < least:
        raise ValueError(
            f"{source}: {key} must be a whole number of at least {least}, found {shortened(value)}; add it to "
            f"{CONFIG_FILE} as it was trained"
        )
    return value


def windows_of(
    config: Mapping[str, Any], flat: Mapping[str, Any], layers: int, source: str, non_causal: bool
) -> dict[str, Any]:
    """The keys of windows and of what rows of a block see of one another.

    ===============================  ======================  =======================================================
    form                             context seen            inside the block
    ===============================  ======================  =======================================================
    z-lab, SpecForge, vLLM, SGLang   a + j - p < W           is_causal, causal; else causal in sliding layers only
    Model-Optimizer (``use_swa``)    the same, all layers    the same; it writes causal: false
    speculators                      a - W <= p              causal in sliding layers, unless sliding_window_non_causal
    ===============================  ======================  =======================================================

    ``non_causal``: what speculators takes for an absent sliding_window_non_causal.

    Raises:
        ValueError: keys that contradict each other, or do not say which layers have windows.
    """
    sliding, window = _sliding_layers(flat, layers, source)
    stated = {key: flat[key] for key in ("is_causal", "causal") if flat.get(key) is not None}
    if len({*stated.values()}) > 1:
        raise ValueError(f"{source}: {shortened(stated)} must be alike")
    if config.get(SPECULATORS) is not None:
        causal: bool | str = bool(sliding) and not flat.get(NON_CAUSAL, non_causal)
    else:
        causal = any(stated.values()) if stated else bool(sliding)
    if not sliding:
        return {"causal": causal}
    if causal and not (stated and config.get(SPECULATORS) is None):
        causal = "sliding"
    edge = "slot" if config.get(SPECULATORS) is None else "anchor"
    full = [layer for layer in range(layers) if layer not in sliding]
    return {"causal": causal, "sliding_window": window, "full_layers": full, "window_edge": edge}


def _sliding_layers(flat: Mapping[str, Any], layers: int, source: str) -> tuple[list[int], int | None]:
    """Which layers have windows, and their length."""
    types, window = flat.get("layer_types"), flat.get("sliding_window")
    if flat.get("use_swa"):
        if (size := flat.get("swa_window_size") or window) is None:
            raise ValueError(f"{source}: use_swa is true, and there is no swa_window_size; add it as it was trained")
        if flat.get(SPECULATORS) is not None:
            raise ValueError(
                f"{source} has windows with two edges: those of use_swa move with the rows of a block, those of "
                f"{SPECULATORS} end at the anchor; remove use_swa, and state layer_types and sliding_window"
            )
        if len({*(types or ())}) > 1 or (flat.get("use_sliding_window", True) and window not in (None, size)):
            raise ValueError(
                f"{source}: use_swa is true, so that all layers have windows of {size}, and beside it layer_types is "
                f"{shortened(types)} and sliding_window {shortened(window)}; correct one of them as it was trained"
            )
        return [*range(layers)], size
    if types is None and flat.get("use_sliding_window"):
        raise ValueError(
            f"{source}: use_sliding_window is true, and there are no layer_types, which say of each layer whether it "
            'has a window of its sliding_window; add them: "sliding_attention" or "full_attention"'
        )
    sliding = [layer for layer, kind in enumerate(types or ()) if kind == "sliding_attention"]
    if not sliding:
        return [], None
    if len(types or ()) != layers or window is None:
        raise ValueError(
            f"{source}: layer_types has {len(types or ())} entries for {layers} layers, and sliding_window is "
            f"{shortened(window)}; there must be an entry for each layer, and a window for sliding ones"
        )
    return sliding, window


def markov_of(flat: Mapping[str, Any], weights: Mapping[str, Tensor], source: str) -> dict[str, Any]:
    """Options of DSpark's two heads, which must agree with the tensors."""
    first = weights.get("markov_head.markov_w1.weight")
    if first is None or first.dim() != 2:
        raise ValueError(
            f"{source} has a confidence head and no Markov head (markov_head.markov_w1.weight), which it reads here"
        )
    rank = first.shape[1]
    check_said(flat, "markov_rank", rank, f"markov_w1.weight has {rank} columns", source)
    gates = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}
    kind = next((name for name, tensor in gates.items() if tensor in weights), "vanilla")
    known = ", ".join(get_args(MarkovKind))
    check_said(flat, "markov_head_type", kind, f"its tensors are those of {kind}; known: {known}", source)
    estimates, said = weights.get("confidence_head.proj.weight"), flat.get("enable_confidence_head")
    if said is not None and said != (estimates is not None):
        held = "holds no" if estimates is None else "holds a"
        raise ValueError(
            f"{source} {held} confidence_head.proj.weight, and enable_confidence_head is {shortened(said)}; set it to "
            f"{str(estimates is not None).lower()}, or complete the file"
        )
    if estimates is not None and (
        flat.get("confidence_head_with_markov") is False or estimates.shape[1] == flat["hidden_size"]
    ):
        raise ValueError(
            f"{source}: its confidence head does not read the token before (confidence_head_with_markov: false), and "
            "that of a head here does; such heads are not supported"
        )
    return {"markov_head": kind, "markov_rank": rank, "confidence_head": estimates is not None}
