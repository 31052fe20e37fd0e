"""Read two reports and find the settings that differ; without torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafters.common.wording import shortened
from drafters.hub import reports
from drafters.hub.reports import REPORT

PROMPTS, JOURNAL = "prompts.csv", "measurements.jsonl"
# If these differ, the two reports are of different texts, and no figure can be compared.
SAME_TEXTS = ("target", "max_new_tokens", "ignore_eos", "top_k", "top_p")
Read = tuple[dict[str, Any], str | list[dict[str, Any]]]  # a report; its table of prompts, or its journal's runs
MACHINE = ("cpu", "cpu_cores", "gpu", "threads", "device", "host")


def read(folder: Path) -> Read:
    """Return the report of a folder, and its table of prompts as text or, without one, the journal's runs."""
    folder = folder.parent if folder.name == REPORT else folder
    _check_there(folder / REPORT)
    report = reports.read(folder / REPORT)
    if (folder / PROMPTS).is_file():
        return report, _parsed(folder / PROMPTS, str)
    lines = _parsed(folder / JOURNAL, lambda text: [json.loads(line) for line in text.splitlines()])
    return report, [one for one in lines if isinstance(one, dict) and "method" in one and "failure" not in one]


def _check_there(file: Path) -> None:
    if not file.is_file():
        raise ValueError(
            f"there is no {file}; give the folders of two reports, with {REPORT} and {PROMPTS} (or {JOURNAL}) as "
            "python -m eval.speed writes them"
        )


def _parsed(file: Path, parse: Callable[[str], Any]) -> Any:
    _check_there(file)
    try:
        return parse(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not what eval.speed writes: {error}") from None


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
    found = {
        name: (value, both[1][name]) for name, value in both[0].items() if name in both[1] and value != both[1][name]
    }
    if wrong := [name for name in SAME_TEXTS if name in found]:
        told = "; ".join(f"{name} is {shortened(found[name][0])} and {shortened(found[name][1])}" for name in wrong)
        raise ValueError(f"the two reports are of different texts, no figure can be compared: {told}")
    return found
