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
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.common.states import from_inputs, from_outputs, to_inputs, to_outputs
from drafters.common.wording import shortened
from drafters.config import validate
from drafters.heads.eagle3.module import Eagle3Head
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.heads.forms import CERTAIN, STEPS, T2D, Reading, Stated, Stored
from drafters.heads.keys import CONFIG_FILE, MADE_FROM, READERS, Keys, check_said, made_from, rope
from drafters.heads.state_forms import StateForms
from drafters.heads.states import (
    TAPS_KEY,
    agreed_states,
    architecture_of,
    as_option,
    check_list,
    check_sizes,
    either,
    layer_of,
    nested_layer,
    own_rows,
    shape_of,
    speculators_keys,
    states_of,
    states_of_fc,
    too_short,
)
from drafters.model.draft_head import D2T
from drafters.model.layers import layer_kind

IDS = "eagle_aux_hidden_state_layer_ids"
STATES = "use_aux_hidden_state"  # false: the head reads the output of the target's final norm, without fc
GROUP = "eagle_config"  # of keys that other forms have at the top
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Architectures by who gives them. vLLM loads all three: it puts Eagle3 in front of the first.
OFFICIAL = "LlamaForCausalLM"
SGLANG = "LlamaForCausalLMEagle3"  # SpecForge's and SGLang's, which number the target's states by layers' outputs
VLLM = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}  # by kind of layer; inputs of layers
SPECULATORS = ("Eagle3DraftModel", "Eagle3Speculator")
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
    "sglang": ("apertus", "bailing_moe", "exaone_moe", "gemma3", "gemma3_text", "gemma4", "glm4_moe", "gpt_oss")
    + ("llama", "minimax_m2", "ministral3", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next")
    + _GUESSED,
}


class Eagle3Keys(Keys):
    """Keys of ``config.json`` of an EAGLE-3 head."""

    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    use_aux_norm: bool | None = None  # SGLang's former name of fc_norm
    eagle_config: "Eagle3Keys | None" = None
    transformer_layer_config: "Eagle3Keys | None" = None


class Eagle3Forms(StateForms):
    """Forms of EAGLE-3 heads. ``method``: the name in speculators' config.json. ``architectures``: those known."""

    method = "eagle3"
    architectures: tuple[str, ...] = (OFFICIAL, SGLANG, *VLLM.values(), *SPECULATORS)

    noun = "an EAGLE-3 head"
    readers = tuple(READERS)
    shape: type[Eagle3Shape] = Eagle3Shape
    keys = Eagle3Keys
    code = "EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{out}', use_eagle3=True)"
    note = "It reads the embedding from a target in several files (with an index), and fails for a single file."
    loaded_by: ClassVar = _LOADED_BY
    targets: ClassVar = _TARGETS
    names: ClassVar = {"midlayer.": "layers.0."} | {
        f"aux_norm_{name}.": f"fc_norm.{place}." for place, name in enumerate(("low", "mid", "high"))
    }

    def match(self, config: Mapping[str, Any], names: set[str]) -> int:
        """Only EAGLE-3's layers have a norm of the feature."""
        normed = any(name.endswith(("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")) for name in names)
        return CERTAIN if normed else 0

    def module(self, target: PretrainedConfig, shape: Any) -> nn.Module:
        return Eagle3Head(target, shape)

    # ------------------------------------------------------------------------------------------- reading

    def flattened(self, config: Mapping[str, Any], source: str) -> dict[str, Any]:
        if "speculators_model_type" not in config:
            return dict(config)
        if (kind := config["speculators_model_type"]) != self.method:
            raise ValueError(
                f"{source}: speculators_model_type is {shortened(kind)}, and {self.noun} has {self.method!r}"
            )
        layer = nested_layer(config, source)
        return layer | {key: value for key, value in config.items() if key in (*FLAGS, "draft_vocab_size", IDS, STATES)}

    def read(self, stored: Stored, target: PretrainedConfig, stated: Stated) -> Reading:
        config, weights, source = stored.config, stored.weights, stored.source
        flat, notes, doubts = self.flattened(config, source), list[str](), list[str]()
        if (architecture := architecture_of(config)) not in self.architectures:
            doubts.append(f"architectures is {architecture or 'not given'}; known: {', '.join(self.architectures)}")
        check_sizes(flat, stored, target)
        options = _flags(config, flat, weights, source, doubts)
        count = states_of_fc(weights, flat["hidden_size"], source, self.noun)
        check_said(flat, "num_aux_hidden_states", count, f"fc.weight takes {count} states of the target", source)
        taps = read_taps(config, count, target.num_hidden_layers, source, notes, stated.taps)
        rows = own_rows(flat, weights, target.vocab_size, source)
        options |= {"taps": taps, "own_lm_head": rows is not None}
        options |= {"draft_vocab_size": rows} if rows != target.vocab_size else {}
        options["layer"] = layer_of(flat, weights, source, notes)
        options["layers"] = flat.get("num_hidden_layers", 1)
        options["shape"] = shape_of(flat, weights, layer_kind(target, options["layer"]).config, source)
        notes += too_short(flat, target)
        kinds, window = {*(flat.get("layer_types") or ())}, flat.get("sliding_window")
        if kinds == {"sliding_attention"} and window is not None:
            options["sliding_window"] = window
        elif "sliding_attention" in kinds or flat.get("use_sliding_window"):
            doubts.append(
                f"its window of {shortened(window)} tokens is not that of all layers by layer_types, so here they "
                "attend to all tokens before; if it was trained with the window, set "
                '"layer_types": ["sliding_attention", ...]'
            )
        if (steps := made_from(config).get("trained_steps")) is not None:
            options["trained_steps"] = steps
        options = validate(Eagle3Shape, options, source).model_dump(exclude_defaults=True, exclude_none=True)
        return Reading(options | {"taps": taps}, _own_weights(weights, options), notes, doubts)

    # ------------------------------------------------------------------------------------------- writing

    def theirs(self, to: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if to not in ("official", "sglang"):
            return weights
        return {name.replace("layers.0.", "midlayer."): value for name, value in weights.items()}

    def config(
        self, to: str, shape: Any, layer: Mapping[str, Any], target: PretrainedConfig, origin: Mapping[str, Any]
    ) -> dict[str, Any]:
        taps, layer = list(shape.reads), dict(layer)
        if shape.sliding_window is not None:
            layer |= {"layer_types": ["sliding_attention"] * shape.layers, "use_sliding_window": True}
            layer["sliding_window"] = shape.sliding_window
        head: dict[str, Any] = {flag: getattr(shape, flag) for flag in FLAGS}
        head |= {"tie_word_embeddings": False, MADE_FROM: _made_from(to, shape)}
        if to == "speculators":
            tokens, name = getattr(shape, "slots", STEPS), origin["target"]
            form = speculators_keys(self.method, SPECULATORS[0], tokens, layer, target, name)
            return head | form | {IDS: to_inputs(taps), "embed_requires_grad": False}
        architecture = {"official": OFFICIAL, "sglang": SGLANG}.get(to, VLLM[shape.layer])
        ids = to_outputs(taps) if to == "sglang" else to_inputs(taps)
        eagle = {IDS: ids, STATES: True, "norm_before_fc": shape.norm_before_fc}
        config = {**layer, **head, "architectures": [architecture], GROUP: eagle, "bias": False}
        config["num_aux_hidden_states"] = len(taps)
        if to != "official":  # which would leave its embedding random
            config["target_hidden_size"] = target.hidden_size
        if to == "sglang" and not shape.own_lm_head:  # then it drafts with the target's LM head
            config["draft_vocab_size"] = None
        if layer["rope_parameters"]["rope_type"] == "llama3":  # llama.cpp looks for it there
            config["original_max_position_embeddings"] = layer["rope_parameters"]["original_max_position_embeddings"]
        return config

    # ------------------------------------------------------------------------------------------- serving

    def limits(self, shape: Any, target: PretrainedConfig) -> dict[str, list[tuple[bool, str]]]:
        taps, usual = list(shape.reads), standard_taps(target.num_hidden_layers)
        own: Any = layer_kind(target, shape.layer, shape.shape).config
        flags = [flag for flag in FLAGS if getattr(shape, flag)]
        plain_heads = own.head_dim * own.num_attention_heads == own.hidden_size
        kind, several = rope(own.to_dict())["rope_type"], shape.layers > 1
        qwen3 = shape.layer == "qwen3"
        one_layer = (several, f"it has one layer, and the head {shape.layers}")
        no_qwen3 = (qwen3, "it has no norms of queries and keys (layer: qwen3); train one with layer=llama")
        no_window = (shape.sliding_window is not None, "its layer attends to all tokens, and the head's has a window")
        own_head = (not shape.own_lm_head, "it needs an LM head of the head's own; train one with own_lm_head=true")
        return {
            "official": [
                (taps != usual, f"it reads the hidden states {usual} of this target, and the head reads {taps}"),
                (bool(flags), f"it does not know {', '.join(flags)}"),
                (not plain_heads, f"its heads are hidden_size / num_attention_heads wide, and these {own.head_dim}"),
                (kind != "default", f"it knows no RoPE of type {kind!r}"),
                one_layer, no_qwen3, no_window, own_head,
            ],
            "vllm": [],
            "sglang": [
                (shape.norm_before_residual, "it does not know norm_before_residual"),
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
                (shape.fc_norm or shape.norm_output, "its converter knows no fc_norm and no norm_output (EAGLE-3.1)"),
                one_layer, no_qwen3, no_window,
            ],
        }  # fmt: skip

    def notices(self, to: str, shape: Any, target: PretrainedConfig) -> list[str]:
        notices, usual = [], standard_taps(target.num_hidden_layers)
        if shape.draft_vocab_size == target.vocab_size:
            notices.append(f"{D2T} is left out: the draft vocabulary is the target's")
        if to == "llama.cpp" and (list(shape.reads) != usual or shape.norm_before_fc):
            notices.append(
                f"convert it with a llama.cpp of {LLAMA_CPP_SINCE} or later; older ones read the states {usual}"
            )
        return notices

    def refusals(self, config: Mapping[str, Any], shape: Any, layers: int) -> dict[str, str]:
        states = {to: read_by(to, config, layers) for to in READERS}
        return {
            to: f"it would read the hidden states {taps}, and the head was trained on {shape.taps}"
            for to, taps in states.items()
            if taps != shape.taps
        }

    def more_problems(self, config: Mapping[str, Any]) -> list[str]:
        if architecture_of(config) == OFFICIAL and "target_hidden_size" in config:
            return ["target_hidden_size is given, with which the official code leaves the embedding random"]
        return []


def standard_taps(layers: int) -> list[int]:
    """The hidden states that engines hand over of a target with this number of layers, unless config.json names others;
    of fewer than 7 layers these are not ``eagle3_taps``."""
    return [2, layers // 2, layers - 3]


def read_taps(
    config: Mapping[str, Any], count: int, layers: int, source: str, notes: list[str], given: list[int] | None
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
    read = None if ids is None else _numbered(config, ids, layers, source, notes, stated)
    return agreed_states({f"{IDS} {ids}": read, **told}, layers, source, notes, "correct one") or usual


def _numbered(
    config: Mapping[str, Any], ids: list[int], layers: int, source: str, notes: list[str], stated: list[int] | None
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
    found["fc_norm"] |= bool(flat.get("use_aux_norm"))
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


def read_by(to: str, config: Mapping[str, Any], layers: int) -> list[int]:
    """The target's hidden states that ``to`` would read with this ``config.json``."""
    nested = config.get(GROUP, {}).get(IDS)
    if to == "sglang":
        return standard_taps(layers) if nested is None else from_outputs(nested)
    given = config.get(IDS) or nested
    return standard_taps(layers) if given is None or to == "official" else list(given)


def _made_from(to: str, shape: Eagle3Shape) -> dict[str, Any]:
    """What ``made_from`` says of such a head so that no reader has to guess."""
    after = "after" if shape.norm_output else "before"
    return {
        IDS: "outputs of layers: hidden states - 1" if to == "sglang" else "inputs of layers: hidden states",
        "fed_back": f"the layer's output {after} the final norm",
        **({} if shape.trained_steps is None else {"trained_steps": shape.trained_steps}),
    }


def _own_weights(weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the module; those left out say nothing more: t2d, the d2t of a whole vocabulary, zero biases."""
    left_out = {T2D} if "draft_vocab_size" in options else {T2D, D2T}
    own = {name: value for name, value in weights.items() if name not in left_out and not name.endswith(".bias")}
    return own | ({D2T: own[D2T].long()} if D2T in own else {})


EAGLE3_FORMS = Eagle3Forms()
