"""How engines serve a drafter that is on the Hub: a section of its model card."""

from pathlib import Path

from drafters.common.paths import shown_name
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.export import served_by
from drafters.layouts.readme import Exported, sglang, vllm
from drafters.model.draft_head import DRAFT_IDS
from drafters.model.files import load_config_only


def serving(folder: Path, repo_id: str, base_model: str | None) -> str:
    """How vLLM and SGLang serve the drafter after ``drafters.export``; empty if they cannot, or it is not known."""
    config, weights = load_checkpoint(folder)
    method, options, trained = config["drafter_type"], config["drafter"], config["target"]
    try:
        reasons = served_by(method, options, load_config_only(trained["name"], trained["revision"]))
    except ValueError:  # no head for this target, or no target to read the family from
        return ""
    sections, target = [], base_model or shown_name(trained["name"])
    hot = None if options.get("draft_vocab") is None else weights.get(DRAFT_IDS)
    for to, how in (("vllm", vllm), ("sglang", sglang)):
        if reasons[to] is None:
            out = Path(f"{repo_id.split('/')[-1]}-{to}")
            export = f"python -m drafters.export {repo_id} --to {to} --out {out} --target {target}"
            section = how(Exported(repo_id, target, to, out, hot, method))
            sections.append(section.replace("```sh\n", f"```sh\n{export}\n", 1))
    return "\n\n".join(sections)
