"""What eval.leaderboard does with the results."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from drafters.common.files import replace_text
from drafters.hub.reports import CERTIFICATE, REPORT, Certificate, Summary, read
from eval.entries import CHECKPOINTS, DRAFT_MODELS, named_in
from eval.report.html import markdown, render
from eval.report.tables import kind, length_of_answers, number, shown_name, speedup_with_interval, table

PAGE, HTML, NAMES = "leaderboard.md", "leaderboard.html", "targets.yaml"
COMMAND = "python -m eval.leaderboard"
OWN = Path(__file__).resolve().parents[1] / "checkpoints"
ABLATIONS = "ablations"  # reports of one method's settings, which docs/ablations.md tells about
HEAD = ["method", "trained with", "training", "energy", "tau", "speedup", "lossless", "tokens/s"]
UNKNOWN = "not recorded"
UNCOUNTED = "not counted"  # energy: no counter on the machine that trained, or not all the time
Found = dict[str, Any]
ABOUT = f"""\
Made by `{COMMAND}` from the reports and training summaries in the repository; a test holds the page to that.

**What may be compared.** Only rows of one table: they are of one run, in which all methods took turns on the same
prompts, on one machine. Tables of other targets, prompts, limits or machines are not comparable with it, nor are two
runs of one machine on different days. *tau*: tokens committed per target forward, bonus included. *speedup*: over plain
decoding in the same loop, with the 95% interval of the paired bootstrap over prompts. *lossless*: the method preserves
the target's output distribution; **lossy** ones may change it. *training*: the last training of the drafter's weights,
and of those that it began from, as far as they are recorded; of draft models it is not.
"""
ADD = """\
1. Measure, with plain decoding and whatever you compare with in the same run: `python -m eval.speed --config yours.yaml
   out=docs/results/<machine>/<name>` (a suite of `configs/suites`: `--suite gsm8k`). Commit report.json, report.md and
   prompts.csv. A target that is new here gets its name in `docs/results/targets.yaml`.
2. Of a trained drafter, put the run folder's summary.json beside it, as `<name>-summary.json`; its `run`, or its
   config's `out`, is the path that your speed config names as the checkpoint.
3. Certify it: `python -m eval.lossless --target T --drafter D out=docs/results/<machine>/<name>-lossless`.
4. `python -m eval.leaderboard`, and commit both pages with the rest.
"""


def run(results: Path, out: Path, console: Console) -> Found:
    """Write both pages; returns what is on them.

    Raises:
        ValueError: a report is not what eval.speed writes.
        OSError: a file could not be written.
    """
    found = collect(results, out)
    out.mkdir(parents=True, exist_ok=True)
    replace_text(out / PAGE, page(found))
    replace_text(out / HTML, html(found))
    console.print(f"{out / PAGE}, {out / HTML}: {len(found['tables']):,} tables", markup=False, highlight=False)
    return found


def collect(results: Path, out: Path) -> Found:
    """The tables, by target, and the certificates; links are relative to ``out``."""
    trainings, names = list(_trainings(results)), _names(results)
    tables: list[Found] = []
    certificates: list[Found] = []
    for file in sorted(results.rglob("*.json")):
        where = file.relative_to(results)
        if file.name == REPORT and ABLATIONS not in where.parts and not any("=" in part for part in where.parts):
            tables += _tables(read(file), _link(file, out), trainings, names)
        elif file.name == CERTIFICATE:
            certificates.append(_certificate(read(file, Certificate), _link(file, out), names))
    tables.sort(key=lambda one: (one["target"], one["suite"], one["dtype"], one["temperature"], one["link"]))
    return {"tables": tables, "certificates": certificates}


def _names(results: Path) -> dict[str, str]:
    """By fingerprint, what targets are called: a folder's name may be anybody's."""
    file = results / NAMES
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from None
    if not isinstance(found, dict) or not all(isinstance(name, str) for pair in found.items() for name in pair):
        raise ValueError(f"{file} is no mapping of targets' fingerprints to their names")
    return found


def _target(facts: Found, names: dict[str, str]) -> str:
    return names.get(facts["target"]["fingerprint"], Path(facts["target"]["name"]).name)


def _link(file: Path, out: Path) -> str:
    page = file.with_suffix(".md")
    return Path(os.path.relpath(page if page.is_file() else file, out)).as_posix()


def _tables(report: Found, link: str, trainings: list[Found], names: dict[str, str]) -> Iterator[Found]:
    """One for each temperature and batch size of a report."""
    facts = report["environment"]
    entries = {entry.get("label") or entry["drafter"]: entry for entry in facts["config"]["drafters"]}
    prompts, limits = facts["prompt_set"], facts["limits"]
    suite = ", ".join(prompts.get("suites", {})) or "/".join(Path(prompts["file"]).parts[-2:])
    cores = f"{facts['cpu_cores']} CPU cores, {facts['threads']} threads"
    for at in report["baseline"]["temperatures"]:
        batch = at.get("batch", 1)
        rows = [
            row for row in report["rows"] if (row["temperature"], row.get("batch", 1)) == (at["temperature"], batch)
        ]
        rows = sorted(rows, key=lambda row: -(row["speedup"] or 0.0))
        yield {
            "target": _target(facts, names),
            "parameters": facts["target"]["parameters"],
            "dtype": facts["dtype"] + (f", layers in {facts['quantize']}" if facts.get("quantize") else ""),
            "suite": suite,
            "prompts": prompts["prompts"],
            "answers": length_of_answers(limits),
            "temperature": at["temperature"],
            "batch": batch,
            "machine": f"{facts['gpu'] or facts['cpu']}, {cores}",
            "date": facts["date"][:10],
            "link": link,
            "rows": [_row(row, entries, facts["date"], trainings) for row in rows],
        }


def _row(row: Found, entries: dict[str, Found], date: str, trainings: list[Found]) -> Found:
    entry = entries.get(str(row.get("entry", row["drafter"])), {})
    paths = named_in(entry, CHECKPOINTS)
    filed = [_training(path, date, trainings) for path in paths]
    trained = [one for one in filed if one is not None]
    if len(trained) < len(paths):
        nothing = {"time": UNKNOWN, "energy": UNKNOWN}
        told = [_by_itself(one) for one in row.get("trained", [])]
        trained = told or [
            one or {"data": f"{Path(path).name}: {UNKNOWN}", **nothing} for path, one in zip(paths, filed, strict=True)
        ]
    models = [Path(path).name for path in named_in(entry, DRAFT_MODELS)]
    with_what = [one["data"] for one in trained] + [f"the draft model {name}" for name in models]
    return {
        "kind": kind({"drafted_per_step": None, "stock": False, **row}),
        "name": shown_name({"stock": False, **row}),
        "cells": [
            "; ".join(dict.fromkeys(with_what)) or ("-" if entry else UNKNOWN),
            "; ".join(dict.fromkeys(one["time"] for one in trained)) or (UNKNOWN if models or not entry else "-"),
            "; ".join(dict.fromkeys(one["energy"] for one in trained)) or (UNKNOWN if models or not entry else "-"),
            number(row["tau"], 2),
            speedup_with_interval(row),
            "yes" if row["lossless"] else "lossy",
            number(row["tokens_per_second"], 1),
        ],
        "speedup": row["speedup"],
    }


def _trainings(results: Path) -> Iterator[Found]:
    """What is recorded of every training: its folder, when it ended, and with what."""
    for file in sorted(results.rglob("*summary.json")):
        summary = read(file, Summary)
        config = summary.get("config", {})
        yield {
            "paths": {str(path) for path in (summary.get("run"), config.get("out")) if path},
            "name": (file.parent, file.stem.removesuffix("-summary")),
            "date": summary.get("date") or "",
            "minutes": summary.get("minutes"),
            "tokens": summary.get("tokens"),
            "data": config.get("data") or config.get("features"),
            "from": config.get("init_from"),
            "joules": _joules(summary),
            "hardware": summary.get("hardware") or {},
        }
    for file in sorted(OWN.glob("*/config.json")):
        training = json.loads(file.read_text(encoding="utf-8")).get("training") or {}
        if training:
            config = training.get("config", {})
            yield {
                "paths": {f"{OWN.name}/{file.parent.name}"},
                "name": (OWN, file.parent.name),
                "date": "",
                **{name: training.get(name) for name in ("minutes", "tokens", "data")},
                "joules": _joules(training),
                "from": config.get("init_from"),
                "hardware": {},
            }


def _training(path: str, date: str, trainings: list[Found]) -> Found | None:
    """What is known of the training of the weights at ``path`` before the report of ``date``; None: nothing."""
    chain: list[Found] = []
    wanted: Any = path
    while wanted is not None:
        known = [one for one in trainings if wanted in one["paths"] and one["date"] <= date and one not in chain]
        if chain:  # its folder may since have been given another name, by which its summary was filed
            filed = chain[-1]["name"][0], Path(wanted).name
            known = [one for one in trainings if one["name"] == filed and one not in chain] or known
        if not known:
            break
        chain.append(max(known, key=lambda one: one["date"]))
        wanted = chain[-1]["from"]
    return _told(chain, wanted) if chain else None


def _told(chain: list[Found], before: str | None) -> Found:
    """A training and those that it began from, in words; ``before``: what the first of them began from."""
    minutes = [one["minutes"] for one in chain]
    time = UNKNOWN
    if None not in minutes:
        time = f"{sum(minutes):,.0f} min"
        time += f" ({' + '.join(f'{each:,.0f}' for each in reversed(minutes))})" if len(chain) > 1 else ""
        hardware = chain[0]["hardware"]
        time += f" on {hardware.get('gpu') or hardware.get('cpu')}" if hardware else ""
    time += f", after {Path(before).name} ({UNKNOWN})" if before is not None else ""
    tokens = [one["tokens"] for one in chain]
    positions = f"{sum(tokens) / 1e6:,.1f}M positions of " if all(tokens) else ""
    energy = [one["joules"] for one in chain]
    joules, why = [one for one in energy if not isinstance(one, str)], [one for one in energy if isinstance(one, str)]
    data = "/".join(Path(str(chain[0]["data"])).parts[-2:]) if chain[0]["data"] else UNKNOWN
    return {"data": f"{positions}{data}", "time": time, "energy": why[0] if why else f"{sum(joules) / 3.6e6:,.3g} kWh"}


def _joules(training: Found) -> float | str:
    """What the devices used; else, in words, why that is not known."""
    joules = training.get("joules")
    return joules if joules is not None else UNCOUNTED if "joules" in training else UNKNOWN


def _by_itself(training: Found) -> Found:
    """What the report itself says of a training."""
    known = {name: training.get(name) for name in ("minutes", "tokens", "data")}
    return _told([{**known, "joules": _joules(training), "hardware": {}}], training.get("init_from"))


def _certificate(found: Found, link: str, names: dict[str, str]) -> Found:
    sampled, facts = found["sampled"], found["environment"]
    distance = next((test["distance"] for test in sampled["tests"]), None) if sampled else None
    options = found["drafter"]
    name = options.get("label") or options["drafter"]
    weights = "".join(f", {Path(path).name}" for path in named_in(options, CHECKPOINTS))
    target = _target(facts, names)
    p_value = f"{sampled['p_value']:.2g}" if sampled else "-"
    return {"cells": [f"{name}{weights}", target, found["verdict"], p_value, number(distance, 3)], "link": link}


def title(one: Found) -> str:
    """Of a table: on what it was measured."""
    at = "greedy" if one["temperature"] == 0 else f"temperature {one['temperature']:g}"
    batch = f", batch {one['batch']}" if one["batch"] > 1 else ""
    return f"{one['suite']}, {one['prompts']} prompts, {at}{batch}, {one['dtype']}"


def about(one: Found) -> str:
    """Of a table: where and when."""
    return f"{one['machine']}; {one['answers']}; {one['date']}"


CERTIFIED = ["drafter", "target", "verdict", "p", "would have caught (total variation)"]


def by_target(found: Found) -> dict[str, list[Found]]:
    """The tables of every target."""
    targets: dict[str, list[Found]] = {}
    for one in found["tables"]:
        targets.setdefault(f"{one['target']}, {one['parameters'] / 1e6:,.1f}M parameters", []).append(one)
    return targets


def page(found: Found) -> str:
    """``leaderboard.md``."""
    lines = ["# Leaderboard", "", ABOUT, "## The fastest lossless method of every table", ""]
    lines += [*table(BEST, [[_cell(cell) for cell in row] for row in best(found)], texts=4), ""]
    for target, tables in by_target(found).items():
        lines += [f"## {target}", ""]
        for one in tables:
            rows = [[row["name"], *row["cells"]] for row in one["rows"]]
            lines += [f"### {title(one)}", "", f"{about(one)}; [report]({_address(one['link'])})", ""]
            lines += [*table(HEAD, [[_cell(cell) for cell in row] for row in rows], texts=4), ""]
    if found["certificates"]:
        rows = [
            [f"[{_cell(one['cells'][0])}]({_address(one['link'])})", *one["cells"][1:]] for one in found["certificates"]
        ]
        lines += ["## Certificates of losslessness", "", "Of `python -m eval.lossless` ([how](losslessness.md)).", ""]
        lines += [*table(CERTIFIED, rows, texts=3), ""]
    return "\n".join([*lines, "## To add an entry", "", ADD])


BEST = ["target", "prompts", "fastest lossless method", "trained with", "tau", "speedup"]


def best(found: Found) -> list[list[str]]:
    """Of every table with a lossless method of ours besides plain decoding: the fastest."""
    lines = []
    for one in found["tables"]:
        row = next((row for row in one["rows"] if row["kind"] == "own" and row["speedup"]), None)
        if row is not None:
            lines.append([one["target"], title(one), row["name"], row["cells"][0], row["cells"][3], row["cells"][4]])
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _address(link: str) -> str:
    return link.replace(" ", "%20").replace("(", "%28").replace(")", "%29")


def html(found: Found) -> str:
    """``leaderboard.html``."""
    return render(
        "leaderboard.html",
        title="Leaderboard of drafters",
        about=markdown(ABOUT),
        add=markdown(ADD),
        best_head=BEST,
        best=best(found),
        head=HEAD,
        targets=by_target(found),
        table_title=title,
        table_about=about,
        certified=CERTIFIED,
        certificates=found["certificates"],
    )
