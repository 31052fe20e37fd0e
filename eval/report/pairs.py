"""Read two reports and find the settings that differ; without torch."""

import csv
import io
import math
from pathlib import Path
from typing import Any

from drafters.common.fingerprints import same_weights
from drafters.common.wording import shortened
from drafters.hub import reports
from drafters.hub.reports import REPORT

PROMPTS = "prompts.csv"
PLACE = ("drafter", "temperature", "batch", "prompt", "prompt_tokens")
# Of the round with the median time per token; then of the round with the median speedup, the method's and plain
# decoding's. Empty if unknown: stock generate reports no forwards.
COLUMNS = ("tokens", "seconds", "forwards", "pair_tokens", "pair_seconds", "plain_tokens", "plain_seconds")
# If these differ, the two reports are of different texts, and no figure can be compared.
SAME_TEXTS = ("target", "max_new_tokens", "ignore_eos", "top_k", "top_p")
MACHINE = ("cpu", "cpu_cores", "gpu", "threads", "device", "host")
Line = dict[str, Any]  # a method's figures of a prompt, or of a batch of prompts
Read = tuple[dict[str, Any], list[Line]]  # a report, and its table of prompts


def read(folder: Path) -> Read:
    """Return the report of a folder and its table of prompts."""
    folder = folder.parent if folder.name == REPORT else folder
    for file in (folder / REPORT, folder / PROMPTS):
        if not file.is_file():
            raise ValueError(
                f"there is no {file}; give the folders of two reports, with {REPORT} and {PROMPTS} as "
                "python -m eval.speed writes them"
            )
    report = reports.read(folder / REPORT)
    try:
        return report, from_csv((folder / PROMPTS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / PROMPTS} is not what eval.speed writes: {error}") from None


def from_csv(text: str) -> list[Line]:
    """Return the lines of ``eval.report.by_prompt``; ValueError if the table has another head."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if (head := reader.fieldnames) is None or list(head) != [*PLACE, *COLUMNS]:
        raise ValueError(f"its head is {head}, not {[*PLACE, *COLUMNS]}")
    kinds = {"temperature": float, "batch": int, "prompt_tokens": int} | dict.fromkeys(COLUMNS, _number)
    lines: list[Line] = []
    for number, line in enumerate(reader, 2):
        if None in line or None in line.values():
            raise ValueError(f"line {number} has more or fewer cells than the head's {len(head)}")
        lines.append({name: _cell(kinds.get(name, str), text, number, name) for name, text in line.items()})
    return lines


def _cell(kind: Any, text: str, line: int, name: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"line {line}, {name}: found {shortened(text)}, and a number is expected") from None


def _number(text: str) -> float | None:
    value = float(text) if text else None
    if value is not None and not math.isfinite(value):
        raise ValueError
    return value


def settings(report: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that two reports may differ in, by name."""
    facts = report["environment"]
    wanted = (*MACHINE, "dtype", "engine", "quantize", "commit", "versions")
    names = {"target": facts["target"]["fingerprint"], "prompts": facts["prompt_set"]["sha256"]}
    names |= {name: facts.get(name) for name in wanted}
    names["ignore_eos"] = facts["limits"].get("ignore_eos", False)
    names |= {name: facts["limits"][name] for name in ("max_new_tokens", "top_k", "top_p", "rounds", "seed")}
    entries = facts["config"]["drafters"]
    return names | {f"options of {entry.get('label') or entry['drafter']}": entry for entry in entries}


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by name, without drafters that only one report has."""
    both = settings(a), settings(b)
    if same_weights(both[0]["target"], both[1]["target"], "a report"):
        both[0]["target"] = both[1]["target"]
    unequal = {
        name: (value, both[1][name]) for name, value in both[0].items() if name in both[1] and value != both[1][name]
    }
    if wrong := [name for name in SAME_TEXTS if name in unequal]:
        listed = "; ".join(
            f"{name} is {shortened(unequal[name][0])} and {shortened(unequal[name][1])}" for name in wrong
        )
        raise ValueError(f"the two reports are of different texts, no figure can be compared: {listed}")
    return unequal
