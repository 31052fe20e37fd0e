"""The work of ``drafters.export``: write a head for others, and check one."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from .checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_state
from .choices import SHIFTED
from .eagle import EagleHead
from .export import EXPORT_FIRST, check_out, read_config
from .export_readme import Exported, readme
from .files import replace_json, replace_text, replacing, save_tensors
from .head_adapter import load_head
from .kangaroo import KangarooAdapter
from .model.draft_head import DRAFT_IDS
from .model.ends import load_frozen_ends
from .model.files import load_config_only
from .released import (
    BIASED,
    HOT_TOKENS,
    MADE_FROM,
    PICKLED_FILE,
    PLAIN,
    SGLANG,
    WHO,
    differences,
    is_eagle,
    made_from,
    problems,
    read_weights,
    rope,
    shown,
    why_not,
)
from .wording import dtype_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Families whose head's layer is Llama's (of Qwen2: with biases of q, k and v), of targets that are served there. A head
# sees all that came before, also where its target has sliding windows.
FAMILIES = {
    "official": ("llama", "mixtral", "qwen2"),
    "vllm": ("llama", "mistral", "mixtral", "qwen2"),
    "sglang": ("llama", "mistral", "mixtral", "qwen2"),
}
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


def export(checkpoint: str, to: str, out: Path, target: str | None = None, adapter: str | None = None) -> list[str]:
    """Write the checkpoint's head for ``to`` into ``out``, a new folder or an empty one.

    Args:
        to: one of ``drafters.export.READERS``.
        target: a folder or Hub repository of the target, where it is not at the place that the checkpoint names.
        adapter: a LoRA for the drafter, merged into it. (That of a checkpoint which is one is merged in any case.)

    Returns:
        what a user should know of what was left out, in words.

    Raises:
        ValueError: a checkpoint that ``to`` cannot load, another target, or a folder that holds files.
        OSError: the disk is full, say.
    """
    check_out(out)
    config, weights = load_head(checkpoint, adapter=adapter)
    trained, options = config["target"], config["drafter"]
    _check_method(config, checkpoint, to)
    name, revision = target or trained["name"], None if target else trained["revision"]
    family = load_config_only(name, revision)
    _check_family(family, checkpoint, to, config["drafter_type"])
    # A head that is served beside another target loads as well, and nothing that it drafts is accepted.
    fingerprint = load_frozen_ends(name, device="meta", revision=revision).fingerprint
    if fingerprint != trained["fingerprint"]:
        raise ValueError(
            f"{checkpoint} was trained for {trained['name']!r} (fingerprint {trained['fingerprint']}), and {name} is "
            f"another model (fingerprint {fingerprint}); give the one it was trained for: --target MODEL"
        )
    ids, count = weights.pop(DRAFT_IDS, None), options.get("draft_vocab")
    hot = None if count is None else ids  # all that are listed: an engine adds none of the text's own to them
    eagle, fc_bias = config["drafter_type"] == "eagle", options.get("fc_bias", False)
    load_state(EagleHead(family, bias=fc_bias) if eagle else KangarooAdapter(family), weights, checkpoint)
    if fc_bias and not weights["fc.bias"].any():
        weights.pop("fc.bias")
        fc_bias = False
    weights = _in_one_dtype(weights)
    written = head_config(family, to, fc_bias, next(iter(weights.values())).dtype) | {
        MADE_FROM: _made_from(config, checkpoint)
    }
    if reason := why_not(to, written, eagle, fc_bias):
        raise ValueError(f"{checkpoint} cannot be exported for {WHO[to]}: {reason}")
    if to == "sglang":
        weights.setdefault("fc.bias", torch.zeros_like(weights["fc.weight"][:, 0]))
        if hot is not None:  # else the pruned LM head would be the embedding, too
            written["tie_word_embeddings"] = False
    if wrong := problems(written, weights, pickled=not eagle):  # else this is a mistake of ours
        raise ValueError(f"{checkpoint} would not load there: {'; '.join(wrong)}")
    same = ("sglang",) if to == "sglang" else ("official", "vllm")
    known = [one for one in same if family.model_type in FAMILIES[one]]
    readers = tuple(one for one in known if why_not(one, written, eagle, fc_bias) is None)
    text = readme(written, weights, Exported(checkpoint, name, to, out, hot, readers))
    _write(out, written, weights, hot if to == "sglang" else None, text)
    return _notices(to, hot, family.vocab_size)


def check(folder: Path, to: str | None = None, target: str | None = None) -> str:
    """Check a head in the form of its authors or of an engine.

    Args:
        to: who it must be for; None: anyone. target: a folder or Hub repository of the target it must be for.

    Returns:
        what it is, in words.

    Raises:
        ValueError: what is wrong with it, all of it.
    """
    source = str(folder)
    config = read_config(folder, source, EXPORT_FIRST)
    path, weights = read_weights(folder, source)
    eagle = is_eagle(weights)
    found = problems(config, weights, path.name == PICKLED_FILE)
    if target is not None:
        found += _other_target(config, target, eagle)
    if found:
        kind = "an EAGLE head" if eagle else "a Kangaroo adapter"
        raise ValueError(f"{folder} is not {kind} that would be served as it is: {'; '.join(found)}")
    for_sglang = eagle and config["architectures"][0] in SGLANG.values()
    fc_bias = "fc.bias" in weights
    form = ("sglang",) if for_sglang else ("official", "vllm")
    refused = {one: "another form; export it once more: --to " + one for one in WHO if one not in form}
    refused |= {one: reason for one in form if (reason := why_not(one, config, eagle, fc_bias))}
    if to in refused:
        raise ValueError(f"{folder} is not for {WHO[to]}: {refused[to]}")
    known = "target_fingerprint" in made_from(config)
    for_target = "" if target is None else f", for {target}" if known else f", of the shape of {target}"
    readers = " and ".join(WHO[one] for one in form if one not in refused)
    parameters = sum(value.numel() for value in weights.values())
    kind = f"an EAGLE head{' with fc.bias' if eagle and fc_bias and weights['fc.bias'].any() else ''}"
    return (
        f"{folder} is {kind if eagle else 'a Kangaroo adapter'} for {readers}, {parameters:,} weights in "
        f"{dtype_name(next(iter(weights.values())).dtype)}{for_target}"
    )


def head_config(target: "PretrainedConfig", to: str, fc_bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of a model of one layer as wide as the target's."""
    # Without the name that transformers keeps of it, and without what would lead to code beside the target or say how
    # the target is quantised.
    left_out = ("_name_or_path", "auto_map", "quantization_config", *WINDOWS)
    found = {key: value for key, value in target.to_dict().items() if key not in left_out}
    family = target.model_type if to == "sglang" and target.model_type in SGLANG else "llama"
    if target.model_type != family:  # nothing of another family's stays, such as a number of experts
        known = {key: value for key, value in found.items() if key in LlamaConfig().to_dict() and key != "model_type"}
        found = LlamaConfig(**known).to_dict()
        found |= {"qkv_bias": True} if target.model_type == "qwen2" else {}
    found |= {
        "architectures": [SGLANG[family] if to == "sglang" else BIASED if fc_bias else PLAIN],
        "num_hidden_layers": 1,
        # Of fc. vLLM and SGLang read it as biases of the attention: with true they expect some, draft nonsense and say
        # nothing.
        "bias": fc_bias and to == "official",
        "dtype": dtype_name(dtype),
        "torch_dtype": dtype_name(dtype),
    }
    if (turning := rope(found))["rope_type"] == "default":  # as readers older than transformers 5 look for it
        found |= {"rope_theta": turning["rope_theta"], "rope_scaling": None}
    return found


def check_served(config: Mapping[str, Any], checkpoint: str, to: str) -> None:
    """Raise ValueError where ``to`` cannot load a checkpoint with this ``config``, or its target is not there."""
    _check_method(config, checkpoint, to)
    family = load_config_only(config["target"]["name"], config["target"]["revision"])
    _check_family(family, checkpoint, to, config["drafter_type"])
    if config["drafter"].get("fc_bias"):
        raise ValueError(f"{checkpoint} has a bias in fc, which may or may not be dropped; export it and see")


def _check_method(config: Mapping[str, Any], checkpoint: str, to: str) -> None:
    method, options = config["drafter_type"], config["drafter"]
    if method not in ("eagle", "kangaroo") or (method == "kangaroo" and to != "official"):
        raise ValueError(
            f"{checkpoint} is of the method {method!r}; {WHO[to]} loads EAGLE heads"
            + (" and Kangaroo adapters" if to == "official" else "")
            + ", and no other of ours"
        )
    if (inputs := options.get("inputs", SHIFTED)) != SHIFTED:
        raise ValueError(
            f"{checkpoint} reads {inputs!r}, and {WHO[to]} gives a head {SHIFTED!r} alone; train one with "
            f"inputs={SHIFTED}, the default"
        )
    if own := [key for key in ("ffn", "own_lm_head") if method == "kangaroo" and options.get(key)]:
        raise ValueError(f"{checkpoint} has {' and '.join(own)}, which {WHO[to]} does not know; train one without")


def _check_family(config: "PretrainedConfig", checkpoint: str, to: str, method: str) -> None:
    biases = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    families = FAMILIES[to] if method == "eagle" else ("llama",)
    if config.model_type not in families or biases:
        of = f"the family {config.model_type!r}" + (f" with {' and '.join(biases)}" if biases else "")
        raise ValueError(
            f"{checkpoint} is a head for {of}; {WHO[to]} gets heads for {', '.join(families)}, without such biases"
        )


def _in_one_dtype(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All in the widest one: a merged LoRA leaves matrices in float32 beside norms in 16 bits."""
    dtypes = {value.dtype for value in weights.values()}
    wide = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return {name: value.to(wide) for name, value in weights.items()}


def _made_from(config: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    target = config["target"]
    found = {"drafter": shown(checkpoint), "drafter_type": config["drafter_type"], "target": shown(target["name"])}
    found |= {"target_revision": target["revision"], "target_fingerprint": target["fingerprint"]}
    exit_layer = config["drafter"].get("exit_layer")
    return found | ({} if exit_layer is None else {"exit_layer": exit_layer})


def _other_target(config: Mapping[str, Any], name: str, is_eagle: bool) -> list[str]:
    """What tells that a head is for another target than ``name``, in words."""
    found = differences(config, load_config_only(name), is_eagle)
    known = made_from(config).get("target_fingerprint")
    if not found and known is not None:
        fingerprint = load_frozen_ends(name, device="meta").fingerprint
        if fingerprint != known:
            found.append(f"it is for another target (fingerprint {known}) than {name} (fingerprint {fingerprint})")
    return found


def _notices(to: str, hot: Tensor | None, vocabulary: int) -> list[str]:
    if hot is None:
        return []
    if to == "sglang":
        return [f"the draft vocabulary of {len(hot):,} tokens is in {HOT_TOKENS}; README.md says how it is given"]
    return [
        f"{WHO[to]} knows no draft vocabulary of an EAGLE-1/2 head or an adapter: the one of {len(hot):,} tokens is "
        f"left out, and it drafts with all {vocabulary:,}"
    ]


def _write(out: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], hot: Tensor | None, text: str) -> None:
    there = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        if is_eagle(weights):
            save_tensors(weights, out / WEIGHTS_FILE, {"format": "pt"})
        else:  # the official code opens this name alone; plain tensors, which load with weights_only=True
            with replacing(out / PICKLED_FILE) as path:
                torch.save({name: value.clone() for name, value in weights.items()}, path)
        if hot is not None:
            with replacing(out / HOT_TOKENS) as path:
                torch.save(hot.tolist(), path)
        replace_text(out / "README.md", text)
        replace_json(out / CONFIG_FILE, config)
    except BaseException:
        for file in out.iterdir():
            file.unlink()
        if not there:
            out.rmdir()
        raise
