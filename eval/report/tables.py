"""Text that all pages share: tables, numbers, and the lines about target, machine and software; without torch."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from drafters.common.files import replace_json, replace_text
from eval.prompts.choice import shown_sizes

Row = dict[str, Any]
RARE, FAR = 0.01, 2.0  # see ``tail``
LOG_WIDTH = 170  # characters of a line in a log file: wide enough for a row of a table


def make_console() -> Console:
    """Return a console for the screen or a log file."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


def write_page(data: dict[str, Any], page: str, out: Path, stem: str, console: Console) -> None:
    """Write ``data`` as strict JSON and ``page`` as Markdown, and print their names."""
    out.mkdir(parents=True, exist_ok=True)
    replace_json(out / f"{stem}.json", data)
    replace_text(out / f"{stem}.md", page)
    say(console, f"{out / f'{stem}.md'}, {out / f'{stem}.json'}")


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print plain text without markup."""
    console.print(text, style=style, markup=False, highlight=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> list[str]:
    """Return the lines of a Markdown table; the first ``texts`` columns are left-aligned, the others right-aligned."""
    rule = ["---"] * texts + ["---:"] * (len(head) - texts)
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in (head, rule, *rows)]


def run_again(argv: list[str]) -> list[str]:
    """Return the section with the command that makes the report again."""
    return ["## To run it again", "", f"    {shlex.join(argv)}", ""]


def number(value: float | None, digits: int, unit: str = "") -> str:
    """Return a number as text; "-" for None."""
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def speedup_with_interval(row: Row) -> str:
    """Return ``1.87x [1.67, 2.07]``."""
    interval = row["speedup_ci"]
    return number(row["speedup"], 2, "x") + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def shown_name(row: Row) -> str:
    """Return the row's label, marked if the method is lossy, transformers' own or of another engine."""
    engine = f" ({row['engine']})" if row.get("engine") else ""
    return row["drafter"] + engine + (" (stock)" if row["stock"] else "") + ("" if row["lossless"] else " (lossy)")


def kind(row: Row) -> str:
    """Return the class that colours a row: own, lossy, plain or other."""
    if not row["lossless"]:
        return "lossy"
    if row["stock"] or row.get("engine"):
        return "other"
    return "plain" if row["tau"] == 1.0 and not row["drafted_per_step"] else "own"


def setting_of(row: Row) -> str:
    """Return the row's temperature, and its batch size if that is not 1."""
    return f"T = {row['temperature']:g}{in_batch(row)}"


def at_settings(report: dict[str, Any]) -> list[tuple[str, Row, list[Row]]]:
    """Return for every temperature and batch size its title, plain decoding there, and the rows."""
    groups = []
    for baseline in report["baseline"]["temperatures"]:
        name = "greedy" if baseline["temperature"] == 0 else f"temperature {baseline['temperature']:g}"
        rows = [row for row in report["rows"] if setting_of(row) == setting_of(baseline)]
        groups.append((name + in_batch(baseline), baseline, rows))
    return groups


def in_batch(row: Row) -> str:
    """Return ``, batch 4``; nothing for batch 1."""
    return f", batch {row['batch']}" if row["batch"] > 1 else ""


def tail(divergences: dict[str, Any], prompts: int) -> float | None:
    """Return the largest gap over its tolerance among unexplained divergences, if they may still be rounding.

    The tolerance is four roundings; among very many tokens a few have more. They may be rounding if they are at most
    ``RARE`` of the outputs and none exceeds ``FAR`` times the tolerance; else None.
    """
    beyond = [each for each in divergences["each"] or () if not each["accepted"]]
    # An output that only ends earlier has no gap, and float32 no tolerance.
    if not beyond or len(beyond) > RARE * prompts or not all(each["gap"] and each["tolerance"] for each in beyond):
        return None
    most: float = max(each["gap"] / each["tolerance"] for each in beyond)
    return most if most <= FAR else None


def length_of_answers(limits: dict[str, Any]) -> str:
    """Return the limit of answers; their length if EOS is ignored."""
    most = f"{limits['max_new_tokens']} new tokens"
    return f"exactly {most}, EOS ignored" if limits.get("ignore_eos") else f"at most {most}"


def batch_line(facts: dict[str, Any]) -> str:
    """Return the batch size, or all of them."""
    return f"batch {shown_sizes(facts['batch'] if isinstance(facts['batch'], list) else [facts['batch']])}"


def target_line(facts: dict[str, Any]) -> str:
    """Return the target as an item of a list."""
    target = facts["target"]
    revision = f" at revision {target['revision']}" if target["revision"] else ""
    tuned = target.get("tuned_from")
    other = f"; tuned from {tuned['name']}, another model: lossless methods keep the tuned output" if tuned else ""
    return (
        f"- target: {target['name']}{revision}, {target['parameters'] / 1e6:,.1f}M parameters, {facts['dtype']}, "
        f"engine {facts['engine']}{', layers in ' + facts['quantize'] if facts['quantize'] else ''}{other}"
    )


def machine_line(facts: dict[str, Any]) -> str:
    """Return the machine, its load and the peak memory as an item of a list."""
    peaks = [f"{n / 1e9:.2f} GB ({where})" for where, n in (facts.get("peak_memory_bytes") or {}).items() if n]
    peak = f"; peak memory {' and '.join(peaks)}" if peaks else ""
    fewest = facts.get("fewest_threads") or facts["threads"]
    lowered = f" (at times {fewest}, beside other processes)" if fewest < facts["threads"] else ""
    level = f" ({facts['cpu_instructions']})" if facts.get("cpu_instructions") else ""  # not in older reports
    return (
        f"- machine: {facts['gpu'] or facts['cpu']}{level}, {facts['cpu_cores']} CPU cores, {facts['threads']} threads"
        f"{lowered}; load average {number(facts['load_average'], 1)} before, {number(facts['load_average_after'], 1)} "
        f"after{peak}"
    )


def software_line(facts: dict[str, Any]) -> str:
    """Return versions, commit and date as an item of a list."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    commit = (facts["commit"] or "unknown")[:12] + (" with local changes" if facts["dirty"] else "")
    return f"- software: {versions}; commit {commit}; {facts['date']}"


def about_energy(energy: dict[str, Any]) -> list[str]:
    """Return how the joules were measured, or why not; ``energy`` is the meter's description."""
    device = energy.get("device")
    return [f"energy: {'' if device['available'] else 'not available: '}{device['how']}"] if device else []
