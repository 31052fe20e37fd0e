"""What changed significantly between two reports of ``eval.speed``, drafter by drafter.

    python -m eval.compare runs/before runs/after [--out F]

Reads report.json and prompts.csv (of older reports measurements.jsonl) of both folders. tau, tokens/s and the speedup
over plain decoding are compared on the prompts that both measured, prompt by prompt; what may not be compared, for the
machine, the prompts, the target or the limits differ, is not, and the page says why. Of all tested figures together,
reports of the same thing differ significantly in at most one pair of twenty; tokens/s, which follows the machine's
mood, is shown and not tested. Writes compare.json and compare.md into --out, or
into the second folder.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from drafters.cli.program import CommandLine, run_program
from drafters.common.files import check_folder
from drafters.common.wording import shortened
from drafters.hub import reports
from drafters.hub.reports import REPORT

PROMPTS, JOURNAL = "prompts.csv", "measurements.jsonl"
BASELINE = "autoregressive"
ALPHA = 0.05  # of all figures of a comparison together
# What a report is of: where these differ, the texts are others, and no figure of them can be compared.
SAME_TEXTS = ("target", "max_new_tokens", "ignore_eos", "top_k", "top_p")
MACHINE = ("cpu", "cpu_cores", "gpu", "threads", "device", "host")


def read(folder: Path) -> "Read":
    """The report of a folder, and the text of its table of prompts or, where it has none, the journal's runs.

    Raises:
        ValueError: a file is missing or no such file.
    """
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
    """What two reports may differ in, by name."""
    facts = report["environment"]
    wanted = (*MACHINE, "dtype", "engine", "quantize", "commit", "versions")
    names = {"target": facts["target"]["fingerprint"], "prompts": facts["prompt_set"]["sha256"]}
    names |= {name: facts.get(name) for name in wanted}
    names["ignore_eos"] = facts["limits"].get("ignore_eos", False)
    names |= {name: facts["limits"][name] for name in ("max_new_tokens", "top_k", "top_p", "rounds", "seed")}
    entries = facts["config"]["drafters"]
    return names | {f"options of {entry.get('label') or entry['drafter']}": entry for entry in entries}


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By name, the settings that differ. Drafters that only one of the reports has are none: they are left out."""
    both = settings(a), settings(b)
    common = [name for name in both[0] if name in both[1]]
    return {name: (both[0][name], both[1][name]) for name in common if both[0][name] != both[1][name]}


def check_comparable(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """``differences``; raises ValueError where nothing could be compared, with both sides."""
    found = differences(a, b)
    if wrong := [name for name in SAME_TEXTS if name in found]:
        told = "; ".join(f"{name} is {shortened(found[name][0])} and {shortened(found[name][1])}" for name in wrong)
        raise ValueError(f"the two reports are of different texts, of which no figure can be compared: {told}")
    return found


Read = tuple[dict[str, Any], str | list[dict[str, Any]]]  # a report; its table of prompts, or its journal's runs
Key = tuple[str, float, int]  # a method at a temperature, so many prompts together


def keys(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Key]:
    """The rows that both reports have, plain decoding first, as in the first of them."""
    theirs = {(row["drafter"], row["temperature"], row.get("batch", 1)) for row in b["rows"]}
    for row in a["rows"]:
        if (key := (row["drafter"], row["temperature"], row.get("batch", 1))) in theirs:
            yield key


def main(arguments: list[str] | None = None) -> None:
    """Compare two reports and write the page."""
    parser = CommandLine("eval.compare", __doc__)
    parser.add_argument("a", type=Path, help="folder of the first report, the `out` of its config")
    parser.add_argument("b", type=Path, help="of the second")
    parser.add_argument("--out", type=Path, help="folder; default: the second report's")
    parsed = parser.parse(arguments)
    out = parsed.out or (parsed.b.parent if parsed.b.name == REPORT else parsed.b)
    (a, a_lines), (b, b_lines) = read(parsed.a), read(parsed.b)
    check_comparable(a, b)
    check_folder(out)

    from eval.compare_run import run
    from eval.report.screen import make_console

    run((a, a_lines), (b, b_lines), [str(parsed.a), str(parsed.b)], out, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)
