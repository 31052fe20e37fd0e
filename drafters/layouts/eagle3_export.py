"""EAGLE-3 heads for other programs: config.json and tensors in their forms, what each cannot serve, and the check."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from drafters.common.states import from_outputs, to_inputs, to_outputs
from drafters.common.wording import dtype_name
from drafters.config import Config, validate
from drafters.heads.eagle3.module import Eagle3Head
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.hub.checkpoint import load_state
from drafters.hub.declared import READERS
from drafters.layouts.config import CONFIG_FILE, MADE_FROM, rope
from drafters.layouts.eagle3 import (
    FLAGS,
    GROUP,
    IDS,
    OFFICIAL,
    SGLANG,
    SPECULATORS,
    VLLM,
    flattened,
    read,
    renamed,
    standard_taps,
)
from drafters.layouts.readme import Form
from drafters.layouts.released import in_one_dtype
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
from drafters.model.draft_head import D2T
from drafters.model.files import load_config_only
from drafters.model.layers import layer_kind

STEPS = 5  # tokens of a draft in speculators' config.json; engines take another number on their command line
LLAMA_CPP_SINCE = "July 2026 (pull request 25794)"  # reads the numbers of the states; before, it took the usual ones
# Programs that load a folder with this architecture, if they read the same states in it.
_LOADED_BY = {OFFICIAL: ("official", "vllm"), SGLANG: ("vllm", "sglang", "llama.cpp")}
_LOADED_BY |= {VLLM["llama"]: ("vllm", "llama.cpp"), VLLM["qwen3"]: ("vllm",)}
_LOADED_BY |= dict.fromkeys(SPECULATORS, ("vllm", "speculators"))
# Families, by model_type, whose classes in SGLang 0.5.23 take an id for an output only if the first id is 1.
_GUESSED = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
# Families of targets, by model_type, that hand over their states: the official code's (February 2026) and SGLang's
# classes (0.5.23). vLLM 0.32 does for most that it serves.
_TARGETS = {
    "official": ("llama", "qwen3"),
    "sglang": (
        "apertus",
        "bailing_moe",
        "exaone_moe",
        "gemma3",
        "gemma3_text",
        "gemma4",
        "glm4_moe",
        "gpt_oss",
        "llama",
    )
    + ("minimax_m2", "ministral3", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", *_GUESSED),
}


def form(
    checkpoint: str,
    to: str,
    options: Eagle3Shape,
    drafting: Config,
    target: PretrainedConfig,
    weights: dict[str, Tensor],
    origin: dict[str, Any],
) -> Form:
    """The head in the form of ``to``, which can serve it (``why_not``); see ``exported``.

    Raises:
        ValueError: the weights do not fit the options.
    """
    load_state(Eagle3Head(target, options), weights, checkpoint)
    config, found = exported(to, in_one_dtype(weights), options, target, origin)
    refused, _ = check_head(config, renamed(found), target, checkpoint)
    able, told = loaded_by(to, refused, {one: no_target(one, target.model_type) for one in READERS})
    return Form(config, found, None, able, told + notices(to, options, target))


def exported(
    to: str, weights: Mapping[str, Tensor], options: Eagle3Shape, target: PretrainedConfig, origin: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and tensors of a head in the form of ``to``, which can serve it (``why_not``).

    Args:
        weights: of ``Eagle3Head``, in one dtype but for d2t.
        origin: what ``made_from`` is to say of the checkpoint and its target.
    """
    names = {"layers.0.": "midlayer."} if to in ("official", "sglang") else {}
    found = with_draft_vocabulary(weights, target.vocab_size)
    for ours, theirs in names.items():
        found = {name.replace(ours, theirs): value for name, value in found.items()}
    return _config(to, options, target, dtype_name(weights["fc.weight"].dtype), origin), found


def _config(
    to: str, options: Eagle3Shape, target: PretrainedConfig, dtype: str, origin: Mapping[str, Any]
) -> dict[str, Any]:
    shape: Any = layer_kind(target, options.layer, options.shape).config
    turning, taps = rope(shape.to_dict()), list(options.reads)
    layer = layer_keys(shape, options.layer, options.layers)
    if options.sliding_window is not None:
        layer |= {"layer_types": ["sliding_attention"] * options.layers, "use_sliding_window": True}
        layer["sliding_window"] = options.sliding_window
    head: dict[str, Any] = {flag: getattr(options, flag) for flag in FLAGS}
    head |= {"draft_vocab_size": options.draft_vocab_size or target.vocab_size, "dtype": dtype, "torch_dtype": dtype}
    head |= {"tie_word_embeddings": False, MADE_FROM: {**origin, **_told(to, options, target, turning)}}
    if to == "speculators":
        form = speculators_keys("eagle3", SPECULATORS[0], STEPS, layer, target, origin["target"])
        return head | form | {IDS: to_inputs(taps), "embed_requires_grad": False}
    architecture = {"official": OFFICIAL, "sglang": SGLANG}.get(to, VLLM[options.layer])
    ids = to_outputs(taps) if to == "sglang" else to_inputs(taps)
    eagle = {IDS: ids, "use_aux_hidden_state": True, "norm_before_fc": options.norm_before_fc}
    found = {**layer, **head, "architectures": [architecture], GROUP: eagle, "bias": False}
    found["num_aux_hidden_states"] = len(taps)
    if to != "official":  # which would leave its embedding random
        found["target_hidden_size"] = target.hidden_size
    if to == "sglang" and not options.own_lm_head:  # then it drafts with the target's LM head
        found["draft_vocab_size"] = None
    if turning["rope_type"] == "llama3":  # llama.cpp looks for it there
        found["original_max_position_embeddings"] = turning["original_max_position_embeddings"]
    return found


def _told(to: str, options: Eagle3Shape, target: PretrainedConfig, turning: Mapping[str, Any]) -> dict[str, Any]:
    """What ``made_from`` says so that no reader has to guess."""
    counted = "outputs of layers: hidden states - 1" if to == "sglang" else "inputs of layers: hidden states"
    after = "after" if options.norm_output else "before"
    steps = {} if options.trained_steps is None else {"trained_steps": options.trained_steps}
    return {
        "layer": options.layer,
        "taps": list(options.reads),
        "states": [told_state(tap, target.num_hidden_layers) for tap in options.reads],
        IDS: counted,
        "fed_back": f"the layer's output {after} the final norm",
        "rope": dict(turning),
        "target_layers": target.num_hidden_layers,
        **steps,
    }


def why_not(to: str, options: Eagle3Shape, target: PretrainedConfig) -> str | None:
    """Why ``to`` cannot serve a head with these ``options``; None if it can."""
    taps, usual = list(options.reads), standard_taps(target.num_hidden_layers)
    shape: Any = layer_kind(target, options.layer, options.shape).config
    flags = [flag for flag in FLAGS if getattr(options, flag)]
    plain_heads = shape.head_dim * shape.num_attention_heads == shape.hidden_size
    kind, several = rope(shape.to_dict())["rope_type"], options.layers > 1
    qwen3 = options.layer == "qwen3"
    one_layer = (several, f"it has one layer, and the head {options.layers}")
    no_qwen3 = (qwen3, "it has no norms of queries and keys (layer: qwen3); train one with layer=llama")
    no_window = (options.sliding_window is not None, "its layer attends to all tokens, and the head's has a window")
    own_head = (not options.own_lm_head, "it needs an LM head of the head's own; train one with own_lm_head=true")
    rules: dict[str, list[tuple[bool, str]]] = {
        "official": [
            (taps != usual, f"it reads the hidden states {usual} of this target, and the head reads {taps}"),
            (bool(flags), f"it does not know {', '.join(flags)}"),
            (not plain_heads, f"its heads are hidden_size / num_attention_heads wide, and these {shape.head_dim}"),
            (kind != "default", f"it knows no RoPE of type {kind!r}"),
            one_layer, no_qwen3, no_window, own_head,
        ],
        "vllm": [],
        "sglang": [
            (options.norm_before_residual, "it does not know norm_before_residual"),
            (taps[-1] == target.num_hidden_layers, "it hands over no state after the target's last layer"),
            (
                target.model_type in _GUESSED and taps[0] != 2,
                f"with targets of the family {target.model_type!r} it misreads the states unless the first is 2",
            ),
            one_layer, no_qwen3, no_window,
        ],
        "speculators": [own_head],
        "llama.cpp": [
            (len(taps) != 3, f"it reads three hidden states, and the head {len(taps)}"),
            (options.fc_norm or options.norm_output, "its converter knows no fc_norm and no norm_output (EAGLE-3.1)"),
            one_layer, no_qwen3, no_window,
        ],
    }  # fmt: skip
    if taps != sorted({*taps}):
        return f"it hands states over in the order of the layers, and taps are {taps}; train one with {sorted({*taps})}"
    return next((reason for wrong, reason in rules[to] if wrong), None)


def no_target(to: str, family: str) -> str | None:
    """Why ``to`` cannot run targets of this ``family`` (a model_type) beside an EAGLE-3 head; None if it can."""
    if to not in _TARGETS or family in _TARGETS[to]:
        return None
    return f"its targets of the family {family!r} hand over no states for EAGLE-3"


def notices(to: str, options: Eagle3Shape, target: PretrainedConfig) -> list[str]:
    """What a user of the export has to know."""
    found, usual = [], standard_taps(target.num_hidden_layers)
    if options.draft_vocab_size == target.vocab_size:
        found.append(f"{D2T} is left out: the draft vocabulary is the target's")
    if to == "llama.cpp" and (list(options.reads) != usual or options.norm_before_fc):
        found.append(f"convert it with a llama.cpp of {LLAMA_CPP_SINCE} or later; older ones read the states {usual}")
    return found


def read_by(to: str, config: Mapping[str, Any], layers: int) -> list[int]:
    """The target's hidden states that ``to`` would read with this ``config.json``."""
    nested = config.get(GROUP, {}).get(IDS)
    if to == "sglang":
        return standard_taps(layers) if nested is None else from_outputs(nested)
    given = config.get(IDS) or nested
    return standard_taps(layers) if given is None or to == "official" else list(given)


def check_head(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], target: PretrainedConfig, source: str
) -> tuple[dict[str, str | None], list[str]]:
    """For each program: None if it serves this head as it was trained, or why not. And notes for the user.

    Args:
        weights: ``renamed``.

    Raises:
        ValueError: everything that is wrong with the head, whichever program loads it.
    """
    read_as = read(config, weights, target, source)
    options = validate(Eagle3Shape, read_as.options, source=source)
    if found := read_as.doubts + _problems(config, weights, options, target):
        raise ValueError(f"{source} is not an EAGLE-3 head that would be served as it is: {'; '.join(found)}")
    loaded, refused = _LOADED_BY.get(architecture_of(config), ()), dict[str, str | None]()
    for to in READERS:
        states = read_by(to, config, target.num_hidden_layers)
        refused[to] = why_not(to, options, target)
        if to not in loaded:
            refused[to] = f"another form; export it once more: --to {to}"
        elif states != options.taps and refused[to] is None:
            refused[to] = f"it would read the hidden states {states}, and the head was trained on {options.taps}"
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
    if target is None:
        raise ValueError(f"{folder} is an EAGLE-3 head, which is checked against its target; add --target MODEL")
    refused, notes = check_head(config, renamed(weights), load_config_only(target), str(folder))
    return served_text(folder, "an EAGLE-3 head", config, weights, refused, notes, to, target)


def _problems(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], options: Eagle3Shape, target: PretrainedConfig
) -> list[str]:
    flat = flattened(config, CONFIG_FILE)
    found = problems(config, flat, weights, lambda: Eagle3Head(target, options), target, positions=2048)
    if architecture_of(config) == OFFICIAL and "target_hidden_size" in config:
        found.append("target_hidden_size is given, with which the official code leaves the embedding random")
    return found
