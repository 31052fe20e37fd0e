"""A report from its runs and what was noted at their end; needs neither the model nor the prompt file."""

from typing import Any

from eval.measure.runner import Run
from eval.prompts.files import Record
from eval.prompts.prompts import Prompt
from eval.report.rows import best_throughput, failures, make_rows

KEPT = ("id", "category", "sub_category", "turn")  # of a prompt, beside the number of its tokens


def ending(
    facts: dict[str, Any],
    described: dict[str, dict[str, Any]],
    baseline_label: str,
    prompts: list[Prompt],
    judged: list[dict[str, Any]],
    left_out: list[dict[str, Any]],
    texts: dict[str, Any],
) -> dict[str, Any]:
    """The journal's last line: all that ``build`` and the pages need beside the runs.

    Args:
        facts: the report's environment. described: every row's label and what is known of it. judged: what the target
            says of the outputs. left_out: methods that cannot decode so many prompts together. texts: see
            ``eval.report.texts``.
    """
    shown = [{**row, **described[row["drafter"]]} for row in left_out]
    return {
        "environment": facts,
        "described": described,
        "baseline": baseline_label,
        "prompts": [{name: getattr(p, name) for name in KEPT} | {"tokens": len(p.ids)} for p in prompts],
        "judged": judged,
        "left_out": shown,
        "texts": texts,
    }


def build(end: dict[str, Any], runs: list[Run]) -> dict[str, Any]:
    """``report.json`` of the runs that ``end`` ends."""
    facts, described, label = end["environment"], end["described"], end["baseline"]
    prompts = [_prompt(**one) for one in end["prompts"]]
    baseline, rows = make_rows(runs, described, label, prompts, end["judged"], facts["limits"]["seed"])
    report = {"format_version": 1, "environment": facts, "baseline": baseline, "rows": rows}
    report["failures"] = failures(runs, described, prompts)
    if facts["batch"] != 1:
        report |= {"left_out": end["left_out"], "throughput": best_throughput(rows, baseline)}
    return report


def _prompt(id: str, category: str | None, sub_category: str | None, turn: int, tokens: int) -> Prompt:
    """As far as rows know it."""
    return Prompt(id, category, [0] * tokens, record=Record(id, category, [], sub_category), turn=turn)
