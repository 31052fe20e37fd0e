"""DFlash and DSpark heads for other programs: config.json and tensors, what each cannot serve, and the check."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.common.states import to_inputs, to_outputs
from drafters.common.wording import dtype_name
from drafters.config import Config, validate
from drafters.hub.checkpoint import load_state
from drafters.hub.declared import READERS
from drafters.layouts.block import (
    ANCHOR,
    ANCHOR_FIRST,
    AUX_IDS,
    DEEPSPEC,
    FILL_IN,
    IDS,
    METHODS,
    NOUNS,
    SPECFORGE,
    SPECULATORS,
    ZLAB,
    check_folder,
    flattened,
    own_weights,
    read,
    renamed,
)
from drafters.layouts.config import MADE_FROM, rope
from drafters.layouts.readme import Form
from drafters.layouts.released import block_method, in_one_dtype
from drafters.layouts.state_heads import (
    architecture_of,
    layer_keys,
    loaded_by,
    problems,
    served_text,
    speculators_keys,
    told_state,
    with_draft_vocabulary,
)
from drafters.methods import drafter_class
from drafters.methods.block import BlockShape, DSparkShape
from drafters.model.files import load_config_only
from drafters.model.layers import layer_kind

NON_CAUSAL = "sliding_window_non_causal"  # speculators'; vLLM reads it for all layers
# Programs that load a folder of this form.
_LOADED_BY = {ZLAB: ("official", "vllm", "sglang", "llama.cpp"), DEEPSPEC: ("vllm", "sglang", "llama.cpp")}
_LOADED_BY |= {SPECULATORS: ("vllm", "speculators")}
# Families of targets, by model_type, whose classes in SGLang 0.5.23 hand over states for block drafters.
_SGLANG_TARGETS = {"deepseek_v2", "deepseek_v3", "gemma4", "gemma4_text", "glm4_moe_lite", "gpt_oss", "lfm2"}
_SGLANG_TARGETS |= {"lfm2_moe", "llama", "mistral", "nemotron_h", "qwen3", "qwen3_moe", "qwen3_next"}
_SLOTS = {
    FILL_IN: "slot k predicts the token k after the anchor, slot 0 nothing",
    ANCHOR_FIRST: "slot k predicts the token k + 1 after the anchor",
}


def form(
    checkpoint: str,
    to: str,
    options: BlockShape,
    drafting: Config,
    target: PretrainedConfig,
    weights: dict[str, Tensor],
    origin: dict[str, Any],
) -> Form:
    """The head in the form of ``to``, which can serve it (``why_not``).

    Raises:
        ValueError: the weights do not fit the options.
    """
    load_state(_module(options, target), weights, checkpoint)
    found = with_draft_vocabulary(in_one_dtype(weights), target.vocab_size)
    config = _config(to, options, target, dtype_name(found["fc.weight"].dtype), origin)
    refused, _ = check_head(config, renamed(found), target, checkpoint)
    able, told = loaded_by(to, refused, {one: no_target(one, target.model_type) for one in READERS})
    temperatures = temperatures_of(options, drafting) if "sglang" in able else None
    return Form(config, found, None, able, told, options.slots, temperatures)


def temperatures_of(shape: Any, drafting: Any) -> list[float] | None:
    """The temperatures of a calibrated confidence head, one for each position; None for other heads."""
    if not isinstance(shape, DSparkShape) or not shape.confidence_head:
        return None  # those of max q, which SGLang does not read
    found: list[float] | None = drafting.confidence_temperatures
    return found


def method_of(options: BlockShape) -> str:
    """The method with these options."""
    return "dspark" if isinstance(options, DSparkShape) else "dflash"


def _module(options: BlockShape, target: PretrainedConfig) -> nn.Module:
    kind: Any = drafter_class(method_of(options))
    return cast(nn.Module, kind.build_module(target, options))


def _config(
    to: str, options: BlockShape, target: PretrainedConfig, dtype: str, origin: Mapping[str, Any]
) -> dict[str, Any]:
    shape: Any = layer_kind(target, options.layer, options.shape).config
    method, taps, anchor_first = method_of(options), list(options.reads), options.layout == ANCHOR_FIRST
    layer = layer_keys(shape, options.layer, options.layers) | {"layer_types": ["full_attention"] * options.layers}
    told = {
        "layer": options.layer,
        "layout": options.layout,
        "slot": _SLOTS[options.layout],
        "taps": taps,
        "states": [told_state(tap, target.num_hidden_layers) for tap in taps],
        "rope": rope(shape.to_dict()),
        "target_layers": target.num_hidden_layers,
    }
    head: dict[str, Any] = {"block_size": options.block_size, "tie_word_embeddings": False}
    head |= {"draft_vocab_size": options.draft_vocab_size or target.vocab_size, "dtype": dtype, "torch_dtype": dtype}
    markov = _markov_keys(options) if isinstance(options, DSparkShape) else {}
    block: dict[str, Any] = {"mask_token_id": options.mask_token_id, ANCHOR: anchor_first}
    if to == "speculators":
        told |= {AUX_IDS: "inputs of layers: hidden states"}
        architecture = SPECFORGE if method == "dspark" else ZLAB  # transformers saves the names of its classes
        keys = speculators_keys(method, architecture, options.slots, layer, target, origin["target"])
        return (
            head | markov | block | keys | {AUX_IDS: to_inputs(taps), NON_CAUSAL: True, MADE_FROM: {**origin, **told}}
        )
    told |= {IDS: "outputs of layers: hidden states - 1"}
    found = layer | head | markov | {"num_target_layers": target.num_hidden_layers, "is_causal": options.causal}
    found |= {"bias": False, MADE_FROM: {**origin, **told}}
    block[IDS] = to_outputs(taps)
    if method == "dspark":
        return found | block | {"architectures": [DEEPSPEC]}
    return found | {"dflash_config": block | {"causal": options.causal}, "architectures": [ZLAB]}


def _markov_keys(options: DSparkShape) -> dict[str, Any]:
    return {
        "markov_rank": options.markov_rank,
        "markov_head_type": options.markov_head,
        "enable_confidence_head": options.confidence_head,
        "confidence_head_with_markov": options.confidence_head,
    }


def why_not(to: str, options: BlockShape, target: PretrainedConfig) -> str | None:
    """Why ``to`` cannot serve a head with these ``options``; None if it can."""
    taps, rows, last = list(options.reads), options.draft_vocab_size, target.num_hidden_layers
    dflash, fill_in = method_of(options) == "dflash", options.layout == FILL_IN
    markov = options.markov_head if isinstance(options, DSparkShape) else "vanilla"
    only_fill_in = (dflash and not fill_in, f"its DFlash predicts no token at the anchor (layout {FILL_IN})")
    only_vanilla = (markov != "vanilla", f"it has no Markov head of the kind {markov!r}; train one with vanilla")
    targets_head = "it drafts with the target's LM head; train one without draft_vocab"
    whole = (rows == target.vocab_size, f"of all tokens {targets_head}")
    only_both_ways = (options.causal, "its blocks attend in both directions (causal: false)")
    rules: dict[str, list[tuple[bool, str]]] = {
        "official": [
            only_fill_in,
            (rows is not None, targets_head),
            (taps[-1] == last, "transformers norms the state after the last layer, and the head reads it before"),
        ],
        "vllm": [only_fill_in, only_vanilla],
        "sglang": [
            only_fill_in,
            (not dflash and fill_in, f"it takes block_size for the tokens of a draft, as in layout {ANCHOR_FIRST}"),
            (rows is not None, targets_head),
            (taps[0] == 0, "it hands over no embeddings"),
            (taps[-1] == last, "it hands over no state after the target's last layer"),
        ],
        "speculators": [only_both_ways, whole],
        "llama.cpp": [only_fill_in, only_vanilla, only_both_ways, (dflash and rows is not None, targets_head), whole],
    }  # fmt: skip
    if options.layer != "qwen3":
        return "its draft layers have norms of queries and keys (layer: qwen3); train one with layer=qwen3"
    if taps != sorted({*taps}):
        return f"it hands states over in the order of the layers, and taps are {taps}; train one with {sorted({*taps})}"
    return next((reason for wrong, reason in rules[to] if wrong), None)


def no_target(to: str, family: str) -> str | None:
    """Why ``to`` cannot run targets of this ``family`` (a model_type) beside a block drafter; None if it can."""
    if to != "sglang" or family in _SGLANG_TARGETS:
        return None
    return f"its targets of the family {family!r} hand over no states for block drafters"


def check_head(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], target: PretrainedConfig, source: str
) -> tuple[dict[str, str | None], list[str]]:
    """For each program: None if it serves this head as it was trained, or why not. And notes for the user.

    Args:
        weights: ``renamed``.

    Raises:
        ValueError: everything that is wrong with the head, whichever program loads it.
    """
    method = block_method(weights) or "dflash"
    read_as = read(config, weights, target, source)
    options: Any = validate(METHODS[method], read_as.options, source=source)
    flat, own = flattened(config, method, source), own_weights(weights, options.model_dump())
    # An absent key means 32,768 positions to Qwen3's configuration.
    if found := read_as.doubts + problems(config, flat, own, lambda: _module(options, target), target, positions=32768):
        raise ValueError(f"{source} is not {NOUNS[method]} that would be served as it is: {'; '.join(found)}")
    speculators = config.get(SPECULATORS) is not None
    loaded, refused = (
        _LOADED_BY.get(SPECULATORS if speculators else architecture_of(config), ()),
        dict[str, str | None](),
    )
    for to in READERS:
        refused[to] = why_not(to, options, target)
        if to not in loaded or (to == "official" and method == "dspark"):
            refused[to] = f"another form; export it once more: --to {to}"
    if speculators and method == "dflash" and config.get(NON_CAUSAL) is False and refused["vllm"] is None:
        refused["vllm"] = f"with {NON_CAUSAL}: false its blocks attend to earlier rows only; set it to true"
    return refused, read_as.notes


def check(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], to: str | None, target: str | None
) -> str:
    """Check a folder in the form of an engine against its ``target``, a folder or Hub repository; what it is, in words.

    Args:
        to: the program that must be able to serve it; None: any.

    Raises:
        ValueError: everything that is wrong with it.
    """
    noun = NOUNS[block_method(weights) or "dflash"]
    if target is None:
        raise ValueError(f"{folder} is {noun}, which is checked against its target; add --target MODEL")
    check_folder(folder, str(folder))
    refused, notes = check_head(config, renamed(weights), load_config_only(target), str(folder))
    return served_text(folder, noun, config, weights, refused, notes, to, target)
