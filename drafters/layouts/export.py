"""The work of ``drafters.export``: write a head for others, and check one."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from drafters.common.choices import SHIFTED
from drafters.common.files import check_new_folder, replace_json, replace_text, replacing, save_tensors
from drafters.common.paths import readable
from drafters.common.wording import dtype_name
from drafters.config import validate
from drafters.export import EXPORT_FIRST, READERS, read_config
from drafters.hub.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_state
from drafters.layouts.readme import Exported, readme
from drafters.layouts.released import (
    BIASED,
    HOT_TOKENS,
    MADE_FROM,
    PICKLED_FILE,
    PLAIN,
    SGLANG,
    WHO,
    differences,
    head_layer,
    is_eagle,
    made_from,
    no_target,
    older_keys,
    problems,
    read_weights,
    rope,
    shown,
    why_not,
)
from drafters.methods import drafter_class
from drafters.model.draft_head import DRAFT_IDS, check_ids, kept_ids
from drafters.model.ends import load_frozen_ends
from drafters.model.files import load_config_only
from drafters.model.head_adapter import load_head
from drafters.model.layers import ROPES, SERVED, layer_config, unserved

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A head sees all that came before, also where its target has sliding windows.
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
    check_new_folder(out, "--out")
    config, weights = load_head(checkpoint, adapter=adapter)
    trained, method = config["target"], config["drafter_type"]
    _refuse(checkpoint, to, _method_refused(to, method, config["drafter"]))
    kind: Any = drafter_class(method)
    options = validate(kind.options, config["drafter"], source=f"{checkpoint}: options of drafter {method!r}")
    name, revision = target or trained["name"], None if target else trained["revision"]
    family = load_config_only(name, revision)
    _refuse(checkpoint, to, _layer_refused(to, method, config["drafter"], family))
    # A head that is served beside another target loads as well, and nothing that it drafts is accepted.
    fingerprint = load_frozen_ends(name, device="meta", revision=revision).fingerprint
    if fingerprint != trained["fingerprint"]:
        raise ValueError(
            f"{checkpoint} was trained for {trained['name']!r} (fingerprint {trained['fingerprint']}), and {name} is "
            f"another model (fingerprint {fingerprint}); give the one it was trained for: --target MODEL"
        )
    if (ids := weights.pop(DRAFT_IDS, None)) is not None:
        check_ids(ids, family.vocab_size, checkpoint)
    kept_ids(ids, options, family.vocab_size, checkpoint)  # refuses what drafting would
    hot = None if options.draft_vocab is None else ids  # all: an engine adds none of the text's own to them
    eagle, fc_bias = method == "eagle", config["drafter"].get("fc_bias", False)
    load_state(kind.build_module(family, config["drafter"]), weights, checkpoint)
    if fc_bias and not weights["fc.bias"].any():
        weights.pop("fc.bias")
        fc_bias = False
    weights = _in_one_dtype(weights)
    shape = layer_config(family, options.layer if eagle else "target")
    written = head_config(shape, to, fc_bias, next(iter(weights.values())).dtype) | {
        MADE_FROM: _made_from(config, checkpoint)
    }
    _refuse(checkpoint, to, why_not(to, written, eagle, fc_bias))
    if to == "sglang":
        weights.setdefault("fc.bias", torch.zeros_like(weights["fc.weight"][:, 0]))
        if hot is not None:  # else the pruned LM head would be the embedding, too
            written["tie_word_embeddings"] = False
    if wrong := problems(written, weights, pickled=not eagle):  # else this is a mistake of ours
        raise ValueError(f"{checkpoint} would not load there: {'; '.join(wrong)}")
    same = ("sglang",) if to == "sglang" else ("official", "vllm")
    known = [one for one in same if one == to or not no_target(one, family.model_type)]
    readers = tuple(one for one in known if why_not(one, written, eagle, fc_bias) is None)
    text = readme(written, weights, Exported(checkpoint, name, to, out, hot, readers))
    _write(out, written, weights, hot if to == "sglang" else None, text)
    return _notices(to, hot, family.vocab_size, no_target(to, family.model_type) if eagle else None)


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
    found = problems(config, weights, path.name == PICKLED_FILE) + _hot_problems(folder, config)
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
    if not (able := [one for one in form if one not in refused]):
        reasons = "; ".join(f"not for {WHO[one]}: {refused[one]}" for one in form)
        raise ValueError(f"{folder} is a head that none of its readers can serve: {reasons}")
    known = "target_fingerprint" in made_from(config)
    for_target = "" if target is None else f", for {target}" if known else f", of the shape of {target}"
    readers = " and ".join(WHO[one] for one in able)
    parameters = sum(value.numel() for value in weights.values())
    kind = f"an EAGLE head{' with fc.bias' if eagle and fc_bias and weights['fc.bias'].any() else ''}"
    return (
        f"{folder} is {kind if eagle else 'a Kangaroo adapter'} for {readers}, {parameters:,} weights in "
        f"{dtype_name(next(iter(weights.values())).dtype)}{for_target}"
    )


def head_config(target: "PretrainedConfig", to: str, fc_bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of a model of one layer: ``target``'s, or what ``layer_config`` gives for it."""
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
    return found | older_keys(rope(found))


def served_by(method: str, options: Mapping[str, Any], target: "PretrainedConfig") -> dict[str, str | None]:
    """Return, for each reader, why it cannot serve a drafter for ``target``; None if it can.

    Args:
        method, options: the drafter's, as in its checkpoint's config.json.

    Raises:
        ValueError: no head can be made for the target.
    """
    eagle, fc_bias = method == "eagle", options.get("fc_bias", False)
    found = {}
    for to in READERS:
        found[to] = _method_refused(to, method, options) or _layer_refused(to, method, options, target)
        if found[to] is None:
            shape = layer_config(target, options.get("layer", "target"))
            written = head_config(shape, to, fc_bias, torch.bfloat16)
            found[to] = why_not(to, written, eagle, fc_bias) or (no_target(to, target.model_type) if eagle else None)
    return found


def check_served(config: Mapping[str, Any], checkpoint: str, to: str) -> None:
    """Raise ValueError where ``to`` cannot load a checkpoint with this ``config``, or its target is not there."""
    method, options = config["drafter_type"], config["drafter"]
    _refuse(checkpoint, to, _method_refused(to, method, options))
    family = load_config_only(config["target"]["name"], config["target"]["revision"])
    _refuse(checkpoint, to, _layer_refused(to, method, options, family))
    if options.get("fc_bias"):
        raise ValueError(f"{checkpoint} has a bias in fc, which may or may not be dropped; export it and see")


def _refuse(checkpoint: str, to: str, reason: str | None) -> None:
    """Raise ValueError if there is a ``reason``."""
    if reason is not None:
        raise ValueError(f"{checkpoint} cannot be exported for {WHO[to]}: {reason}")


def _method_refused(to: str, method: str, options: Mapping[str, Any]) -> str | None:
    if method not in ("eagle", "kangaroo") or (method == "kangaroo" and to != "official"):
        adapters = " and Kangaroo adapters" if to == "official" else ""
        return f"it is of the method {method!r}; {WHO[to]} loads EAGLE heads{adapters}, and no other of ours"
    if (inputs := options.get("inputs", SHIFTED)) != SHIFTED:
        return (
            f"it reads {inputs!r}, and {WHO[to]} gives a head {SHIFTED!r} alone; train one with inputs={SHIFTED}, the "
            "default"
        )
    if own := [key for key in ("ffn", "own_lm_head") if method == "kangaroo" and options.get(key)]:
        return f"it has {' and '.join(own)}, which {WHO[to]} does not know; train one without"
    return None


def _layer_refused(to: str, method: str, options: Mapping[str, Any], target: "PretrainedConfig") -> str | None:
    """Why ``to`` has no layer of the head's kind."""
    eagle = method == "eagle"
    if eagle and options.get("layer", "target") == "llama":
        return None
    more = unserved(target)
    if target.model_type in (SERVED if eagle else ("llama",)) and not more:
        return None
    of = f"the family {target.model_type!r}" + (f" with {' and '.join(more)}" if more else "")
    known = f"{', '.join(SERVED if eagle else ('llama',))} without biases, with silu and RoPE {', '.join(ROPES)}"
    known += "; train one with layer=llama" if eagle else ""
    return f"its layer is that of {of}, and {WHO[to]} has those of {known}"


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
    found |= {"layer": config["drafter"].get("layer", "target")} if config["drafter_type"] == "eagle" else {}
    return found | ({} if exit_layer is None else {"exit_layer": exit_layer})


def _other_target(config: Mapping[str, Any], name: str, is_eagle: bool) -> list[str]:
    """What tells that a head is for another target than ``name``, in words."""
    theirs = load_config_only(name)
    found = differences(config, layer_config(theirs, head_layer(config, theirs, is_eagle)), is_eagle)
    known = made_from(config).get("target_fingerprint")
    if not found and known is not None:
        fingerprint = load_frozen_ends(name, device="meta").fingerprint
        if fingerprint != known:
            found.append(f"it is for another target (fingerprint {known}) than {name} (fingerprint {fingerprint})")
    return found


def _hot_problems(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the ids that SGLang would draft with, in words; none where there is no such file."""
    if not (path := folder / HOT_TOKENS).is_file():
        return []
    try:
        found = torch.tensor(torch.load(readable(path), weights_only=True))
        check_ids(found, int(config["vocab_size"]), HOT_TOKENS)
    except Exception as error:  # what a stranger wrote can fail in any way
        return [(str(error).splitlines() or [type(error).__name__])[0]]
    return []


def _notices(to: str, hot: Tensor | None, vocabulary: int, without: str | None) -> list[str]:
    found = [] if without is None else [f"{WHO[to]} cannot serve this today: {without}; the folder has its layout"]
    if hot is None:
        return found
    if to == "sglang":
        return [
            *found,
            f"the draft vocabulary of {len(hot):,} tokens is in {HOT_TOKENS}; README.md says how it is given",
        ]
    return [
        *found,
        f"{WHO[to]} knows no draft vocabulary of an EAGLE-1/2 head or an adapter: the one of {len(hot):,} tokens is "
        f"left out, and it drafts with all {vocabulary:,}",
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
