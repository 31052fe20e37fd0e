"""Forms of heads of one decoder layer of the target's kind, or of Llama's: EAGLE and Kangaroo.

``config.json`` is that of a Llama with one layer. The embedding, and with it the LM head, is the target's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from drafters.common.wording import dtype_name, shortened
from drafters.config import HeadLayer
from drafters.heads.forms import (
    EMBEDDING,
    HeadForms,
    Reading,
    Stated,
    Stored,
    Trained,
    Written,
    another_form,
    another_target,
    in_one_dtype,
    load_pickled,
    no_target_notes,
    rope_problems,
    served_by,
    tensor_problems,
    weights_text,
)
from drafters.heads.keys import CONFIG_FILE, MADE_FROM, READERS, check_said, made_from, older_keys, rope, size
from drafters.heads.shape import HeadShape
from drafters.hub.checkpoint import WEIGHTS_FILE, load_state
from drafters.model.draft_head import DRAFT_IDS, check_ids, head_ids
from drafters.model.files import load_config_only
from drafters.model.layers import ROPES, default_layer, layer_config, unserved

PICKLED_FILE = "pytorch_model.bin"
HOT_TOKENS = "hot_token_ids.pt"  # of SGLang's --speculative-token-map
PLAIN = "LlamaForCausalLM"  # vLLM puts Eagle in front of it
BIASED = "EagleWithBiasForCausalLM"  # known to no engine: vLLM has no bias in fc, and would drop it silently
SGLANG = {"llama": "LlamaForCausalLMEagle", "qwen2": "Qwen2ForCausalLMEagle"}  # by the target's family
# Families of targets, by model_type, that a program can run beside a head: the official code's own models (February
# 2026), SGLang's classes that hand out embedding and LM head (0.5.23). vLLM 0.32 takes any.
_TARGETS = {
    "official": ("llama", "mixtral", "qwen2", "qwen3"),
    "sglang": ("apertus", "ernie4_5", "exaone4", "glm4", "gpt_oss", "llama", "ministral3", "mistral", "phi3")
    + ("qwen2", "qwen3", "qwen3_moe"),
}
# A head attends to all tokens before it, also if its target has sliding windows.
_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


@dataclass(frozen=True, kw_only=True)
class OneLayerForms(HeadForms):
    """Forms of a head of one layer.

    Attributes:
        module: class of its module, which is made of a target's configuration and a shape.
        made_as: the shape that the programs load.
        families: ``model_type`` of targets whose own decoder layer the programs have as a draft layer.
        fixed: values of the shape that they take for granted.
        bias: name of a bias that a head may have; the shape's key is this name with ``_`` for the dot.
        rope_theta: base of RoPE in the official code, where config.json cannot change it.
    """

    noun: str
    readers: tuple[str, ...]
    shape: type[HeadShape]
    module: type[nn.Module]
    made_as: HeadShape
    families: tuple[str, ...] = ("llama",)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    note: str = ""
    pickled: bool = False
    bias: str | None = None
    rope_theta: float | None = None

    targets: ClassVar = _TARGETS

    # ------------------------------------------------------------------------------------------- reading

    def tensors(self, config: PretrainedConfig, bias: bool = False) -> dict[str, list[int]]:
        """Names and shapes of the tensors of a head whose layer has this ``config``."""
        shape = self.made_as.model_copy(update={self._bias_key: True} if bias and self.bias else {})
        with torch.device("meta"):
            module: nn.Module = self.module(config, shape)
        return {name: list(value.shape) for name, value in module.state_dict().items()}

    @cached_property
    def _names(self) -> set[str]:
        return {*self.tensors(LlamaConfig(hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=8))}

    @property
    def _bias_key(self) -> str:
        return str(self.bias).replace(".", "_")

    def match(self, config: Mapping[str, Any], names: set[str]) -> int:
        there = len(self._names & names)
        return there if 2 * there >= len(self._names) else 0

    def layer_of(self, config: Mapping[str, Any], target: PretrainedConfig) -> HeadLayer:
        """The kind of decoder layer of a head with this ``config.json``."""
        if "layer" not in self.shape.model_fields:
            return "target"
        exported = made_from(config).get("layer")
        if (known := next((layer for layer in get_args(HeadLayer) if layer == exported), None)) is not None:
            return known
        # A Llama layer has one of ROPES.
        return default_layer(target) if rope(config)["rope_type"] in ROPES else "target"

    def read(self, stored: Stored, target: PretrainedConfig, stated: Stated) -> Reading:
        config, weights, source, notes = stored.config, dict(stored.weights), stored.source, list[str]()
        layer = self.layer_of(config, target)
        own = layer_config(target, layer)
        check_said(config, "num_hidden_layers", 1, "a head has 1", source)
        # The official code does not read RoPE from config.json where it has its own.
        compared = {key: value for key, value in config.items() if not (self.rope_theta and key.startswith("rope_"))}
        if wrong := self.differences(compared, own):
            raise ValueError(
                f"{source} is no head for {stated.target}: {'; '.join(wrong)}. Give its own: --target MODEL"
            )
        if (eps := config.get("rms_norm_eps", 1e-6)) != (ours := getattr(own, "rms_norm_eps", eps)):
            notes.append(f"rms_norm_eps is {eps} in its {CONFIG_FILE} and {ours} in the layer that it gets")
        options: dict[str, Any] = {} if layer == "target" else {"layer": layer}
        if self.bias:
            options |= self._read_bias(config, weights, source, notes)
        if "exit_layer" in self.shape.model_fields:
            options["exit_layer"] = _exit_layer(config, stated, target.num_hidden_layers, source)
        return Reading(options, weights, notes, [])

    def _read_bias(
        self, config: Mapping[str, Any], weights: dict[str, Tensor], source: str, notes: list[str]
    ) -> dict[str, Any]:
        """The key of a head with a bias; a bias of zeros is removed from ``weights``."""
        if (bias := weights.get(str(self.bias))) is None:
            if config.get("bias", True):
                stated = "true" if "bias" in config else "absent, which means true,"
                raise ValueError(
                    f"{source}: bias is {stated} in {CONFIG_FILE}, and {self.bias} is not among its tensors. If it was "
                    f'trained without one, set "bias": false in {CONFIG_FILE}; else the file is incomplete'
                )
            return {}
        if bias.is_floating_point() and not bias.any():
            del weights[str(self.bias)]
            notes.append(f"its {self.bias} is zero, and was left out")
            return {}
        notes.append(f"its {self.bias} is kept ({self._bias_key}: true; to train it further, set that there, too)")
        return {self._bias_key: True}

    def differences(self, config: Mapping[str, Any], layer: PretrainedConfig) -> list[str]:
        """The differences, in words, between a head with this ``config.json`` and the ``layer`` that it would get.

        Tensors may have equal shapes in spite of them.
        """
        wide, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        theirs = {"num_key_value_heads": heads, "head_dim": wide // heads, "hidden_act": "silu"}
        theirs |= {key: value for key, value in config.items() if value is not None}
        ours = {"head_dim": layer.hidden_size // layer.num_attention_heads}
        ours |= {key: value for key, value in layer.to_dict().items() if value is not None}
        keys = ["hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
        keys += ["intermediate_size", "hidden_act"] if self._has_mlp else []
        pairs = [(key, theirs.get(key), ours.get(key)) for key in keys] + [("RoPE", rope(theirs), rope(ours))]
        return [f"{key} is {one} in {CONFIG_FILE}, {other} in the target" for key, one, other in pairs if one != other]

    @property
    def _has_mlp(self) -> bool:
        return any(".mlp." in name for name in self._names)

    # ------------------------------------------------------------------------------------------- serving

    def why_not(self, to: str, shape: Any, target: PretrainedConfig) -> str | None:
        for key, value in self.fixed.items():
            if (found := getattr(shape, key)) != value:
                return f"its {key} is {found!r}, and {READERS[to]} knows only {value!r}; train one with {key}={value}"
        layer: Any = getattr(shape, "layer", "target")
        bias = self._has_bias(shape)
        if layer == "target" and (reason := self._layer_refused(to, target)):
            return reason
        return self._config_refused(to, head_config(layer_config(target, layer), to, bias, torch.bfloat16), bias)

    def _has_bias(self, shape: Any) -> bool:
        return self.bias is not None and bool(getattr(shape, self._bias_key))

    def _layer_refused(self, to: str, target: PretrainedConfig) -> str | None:
        """Why ``to`` has no layer of the target's kind; None if it has."""
        wrong = unserved(target)
        if target.model_type in self.families and not wrong:
            return None
        of = f"the family {target.model_type!r}" + (f" with {' and '.join(wrong)}" if wrong else "")
        known = f"{', '.join(self.families)} without biases, with silu and RoPE {', '.join(ROPES)}"
        known += "; train one with layer=llama" if "layer" in self.shape.model_fields else ""
        return f"its layer is that of {of}, and {READERS[to]} has those of {known}"

    def _config_refused(self, to: str, config: Mapping[str, Any], bias: bool) -> str | None:
        """Why ``to`` cannot load a head with this ``config.json``; None if it can."""
        turning, heads = rope(config), config["num_attention_heads"]
        kind, theta = turning["rope_type"], turning["rope_theta"]
        if to not in self.readers:
            return f"{READERS[to]} does not load {self.noun}"
        if to == "vllm" and bias:
            return f"its fc has no bias: it would leave {self.bias} out, draft worse and say nothing"
        if to != "official" and (activation := config.get("hidden_act", "silu")) != "silu":
            return f"its layer has only the activation silu, and this one {shortened(activation)}"
        if to != "official" and kind not in ROPES:
            return f"it computes RoPE of type {kind!r} otherwise than in training; train with layer=llama"
        if to == "official" and config.get("head_dim") not in (None, config["hidden_size"] // heads):
            return f"its heads are hidden_size / num_attention_heads wide, and these are head_dim {config['head_dim']}"
        if to == "official" and kind != "default":
            return f"it knows no RoPE of type {kind!r}"
        if to == "official" and self.rope_theta not in (None, theta):
            return f"it has rope_theta {self.rope_theta:g} for every config.json, and this one {theta:g}"
        return None

    # ------------------------------------------------------------------------------------------- writing

    def tidied(self, head: Trained) -> Trained:
        if not self._has_bias(head.shape) or head.weights[str(self.bias)].any():
            return head
        weights = {name: value for name, value in head.weights.items() if name != self.bias}
        return head._replace(weights=weights, shape=head.shape.model_copy(update={self._bias_key: False}))

    def write(self, to: str, head: Trained, target: PretrainedConfig, origin: dict[str, Any]) -> Written:
        weights = dict(head.weights)
        if (ids := weights.pop(DRAFT_IDS, None)) is not None:
            check_ids(ids, target.vocab_size, head.source)
        head_ids(ids, head.drafting, target.vocab_size, head.source)  # refuses what drafting would
        hot = None if head.drafting.draft_vocab is None else ids  # all of them: an engine adds no tokens of the text
        load_state(self.module(target, head.shape), weights, head.source)
        weights, bias = in_one_dtype(weights), self._has_bias(head.shape)
        dtype = next(iter(weights.values())).dtype
        config = head_config(layer_config(target, getattr(head.shape, "layer", "target")), to, bias, dtype)
        config |= {MADE_FROM: origin}
        if to == "sglang":
            if self.bias:
                weights.setdefault(self.bias, torch.zeros(target.hidden_size, dtype=dtype))
            if hot is not None:  # else the pruned LM head would be the embedding, too
                config["tie_word_embeddings"] = False
        if wrong := self.problems(config, weights, self.pickled):  # a mistake of ours
            raise ValueError(f"{head.source} would not load there: {'; '.join(wrong)}")
        same = ("sglang",) if to == "sglang" else ("official", "vllm")
        able = [one for one in same if one == to or not self.no_target(one, target.model_type)]
        readers = tuple(one for one in able if self._config_refused(one, config, bias) is None)
        notices = _notices(to, hot, target.vocab_size, self.no_target(to, target.model_type))
        return Written(config, weights, readers, notices, hot)

    # ------------------------------------------------------------------------------------------- checking

    def check(self, stored: Stored, to: str | None, target: str | None) -> str:
        config, weights, folder = stored.config, stored.weights, stored.folder
        wrong = self.problems(config, weights, stored.pickled) + _hot_problems(stored)
        if target is not None:
            theirs = load_config_only(target)
            different = self.differences(config, layer_config(theirs, self.layer_of(config, theirs)))
            if not different and (another := another_target(config, target)):
                different.append(another)
            wrong += different
        if wrong:
            raise ValueError(f"{folder} is not {self.noun} that would be served as it is: {'; '.join(wrong)}")
        bias = self.bias is not None and self.bias in weights
        form = ("sglang",) if self.bias and config["architectures"][0] in SGLANG.values() else ("official", "vllm")
        refused = {
            one: self._config_refused(one, config, bias) if one in form else another_form(one) for one in READERS
        }
        biased = f" with {self.bias}" if bias and weights[str(self.bias)].any() else ""
        known = "target_fingerprint" in made_from(config)
        beside = "" if target is None else f", for {target}" if known else f", of the shape of {target}"
        return f"{served_by(folder, self.noun + biased, refused, form, to)}, {weights_text(weights)}{beside}"

    def problems(self, config: Mapping[str, Any], weights: Mapping[str, Tensor], pickled: bool) -> list[str]:
        """What is wrong with a head in the form of its authors or of an engine, in words."""
        architectures = config.get("architectures")
        architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "not given"
        found = self._key_problems(config, architecture)
        if self.pickled and not pickled:
            found.append(f"{self.noun} in {WEIGHTS_FILE}: the official code reads only {PICKLED_FILE}")
        wanted = self.tensors(self._as_stored(config), architecture in (BIASED, *SGLANG.values()))
        if "vllm" in self.readers and EMBEDDING in weights:  # allowed: engines draft with it
            wanted[EMBEDDING] = [size(config, "vocab_size"), size(config, "hidden_size")]
        return found + tensor_problems(weights, wanted, (), config.get("dtype") or config.get("torch_dtype"))

    def _as_stored(self, config: Mapping[str, Any]) -> PretrainedConfig:
        """The configuration of the layer of a head with this ``config.json``; raises ValueError for a missing size."""
        wide, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
        family = Qwen2Config if config.get("model_type") == "qwen2" or config.get("qkv_bias") else LlamaConfig
        layer: Any = family(num_hidden_layers=2, vocab_size=8, hidden_size=wide, num_attention_heads=heads)
        layer.num_key_value_heads = size(config, "num_key_value_heads", heads)
        layer.head_dim = size(config, "head_dim", wide // heads)
        layer.intermediate_size = size(config, "intermediate_size") if self._has_mlp else wide
        return layer  # type: ignore[no-any-return]

    def _key_problems(self, config: Mapping[str, Any], architecture: str) -> list[str]:
        found, known = [], (PLAIN, BIASED, *SGLANG.values())
        if self.bias and architecture not in known:
            found.append(f"architectures is {architecture}; known: {', '.join(known)}")
        family = next((name for name, value in SGLANG.items() if value == architecture), "llama")
        if config.get("model_type") != family:
            found.append(f"model_type is {shortened(config.get('model_type'))}, and must be {family!r}")
        if config.get("num_hidden_layers") != 1:
            found.append(f"num_hidden_layers is {shortened(config.get('num_hidden_layers'))}, and a head has 1")
        bias, wanted = config.get("bias", "absent"), architecture == BIASED
        if self.bias and bias is not wanted:
            why = (
                f"{self.bias} would be left out"
                if wanted
                else f"the official code takes an absent one for true and leaves {self.bias} random; with true vLLM "
                "and SGLang expect biases of the attention, draft nonsense and say nothing"
            )
            shown = bias if bias == "absent" else shortened(bias)
            found.append(f"bias is {shown}, and must be {str(wanted).lower()}: {why}")
        found += [f"{key} is true, and a head has none" for key in ("attention_bias", "mlp_bias") if config.get(key)]
        return found + rope_problems(config)


def head_config(layer: PretrainedConfig, to: str, bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of a model of one ``layer``, which is what ``layer_config`` returned."""
    # Left out: the name that transformers stores, code beside the target, and how the target is quantised.
    left_out = ("_name_or_path", "auto_map", "quantization_config", *_WINDOWS)
    config = {key: value for key, value in layer.to_dict().items() if key not in left_out}
    family = layer.model_type if to == "sglang" and layer.model_type in SGLANG else "llama"
    if layer.model_type != family:  # keys of another family, such as a number of experts, are left out, too
        known = {key: value for key, value in config.items() if key in LlamaConfig().to_dict() and key != "model_type"}
        config = LlamaConfig(**known).to_dict()
        config |= {"qkv_bias": True} if layer.model_type == "qwen2" else {}
    config |= {
        "architectures": [SGLANG[family] if to == "sglang" else BIASED if bias else PLAIN],
        "num_hidden_layers": 1,
        # Of fc. vLLM and SGLang read this key as biases of the attention: with true they draft nonsense silently.
        "bias": bias and to == "official",
        "dtype": dtype_name(dtype),
        "torch_dtype": dtype_name(dtype),
    }
    return config | older_keys(rope(config))


def _exit_layer(config: Mapping[str, Any], stated: Stated, layers: int, source: str) -> int:
    known = made_from(config).get("exit_layer")
    if known is not None and stated.exit_layer not in (None, known):
        raise ValueError(
            f"--exit-layer is {stated.exit_layer}, and {source} was trained behind layer {known}; leave it out"
        )
    if (number := stated.exit_layer or known) is None:
        raise ValueError(f"{source} does not say its exit layer: give --exit-layer N (2 for Vicuna 7B, 3 for 13B)")
    if type(number) is not int or not 0 < number < layers:
        raise ValueError(f"--exit-layer must be between 1 and {layers - 1} for {stated.target}, found {number}")
    return number


def _hot_problems(stored: Stored) -> list[str]:
    """What is wrong with the file of token ids that SGLang would draft with, in words; the file may be missing."""
    if not (path := stored.folder / HOT_TOKENS).is_file():
        return []
    try:
        ids = torch.tensor(load_pickled(path, stored.source))
        check_ids(ids, int(stored.config["vocab_size"]), HOT_TOKENS)
    except Exception as error:  # what a stranger's file holds can fail in any way
        return [(str(error).splitlines() or [type(error).__name__])[0]]
    return []


def _notices(to: str, hot: Tensor | None, vocabulary: int, without: str | None) -> list[str]:
    notices = no_target_notes(to, without)
    if hot is not None and to == "sglang":
        notices.append(
            f"the draft vocabulary of {len(hot):,} tokens is in {HOT_TOKENS}; README.md says how it is given"
        )
    elif hot is not None:
        notices.append(f"{READERS[to]} knows no draft vocabulary: it drafts with all {vocabulary:,} tokens")
    return notices
