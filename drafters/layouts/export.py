"""Write a drafter's head in the form of another program, and check a folder in such a form."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from drafters.common.files import check_new_folder, replace_json, replace_text, replacing, save_tensors
from drafters.common.fingerprints import same_weights
from drafters.common.paths import hub_names, readable, shown_name
from drafters.common.wording import dtype_name
from drafters.hub.checkpoint import CONFIDENCE_FILE, WEIGHTS_FILE, load_checkpoint, load_state, parse_config
from drafters.hub.declared import READERS
from drafters.layouts import block, block_export, eagle3, eagle3_export
from drafters.layouts.config import CONFIG_FILE, EXPORT_FIRST, MADE_FROM, made_from, older_keys, read_config, rope
from drafters.layouts.readme import HOT_TOKENS, STEPS, Exported, Form, readme, sglang, vllm
from drafters.layouts.released import (
    BIASED,
    PICKLED_FILE,
    PLAIN,
    SGLANG,
    another_target,
    differences,
    exportable,
    head_layer,
    in_one_dtype,
    kind_of,
    no_target,
    problems,
    read_weights,
    weights_text,
    why_not,
)
from drafters.methods import drafter_class
from drafters.model.draft_head import DRAFT_IDS, check_ids, kept_ids
from drafters.model.ends import load_frozen_ends
from drafters.model.files import load_config_only
from drafters.model.head_adapter import load_head
from drafters.model.layers import ROPES, layer_config, unserved

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from drafters.learned import LearnedDrafter

# Methods whose heads read the target's states: their forms, limits and checks.
STATE_HEADS: dict[str, Any] = {eagle3.METHOD: eagle3_export, **dict.fromkeys(block.METHODS, block_export)}
# A head attends to all tokens before it, also if its target has sliding windows.
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


def export(checkpoint: str, to: str, out: Path, target: str | None = None, adapter: str | None = None) -> list[str]:
    """Write the checkpoint's head for ``to`` into ``out``, a new folder or an empty one.

    Args:
        to: one of ``READERS``.
        target: a folder or Hub repository of the target, if it is not where the checkpoint says.
        adapter: a LoRA for the drafter, merged into it. (A checkpoint that is a LoRA is merged in any case.)

    Returns:
        notes for the user on what was left out.

    Raises:
        ValueError: a checkpoint that ``to`` cannot load, another target, or a folder that holds files.
        OSError: the disk is full, for example.
    """
    check_new_folder(out, "--out")
    config, weights = load_head(checkpoint, adapter=adapter)
    trained, method, given = config["target"], config["drafter_type"], config["drafter"]
    kind = learned(method)
    _refuse(checkpoint, to, _method_refused(to, kind, given))
    head, drafting = kind.read_section(given, source=f"{checkpoint}: options of drafter {method!r}")
    name, revision = target or trained["name"], None if target else trained["revision"]
    family = load_config_only(name, revision)
    _refuse(checkpoint, to, _unserved(to, kind, given, family))
    # Beside another target, a head loads and no draft is accepted.
    fingerprint = load_frozen_ends(name, device="meta", revision=revision).fingerprint
    if not same_weights(trained["fingerprint"], fingerprint, checkpoint):
        raise ValueError(
            f"{checkpoint} was trained for {trained['name']!r} (fingerprint {trained['fingerprint']}), and {name} is "
            f"another model (fingerprint {fingerprint}); give the one it was trained for: --target MODEL"
        )
    loaded = hub_names(checkpoint, name)
    origin = _made_from(config, checkpoint, kind, {*parse_config(config, checkpoint).hub_names, *loaded})
    form_of = STATE_HEADS[method].form if method in STATE_HEADS else _one_layer_form
    form: Form = form_of(checkpoint, to, head, drafting, family, weights, origin)
    calibrated = form.temperatures is not None
    shown = shown_name(checkpoint, loaded), shown_name(name, loaded), to, Path(out.name)
    about = Exported(*shown, form.hot, method, form.readers, form.steps, calibrated)
    text = readme(form.config, form.weights, about, kind.layout)
    _write(out, form, text, kind.layout.pickled)
    return form.notices


def _one_layer_form(
    checkpoint: str,
    to: str,
    head: Any,
    drafting: Any,
    family: "PretrainedConfig",
    weights: dict[str, Tensor],
    origin: dict[str, Any],
) -> Form:
    """The head of one layer of the target's kind, or of Llama's, in the form of ``to``."""
    kind = learned(origin["drafter_type"])
    layout, given = kind.layout, head.stored()
    if (ids := weights.pop(DRAFT_IDS, None)) is not None:
        check_ids(ids, family.vocab_size, checkpoint)
    kept_ids(ids, drafting, family.vocab_size, checkpoint)  # refuses what drafting would
    hot = None if drafting.draft_vocab is None else ids  # all of them: an engine adds no tokens of the text
    load_state(kind.build_module(family, head), weights, checkpoint)
    bias = layout.has_bias(given)
    if bias and not weights[str(layout.bias)].any():
        weights.pop(str(layout.bias))
        bias = False
    weights = in_one_dtype(weights)
    shape = layer_config(family, getattr(head, "layer", "target"))
    written = head_config(shape, to, bias, next(iter(weights.values())).dtype)
    written |= {MADE_FROM: origin}
    _refuse(checkpoint, to, why_not(to, written, layout, bias))
    if to == "sglang":
        if layout.bias:
            weights.setdefault(layout.bias, torch.zeros(family.hidden_size, dtype=next(iter(weights.values())).dtype))
        if hot is not None:  # else the pruned LM head would be the embedding, too
            written["tie_word_embeddings"] = False
    if wrong := problems(written, weights, pickled=layout.pickled):  # a mistake of ours
        raise ValueError(f"{checkpoint} would not load there: {'; '.join(wrong)}")
    same = ("sglang",) if to == "sglang" else ("official", "vllm")
    known = [one for one in same if one == to or not no_target(one, family.model_type)]
    readers = tuple(one for one in known if why_not(one, written, layout, bias) is None)
    return Form(written, weights, hot, readers, _notices(to, hot, family.vocab_size, no_target(to, family.model_type)))


def check(folder: Path, to: str | None = None, target: str | None = None) -> str:
    """Check a head in the form of its authors or of an engine.

    Args:
        to: the program that must be able to load it; None: any.
        target: a folder or Hub repository of the target that it must be for.

    Returns:
        what it is, in words.

    Raises:
        ValueError: everything that is wrong with it.
    """
    source = str(folder)
    config = read_config(folder, source, EXPORT_FIRST)
    path, weights = read_weights(folder, source)
    kind = kind_of(weights)
    layout = kind.layout
    if kind.name in STATE_HEADS:
        return STATE_HEADS[kind.name].check(folder, config, weights, to, target)
    found = problems(config, weights, path.name == PICKLED_FILE) + _hot_problems(folder, config)
    if target is not None:
        found += _other_target(config, target, kind)
    if found:
        raise ValueError(f"{folder} is not {layout.noun} that would be served as it is: {'; '.join(found)}")
    bias = layout.bias is not None and layout.bias in weights
    form = ("sglang",) if layout.bias and config["architectures"][0] in SGLANG.values() else ("official", "vllm")
    refused = {one: "another form; export it once more: --to " + one for one in READERS if one not in form}
    refused |= {one: reason for one in form if (reason := why_not(one, config, layout, bias))}
    if to in refused:
        raise ValueError(f"{folder} is not for {READERS[to]}: {refused[to]}")
    if not (able := [one for one in form if one not in refused]):
        reasons = "; ".join(f"not for {READERS[one]}: {refused[one]}" for one in form)
        raise ValueError(f"{folder} is a head that none of its readers can serve: {reasons}")
    known = "target_fingerprint" in made_from(config)
    for_target = "" if target is None else f", for {target}" if known else f", of the shape of {target}"
    with_bias = f" with {layout.bias}" if bias and weights[str(layout.bias)].any() else ""
    return (
        f"{folder} is {layout.noun}{with_bias} for {' and '.join(READERS[one] for one in able)}, "
        f"{weights_text(weights)}{for_target}"
    )


def head_config(target: "PretrainedConfig", to: str, bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of a model of one layer: the layer of ``target``, which is what ``layer_config`` returned."""
    # Left out: the name that transformers stores, code beside the target, and how the target is quantised.
    left_out = ("_name_or_path", "auto_map", "quantization_config", *WINDOWS)
    found = {key: value for key, value in target.to_dict().items() if key not in left_out}
    family = target.model_type if to == "sglang" and target.model_type in SGLANG else "llama"
    if target.model_type != family:  # keys of another family, such as a number of experts, are left out, too
        known = {key: value for key, value in found.items() if key in LlamaConfig().to_dict() and key != "model_type"}
        found = LlamaConfig(**known).to_dict()
        found |= {"qkv_bias": True} if target.model_type == "qwen2" else {}
    found |= {
        "architectures": [SGLANG[family] if to == "sglang" else BIASED if bias else PLAIN],
        "num_hidden_layers": 1,
        # Of fc. vLLM and SGLang read this key as biases of the attention: with true they draft nonsense silently.
        "bias": bias and to == "official",
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
    found, kind = {}, learned(method)
    for to in READERS:
        found[to] = _method_refused(to, kind, options) or _unserved(to, kind, options, target)
        if found[to] is None and method in STATE_HEADS:
            found[to] = _no_target(to, kind, target)
        elif found[to] is None:
            shape, bias = layer_config(target, options.get("layer", "target")), kind.layout.has_bias(options)
            written = head_config(shape, to, bias, torch.bfloat16)
            found[to] = why_not(to, written, kind.layout, bias) or no_target(to, target.model_type)
    return found


def serving(folder: Path, repo_id: str, base_model: str | None) -> str:
    """How vLLM and SGLang serve the drafter after ``drafters.export``; empty if they cannot, or it is not known."""
    config, weights = load_checkpoint(folder)
    method, options, trained = config["drafter_type"], config["drafter"], config["target"]
    try:
        reasons = served_by(method, options, load_config_only(trained["name"], trained["revision"]))
    except ValueError:  # no head for this target, or no target to read the family from
        return ""
    known = parse_config(config, str(folder)).hub_names
    sections, target = [], base_model or shown_name(trained["name"], known)
    hot = None if options.get("draft_vocab") is None else weights.get(DRAFT_IDS)
    head, drafting = learned(method).read_section(options, source=str(folder))
    steps, calibrated = getattr(head, "slots", STEPS), block_export.temperatures_of(head, drafting) is not None
    for to, how in (("vllm", vllm), ("sglang", sglang)):
        if reasons[to] is None:
            out = Path(f"{repo_id.split('/')[-1]}-{to}")
            export = f"python -m drafters.export {repo_id} --to {to} --out {out} --target {target}"
            section = how(Exported(repo_id, target, to, out, hot, method, steps=steps, calibrated=calibrated))
            sections.append(section.replace("```sh\n", f"```sh\n{export}\n", 1))
    return "\n\n".join(sections)


def _refuse(checkpoint: str, to: str, reason: str | None) -> None:
    """Raise ValueError if there is a ``reason``."""
    if reason is not None:
        raise ValueError(f"{checkpoint} cannot be exported for {READERS[to]}: {reason}")


def learned(method: str) -> type["LearnedDrafter"]:
    """The class of a method with weights; raises ValueError if there is no such method."""
    kind: Any = drafter_class(method)
    if not hasattr(kind, "layout"):
        raise ValueError(f"drafter {method!r} has no weights to export")
    return kind


def _method_refused(to: str, kind: type["LearnedDrafter"], options: Mapping[str, Any]) -> str | None:
    if to not in kind.layout.readers:
        known = ", ".join(other.layout.noun for other in exportable() if to in other.layout.readers)
        return f"it is of the method {kind.name!r}; {READERS[to]} loads {known}, and no other head of ours"
    for name, value in kind.layout.options.items():
        if (found := options.get(name, value)) != value:
            return f"its {name} is {found!r}, and {READERS[to]} knows only {value!r}; train one with {name}={value}"
    return None


def _unserved(
    to: str, kind: type["LearnedDrafter"], options: Mapping[str, Any], target: "PretrainedConfig"
) -> str | None:
    """Why ``to`` cannot serve a head with these options; None if it can."""
    if kind.name in STATE_HEADS:
        return STATE_HEADS[kind.name].why_not(to, kind.read_section(options, source="drafter")[0], target)
    return _layer_refused(to, kind, options, target)


def _no_target(to: str, kind: type["LearnedDrafter"], target: "PretrainedConfig") -> str | None:
    own = STATE_HEADS[kind.name].no_target if kind.name in STATE_HEADS else no_target
    return own(to, target.model_type)


def _layer_refused(
    to: str, kind: type["LearnedDrafter"], options: Mapping[str, Any], target: "PretrainedConfig"
) -> str | None:
    """Why ``to`` has no layer of the head's kind; None if it has."""
    if options.get("layer", "target") == "llama":
        return None
    families, more = kind.layout.families, unserved(target)
    if target.model_type in families and not more:
        return None
    of = f"the family {target.model_type!r}" + (f" with {' and '.join(more)}" if more else "")
    known = f"{', '.join(families)} without biases, with silu and RoPE {', '.join(ROPES)}"
    known += "; train one with layer=llama" if "layer" in kind.shape.model_fields else ""
    return f"its layer is that of {of}, and {READERS[to]} has those of {known}"


def _made_from(
    config: Mapping[str, Any], checkpoint: str, kind: type["LearnedDrafter"], known: Collection[str]
) -> dict[str, Any]:
    """The origin of an export; ``known``: names that are the Hub's."""
    target, options = config["target"], config["drafter"]
    found = {"drafter": shown_name(checkpoint, known), "drafter_type": config["drafter_type"]}
    found |= {"target": shown_name(target["name"], known), "target_revision": target["revision"]}
    found |= {"target_fingerprint": target["fingerprint"]}
    found |= {"layer": options.get("layer", "target")} if "layer" in kind.shape.model_fields else {}
    return found | ({"exit_layer": options["exit_layer"]} if "exit_layer" in options else {})


def _other_target(config: Mapping[str, Any], name: str, kind: type["LearnedDrafter"]) -> list[str]:
    """What shows that a head is for another target than ``name``, in words."""
    theirs = load_config_only(name)
    found = differences(config, layer_config(theirs, head_layer(config, theirs, kind)), kind.layout)
    if not found and (another := another_target(config, name)):
        found.append(another)
    return found


def _hot_problems(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """What is wrong with the file of token ids that SGLang would draft with, in words; the file may be missing."""
    if not (path := folder / HOT_TOKENS).is_file():
        return []
    try:
        found = torch.tensor(torch.load(readable(path), weights_only=True))
        check_ids(found, int(config["vocab_size"]), HOT_TOKENS)
    except Exception as error:  # a stranger's file can fail in any way
        return [(str(error).splitlines() or [type(error).__name__])[0]]
    return []


def _notices(to: str, hot: Tensor | None, vocabulary: int, without: str | None) -> list[str]:
    found = [] if without is None else [f"{READERS[to]} cannot serve this today: {without}; the folder has its layout"]
    if hot is not None and to == "sglang":
        found.append(f"the draft vocabulary of {len(hot):,} tokens is in {HOT_TOKENS}; README.md says how it is given")
    elif hot is not None:
        found.append(f"{READERS[to]} knows no draft vocabulary: it drafts with all {vocabulary:,} tokens")
    return found


def _write(out: Path, form: Form, text: str, pickled: bool) -> None:
    there = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        if not pickled:
            save_tensors(form.weights, out / WEIGHTS_FILE, {"format": "pt"})
        else:  # the only name that the official code opens; plain tensors, which load with weights_only=True
            with replacing(out / PICKLED_FILE) as path:
                torch.save({name: value.clone() for name, value in form.weights.items()}, path)
        if form.hot is not None:
            with replacing(out / HOT_TOKENS) as path:
                torch.save(form.hot.tolist(), path)
        if form.temperatures is not None:
            replace_json(out / CONFIDENCE_FILE, {"temperatures": form.temperatures})
        replace_text(out / "README.md", text)
        replace_json(out / CONFIG_FILE, form.config)
    except BaseException:
        for file in out.iterdir():
            file.unlink()
        if not there:
            out.rmdir()
        raise
