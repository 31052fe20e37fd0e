"""The tables of the leaderboard, and its two pages."""

import os
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from drafters.common.files import replace_text
from drafters.hub.reports import CERTIFICATE, REPORT, Certificate, read
from eval.entries import CHECKPOINTS, DRAFT_MODELS, named_in
from eval.report.html import as_html, render
from eval.report.tables import kind, length_of_answers, number, shown_name, speedup_with_interval, table

PAGE, HTML, NAMES = "leaderboard.md", "leaderboard.html", "targets.yaml"
COMMAND = "python -m eval.leaderboard"
HEAD = ["method", "trained with", "training", "energy", "tau", "speedup", "lossless", "tokens/s"]
BEST = ["target", "prompts", "fastest lossless method", "trained with", "tau", "speedup"]
CERTIFIED = ["drafter", "target", "verdict", "p", "would have caught (total variation)"]
UNKNOWN = "not recorded"
UNCOUNTED = "not counted"  # energy: the machine that trained has no counter
Found = dict[str, Any]
ABOUT = f"""\
`{COMMAND}` writes this page from the reports in `docs/results`. It shows one table per
target and prompt set: the report with the most methods, greedy and with one prompt at a time where it was measured so.

Compare rows of the same table only. They come from one run, in which all methods took turns on the same prompts and the
same machine. *tau*: tokens committed per target forward, bonus token included. *speedup*: over plain decoding in the
same loop, with the 95% interval of the paired bootstrap over prompts. *lossless*: the method preserves the target's
output distribution; **lossy** methods may change it. *training*: the last training of the weights; "after" names the
weights that it continued. The training of draft models is not recorded.
"""
ADD = """\
1. Measure all methods and plain decoding in one run: `python -m eval.speed --config yours.yaml
   out=docs/results/<machine>/<name>` (`--suite gsm8k` for a suite of `configs/suites`). Commit its report.json. Give a
   new target a name in `docs/results/targets.yaml`.
2. Certify the drafter: `python -m eval.lossless --target T --drafter D out=docs/results/<machine>/<name>-lossless`.
   Commit its lossless.json.
3. Run `python -m eval.leaderboard` and commit both pages.
"""


def run(results: Path, out: Path, console: Console) -> Found:
    """Write both pages and return their content."""
    found = collect(results, out)
    out.mkdir(parents=True, exist_ok=True)
    replace_text(out / PAGE, page(found))
    replace_text(out / HTML, html(found))
    console.print(f"{out / PAGE}, {out / HTML}: {len(found['tables']):,} tables", markup=False, highlight=False)
    return found


def collect(results: Path, out: Path) -> Found:
    """Return one table per target, prompt set and kind of GPU, and the certificates; links are relative to ``out``."""
    names = _names(results)
    chosen: dict[tuple[str, str], Found] = {}
    for file in sorted(results.rglob(REPORT)):
        one = _table(read(file), _link(file, out), names)
        key = one["target"], one["suite"]
        if key not in chosen or one["rank"] > chosen[key]["rank"]:
            chosen[key] = one
    certificates = [
        _certificate(read(file, Certificate), _link(file, out), names) for file in sorted(results.rglob(CERTIFICATE))
    ]
    return {"tables": [chosen[key] for key in sorted(chosen)], "certificates": certificates}


def _names(results: Path) -> dict[str, str]:
    """Return the targets' names by fingerprint."""
    if not (results / NAMES).is_file():
        return {}
    with (results / NAMES).open(encoding="utf-8") as file:
        return dict(yaml.safe_load(file) or {})


def _target(facts: Found, names: dict[str, str]) -> str:
    return names.get(facts["target"]["fingerprint"], Path(facts["target"]["name"]).name)


def _link(file: Path, out: Path) -> str:
    return Path(os.path.relpath(file, out)).as_posix()


def _table(report: Found, link: str, names: dict[str, str]) -> Found:
    """Return a report's rows at one temperature and batch size, and the ``rank`` of the table among its like."""
    facts = report["environment"]
    entries = {entry.get("label") or entry["drafter"]: entry for entry in facts["config"]["drafters"]}
    prompts = facts["prompt_set"]
    settings = [(one["temperature"], one.get("batch", 1)) for one in report["baseline"]["temperatures"]]
    temperature, batch = min(settings, default=(0.0, 1))
    rows = [row for row in report["rows"] if (row["temperature"], row.get("batch", 1)) == (temperature, batch)]
    rows.sort(key=lambda row: -(row["speedup"] or 0.0))
    quantize = facts.get("quantize")
    suite = ", ".join(prompts.get("suites", {})) or "/".join(Path(prompts["file"]).parts[-2:])
    return {
        "target": _target(facts, names),
        "parameters": facts["target"]["parameters"],
        "dtype": facts["dtype"] + (f", layers in {quantize}" if quantize else ""),
        "suite": f"{suite} on {facts['gpu']}" if facts["gpu"] else suite,
        "prompts": prompts["prompts"],
        "answers": length_of_answers(facts["limits"]),
        "temperature": temperature,
        "batch": batch,
        "machine": f"{facts['gpu'] or facts['cpu']}, {facts['cpu_cores']} CPU cores, {facts['threads']} threads",
        "date": facts["date"][:10],
        "link": link,
        "rows": [_row(row, entries) for row in rows],
        "rank": (-temperature, -batch, not quantize, len(rows), facts["date"]),
    }


def _row(row: Found, entries: dict[str, Found]) -> Found:
    entry = entries.get(str(row.get("entry", row["drafter"])), {})
    trained = [_training(one) for one in row.get("trained", [])]
    if not trained:
        trained = [(f"{Path(path).name}: {UNKNOWN}", UNKNOWN, UNKNOWN) for path in named_in(entry, CHECKPOINTS)]
    models = [Path(path).name for path in named_in(entry, DRAFT_MODELS)]
    trained += [(f"the draft model {name}", UNKNOWN, UNKNOWN) for name in models]
    nothing = "-" if entry else UNKNOWN
    return {
        "kind": kind({"drafted_per_step": None, "stock": False, **row}),
        "name": shown_name({"stock": False, **row}),
        "cells": [
            *("; ".join(dict.fromkeys(one[column] for one in trained)) or nothing for column in range(3)),
            number(row["tau"], 2),
            speedup_with_interval(row),
            "yes" if row["lossless"] else "lossy",
            number(row["tokens_per_second"], 1),
        ],
        "speedup": row["speedup"],
    }


def _training(one: Found) -> tuple[str, str, str]:
    """Return a training's data, time and energy as text."""
    data = "/".join(Path(one["data"]).parts[-2:]) if one.get("data") else UNKNOWN
    tokens, minutes, before = one.get("tokens"), one.get("minutes"), one.get("init_from")
    time = UNKNOWN if minutes is None else f"{minutes:,.0f} min"
    joules = one.get("joules")
    energy = f"{joules / 3.6e6:,.3g} kWh" if joules is not None else UNCOUNTED if "joules" in one else UNKNOWN
    positions = f"{tokens / 1e6:,.1f}M positions of " if tokens else ""
    return positions + data, time + (f", after {Path(before).name}" if before else ""), energy


def _certificate(found: Found, link: str, names: dict[str, str]) -> Found:
    sampled, options = found["sampled"], found["drafter"]
    distance = next((test["distance"] for test in sampled["tests"]), None) if sampled else None
    name = options.get("label") or options["drafter"]
    weights = "".join(f", {Path(path).name}" for path in named_in(options, CHECKPOINTS))
    p_value = f"{sampled['p_value']:.2g}" if sampled else "-"
    target = _target(found["environment"], names)
    return {"cells": [f"{name}{weights}", target, found["verdict"], p_value, number(distance, 3)], "link": link}


def title(one: Found) -> str:
    """Return a table's title: prompts and settings."""
    at = "greedy" if one["temperature"] == 0 else f"temperature {one['temperature']:g}"
    batch = f", batch {one['batch']}" if one["batch"] > 1 else ""
    return f"{one['suite']}, {one['prompts']} prompts, {at}{batch}, {one['dtype']}"


def about(one: Found) -> str:
    """Return a table's machine, length of answers and date."""
    return f"{one['machine']}; {one['answers']}; {one['date']}"


def by_target(found: Found) -> dict[str, list[Found]]:
    """Return the tables of each target."""
    targets: dict[str, list[Found]] = {}
    for one in found["tables"]:
        targets.setdefault(f"{one['target']}, {one['parameters'] / 1e6:,.1f}M parameters", []).append(one)
    return targets


def page(found: Found) -> str:
    """Return ``leaderboard.md``."""
    lines = ["# Leaderboard", "", ABOUT, "## The fastest lossless method of every table", ""]
    lines += [*table(BEST, best(found), texts=4), ""]
    for target, tables in by_target(found).items():
        lines += [f"## {target}", ""]
        for one in tables:
            rows = [[row["name"], *row["cells"]] for row in one["rows"]]
            lines += [f"### {title(one)}", "", f"{about(one)}; [report]({_address(one['link'])})", ""]
            lines += [*table(HEAD, rows, texts=4), ""]
    if found["certificates"]:
        rows = [[f"[{one['cells'][0]}]({_address(one['link'])})", *one["cells"][1:]] for one in found["certificates"]]
        how = "`python -m eval.lossless` writes them ([how](losslessness.md))."
        lines += ["## Certificates of losslessness", "", how, ""]
        lines += [*table(CERTIFIED, rows, texts=3), ""]
    return "\n".join([*lines, "## To add an entry", "", ADD])


def best(found: Found) -> list[list[str]]:
    """Return a line for the fastest lossless method of each table, plain decoding left out."""
    lines = []
    for one in found["tables"]:
        row = next((row for row in one["rows"] if row["kind"] == "own" and row["speedup"]), None)
        if row is not None:
            lines.append([one["target"], title(one), row["name"], row["cells"][0], row["cells"][3], row["cells"][4]])
    return lines


def _address(link: str) -> str:
    return link.replace(" ", "%20").replace("(", "%28").replace(")", "%29")


def html(found: Found) -> str:
    """Return ``leaderboard.html``: the Markdown page with tables that a click sorts."""
    return render("leaderboard.html", title="Leaderboard of drafters", body=as_html(page(found)))
