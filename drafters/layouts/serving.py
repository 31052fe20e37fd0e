"""How engines serve a drafter that is on the Hub: a section of its model card."""

from pathlib import Path

from drafters.common.paths import shown_name
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.export import check_served
from drafters.layouts.readme import Exported, sglang, vllm
from drafters.model.draft_head import DRAFT_IDS


def serving(folder: Path, repo_id: str, base_model: str | None) -> str:
    """How vLLM and SGLang serve the drafter after ``drafters.export``; empty if they cannot, or it is not known."""
    config, weights = load_checkpoint(folder)
    sections, target = [], base_model or shown_name(config["target"]["name"])
    hot = None if config["drafter"].get("draft_vocab") is None else weights.get(DRAFT_IDS)
    for to, how in (("vllm", vllm), ("sglang", sglang)):
        try:
            check_served(config, str(folder), to)
        except ValueError:  # another method, another family, or no target to read the family from
            continue
        out = Path(f"{repo_id.split('/')[-1]}-{to}")
        export = f"python -m drafters.export {repo_id} --to {to} --out {out} --target {target}"
        section = how(Exported(repo_id, target, to, out, hot, config["drafter_type"]))
        sections.append(section.replace("```sh\n", f"```sh\n{export}\n", 1))
    return "\n\n".join(sections)
