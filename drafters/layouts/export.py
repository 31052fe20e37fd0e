"""Write a drafter's head in the form of another program, and check a folder in such a form."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drafters.common.files import check_new_folder, replace_json, replace_text, replacing, save_tensors
from drafters.common.fingerprints import same_weights
from drafters.common.paths import hub_names, shown_name
from drafters.heads.forms import STEPS, Trained, Written
from drafters.heads.keys import CONFIG_FILE, EXPORT_FIRST, READERS
from drafters.heads.mask_embedding import MASK_EMBEDDING, write_mask_embedding
from drafters.heads.one_layer import HOT_TOKENS, PICKLED_FILE
from drafters.hub.checkpoint import CONFIDENCE_FILE, WEIGHTS_FILE, load_checkpoint, parse_config
from drafters.layouts.files import exportable, kind_of, read_folder
from drafters.layouts.readme import Exported, readme, sglang, vllm
from drafters.learned import LearnedDrafter
from drafters.methods import drafter_class
from drafters.model.candidates import without_pair
from drafters.model.draft_head import DRAFT_IDS
from drafters.model.ends import load_frozen_ends
from drafters.model.files import load_config_only
from drafters.model.head_adapter import load_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
    trained, method = config["target"], config["drafter_type"]
    kind = learned(method)
    _refuse(checkpoint, to, _method_refused(to, kind))
    options = kind.read_section(config["drafter"], source=f"{checkpoint}: options of drafter {method!r}")
    head = kind.forms.tidied(Trained(checkpoint, *options, without_pair(weights)))
    name, revision = target or trained["name"], None if target else trained["revision"]
    family = load_config_only(name, revision)
    _refuse(checkpoint, to, kind.forms.why_not(to, head.shape, family))
    # Beside another target, a head loads and no draft is accepted.
    fingerprint = load_frozen_ends(name, device="meta", revision=revision).fingerprint
    if not same_weights(trained["fingerprint"], fingerprint, checkpoint):
        raise ValueError(
            f"{checkpoint} was trained for {trained['name']!r} (fingerprint {trained['fingerprint']}), and {name} is "
            f"another model (fingerprint {fingerprint}); give the one it was trained for: --target MODEL"
        )
    loaded = hub_names(checkpoint, name)
    origin = _made_from(config, checkpoint, kind, {*parse_config(config, checkpoint).hub_names, *loaded})
    written = kind.forms.write(to, head, family, origin)
    temperatures = kind.forms.temperatures(head.shape, head.drafting) if "sglang" in written.readers else None
    shown = shown_name(checkpoint, loaded), shown_name(name, loaded), to, Path(out.name), written.hot, method
    about = Exported(*shown, kind.forms, written.readers, _steps(head.shape), calibrated=temperatures is not None)
    _write(out, written, readme(written.config, written.weights, about), temperatures, kind.forms.pickled)
    left_out = ["the pair of candidates is left out: it drafts with all rows of the LM head there"]
    return [*written.notices, *(left_out if len(without_pair(weights)) < len(weights) else [])]


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
    _, stored = read_folder(folder, str(folder), EXPORT_FIRST)
    return kind_of(stored.config, stored.weights, stored.source).forms.check(stored, to, target)


def served_by(method: str, options: Mapping[str, Any], target: "PretrainedConfig") -> dict[str, str | None]:
    """Return, for each reader, why it cannot serve a drafter for ``target``; None if it can.

    Args:
        method, options: the drafter's, as in its checkpoint's config.json.

    Raises:
        ValueError: no head can be made for the target.
    """
    kind = learned(method)
    forms, family = kind.forms, target.model_type
    if not forms.readers:
        return {to: _method_refused(to, kind) for to in READERS}
    shape, _ = kind.read_section(options, source="drafter")
    return {
        to: _method_refused(to, kind) or forms.why_not(to, shape, target) or forms.no_target(to, family)
        for to in READERS
    }


def serving(folder: Path, repo_id: str, base_model: str | None) -> str:
    """How vLLM and SGLang serve the drafter after ``drafters.export``; empty if they cannot, or it is not known."""
    config, weights = load_checkpoint(folder)
    method, options, trained = config["drafter_type"], config["drafter"], config["target"]
    try:
        reasons = served_by(method, options, load_config_only(trained["name"], trained["revision"]))
    except ValueError:  # no head for this target, or no target to read the family from
        return ""
    known = parse_config(config, str(folder)).hub_names
    sections, target, forms = [], base_model or shown_name(trained["name"], known), learned(method).forms
    hot = None if options.get("draft_vocab") is None else weights.get(DRAFT_IDS)
    shape, drafting = learned(method).read_section(options, source=str(folder))
    calibrated = forms.temperatures(shape, drafting) is not None
    for to, how in (("vllm", vllm), ("sglang", sglang)):
        if reasons[to] is None:
            out = Path(f"{repo_id.split('/')[-1]}-{to}")
            export = f"python -m drafters.export {repo_id} --to {to} --out {out} --target {target}"
            about = Exported(repo_id, target, to, out, hot, method, forms, steps=_steps(shape), calibrated=calibrated)
            sections.append(how(about).replace("```sh\n", f"```sh\n{export}\n", 1))
    return "\n\n".join(sections)


def _steps(shape: Any) -> int:
    """Tokens of a draft in the commands shown."""
    return getattr(shape, "slots", STEPS)


def _refuse(checkpoint: str, to: str, reason: str | None) -> None:
    """Raise ValueError if there is a ``reason``."""
    if reason is not None:
        raise ValueError(f"{checkpoint} cannot be exported for {READERS[to]}: {reason}")


def learned(method: str) -> type[LearnedDrafter]:
    """The class of a method with weights; raises ValueError if there is no such method."""
    kind: Any = drafter_class(method)
    if not issubclass(kind, LearnedDrafter):
        raise ValueError(f"drafter {method!r} has no weights to export")
    return kind


def _method_refused(to: str, kind: type[LearnedDrafter]) -> str | None:
    if to in kind.forms.readers:
        return None
    if kind.stitched:
        return "engines load it from its target's files; write it there: python -m drafters.stitch CHECKPOINT --out F"
    known = ", ".join(other.forms.noun for other in exportable() if to in other.forms.readers)
    return f"it is of the method {kind.name!r}; {READERS[to]} loads {known}, and no other head of ours"


def _made_from(
    config: Mapping[str, Any], checkpoint: str, kind: type[LearnedDrafter], known: Collection[str]
) -> dict[str, Any]:
    """The origin of an export; ``known``: names that are the Hub's."""
    target, options = config["target"], config["drafter"]
    found = {"drafter": shown_name(checkpoint, known), "drafter_type": config["drafter_type"]}
    found |= {"target": shown_name(target["name"], known), "target_revision": target["revision"]}
    found |= {"target_fingerprint": target["fingerprint"]}
    found |= {"layer": options.get("layer", "target")} if "layer" in kind.shape.model_fields else {}
    return found | ({"exit_layer": options["exit_layer"]} if "exit_layer" in options else {})


def _write(out: Path, written: Written, text: str, temperatures: list[float] | None, pickled: bool) -> None:
    there, weights = out.exists(), dict(written.weights)
    own_mask = weights.pop(MASK_EMBEDDING, None)
    out.mkdir(parents=True, exist_ok=True)
    try:
        if own_mask is not None:
            write_mask_embedding(own_mask, out)
        if not pickled:
            save_tensors(weights, out / WEIGHTS_FILE, {"format": "pt"})
        else:  # the only name that the official code opens; plain tensors, which load with weights_only=True
            with replacing(out / PICKLED_FILE) as path:
                torch.save({name: value.clone() for name, value in weights.items()}, path)
        if written.hot is not None:
            with replacing(out / HOT_TOKENS) as path:
                torch.save(written.hot.tolist(), path)
        if temperatures is not None:
            replace_json(out / CONFIDENCE_FILE, {"temperatures": temperatures})
        replace_text(out / "README.md", text)
        replace_json(out / CONFIG_FILE, written.config)
    except BaseException:
        for file in out.iterdir():
            file.unlink()
        if not there:
            out.rmdir()
        raise
