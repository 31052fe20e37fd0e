"""The work of ``drafters.hub`` beside publishing: what is shown beforehand, and what the card says of engines."""

from pathlib import Path

from drafters.common.wording import size_text
from drafters.hub.checkpoint import load_checkpoint
from drafters.hub.model_card import shown_name
from drafters.hub.publishing import Files
from drafters.layouts.export import check_served
from drafters.layouts.readme import Exported, sglang, vllm
from drafters.model.draft_head import DRAFT_IDS


def listed(files: Files, repo_id: str, revision: str | None) -> str:
    """A line a file, and where they go."""
    sizes = {name: len(one) if isinstance(one, bytes) else one.stat().st_size for name, one in files.items()}
    width = max(map(len, sizes))
    lines = [f"{name:{width}}  {size_text(size):>10}" for name, size in sizes.items()]
    where = f"{repo_id}, branch {revision or 'main'}"
    return "\n".join([*lines, f"{len(files)} files, {size_text(sum(sizes.values()))}, for {where}"])


def serving(folder: Path, repo_id: str, base_model: str | None) -> str:
    """How vLLM and SGLang serve the drafter, after ``drafters.export``; empty where they cannot, or no one can tell."""
    config, weights = load_checkpoint(folder)
    sections, target = [], base_model or shown_name(config["target"]["name"])
    ids, count = weights.get(DRAFT_IDS), config["drafter"].get("draft_vocab")
    hot = None if count is None else ids
    for to, how in (("vllm", vllm), ("sglang", sglang)):
        try:
            check_served(config, str(folder), to)
        except ValueError:  # another method, another family, or the target is not there to be asked
            continue
        out = Path(f"{repo_id.split('/')[-1]}-{to}")
        export = f"python -m drafters.export {repo_id} --to {to} --out {out} --target {target}"
        section = how(Exported(repo_id, target, to, out, hot))
        sections.append(section.replace("```sh\n", f"```sh\n{export}\n", 1))
    return "\n\n".join(sections)
