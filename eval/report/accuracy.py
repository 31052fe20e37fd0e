"""The accuracy of the answers, where a suite judges them, for a page."""

from typing import Any

from eval.report.rows import number, shown_name

ABOUT = """\
All of 100. *right number*: the answer's last number is the reference's. *pass@1*: the program, written once, passes its
tests. *ROUGE-1*: mean F1 of single words, stemmed. *BLEU*: of all answers together. A lossless method keeps plain
decoding's accuracy, up to near ties in bf16 and, where it samples, to chance; a **lossy** one may not.
"""


def accuracy_table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Head and cells, a column for each suite or category that is judged; none where nothing is."""
    rows = [row for row in rows if row.get("accuracy")]
    if not rows:
        return []
    marks = rows[0]["accuracy"]
    head = ["drafter", "T", *(f"{name}: {mark['metric']} of {mark['answers']}" for name, mark in marks.items())]
    figures = ([number(row["accuracy"][name]["value"], 1) for name in marks] for row in rows)
    return [head, *([shown_name(row), f"{row['temperature']:g}", *of] for row, of in zip(rows, figures, strict=True))]


def accuracy_notes(report: dict[str, Any]) -> list[str]:
    """What there is no figure of, and why; answers that ended too early; how programs were run."""
    marks: dict[str, Any] = next((row["accuracy"] for row in report["rows"] if row.get("accuracy")), {})
    lines = []
    for name, mark in marks.items():
        if "unavailable" in mark:
            lines.append(f"{name}: no {mark['metric']}: {mark['unavailable']}")
        elif mark["cut"]:
            lines.append(
                f"{name}: {mark['cut']} of plain decoding's {mark['answers']} answers ended at the limit of new tokens"
            )
    programs = report["environment"].get("programs")
    return lines + ([f"programs that the model wrote were run {programs}"] if programs and marks else [])
