"""``report.html``: one file that needs no network, of the same figures as ``report.md``, with the outputs as text.

jinja2 escapes whatever a template prints; before, ``visible`` writes out what no reader would see.
"""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from eval.measure.runner import Run
from eval.report import charts
from eval.report.acceptance import ABOUT, DEFINITIONS, acceptance_beside, acceptance_by_position
from eval.report.accuracy import ABOUT as ABOUT_ACCURACY
from eval.report.accuracy import accuracy_notes, accuracy_table
from eval.report.page import COLUMNS, best_settings, by_context, columns_of, explanation, setting
from eval.report.rows import number, outputs_of, setting_of, shown_name, statements, warnings
from eval.report.texts import visible

Report = dict[str, Any]
KINDS = ("category", "categories"), ("sub-category", "sub_categories")


def html(report: Report, texts: dict[str, Any], runs: list[Run]) -> str:
    """The page.

    Args:
        texts: of prompts and outputs, see ``eval.report.texts``. runs: whose steps colour them.
    """
    facts = report["environment"]
    shown = [name for name in columns_of(report) if name != "drafter"]
    rows = [
        {"name": shown_name(row), "kind": charts.kind(row), "cells": [COLUMNS[name](row) for name in shown]}
        for row in report["rows"]
    ]
    batches = facts["batch"] if isinstance(facts["batch"], list) else []
    smallest = charts.at_settings(report, smallest_batch=True)
    head, *positions = acceptance_by_position(report["rows"])
    return render(
        "report.html",
        title=f"Speed of drafters: {Path(facts['target']['name']).name}",
        sentences=what_it_buys(report),
        warnings=warnings(report),
        statements=statements(report),
        setting=setting(report),
        panels=charts.panels(report),
        kinds={charts.kind(row) for row in report["rows"]},
        columns=shown,
        rows=rows,
        failures=[{"name": shown_name(row), "where": f"T = {row['temperature']:g}"} for row in report["failures"]],
        categories=_titled((name, _categories(report, kind)) for name, kind in KINDS),
        accuracy=accuracy_table(report["rows"]),
        accuracy_about=markdown(ABOUT_ACCURACY),
        accuracy_notes=accuracy_notes(report),
        scatters=_titled((at, charts.tau_against_speed(rows)) for at, _, rows in smallest),
        acceptance={"head": head, "rows": positions},
        curves_at=_titled((at, _acceptance_chart(rows)) for at, _, rows in smallest),
        beside=acceptance_beside(report["rows"]),
        beside_about=ABOUT,
        times=_titled((at, charts.steps_of_time(rows)) for at, _, rows in charts.at_settings(report)),
        batches=_batches(report),
        batch_sizes=batches,
        best_settings=best_settings(report) if batches else [],
        contexts=by_context(report),
        expected=_expected(report),
        definitions=markdown(explanation(report) + DEFINITIONS),
        texts=texts_of(report, texts, runs),
        facts=facts,
        command=shlex.join(facts["argv"]),
        config=yaml.safe_dump(facts["config"], sort_keys=False, allow_unicode=True, width=100),
    )


def render(template: str, **values: Any) -> str:
    """A page of ``templates``, every value escaped and in clear."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    templates = Environment(loader=loader, autoescape=True, finalize=_finalize, **options)
    templates.filters["number"] = number
    return templates.get_template(template).render(values)


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def markdown(text: str) -> Markup:
    """Markdown of our own as HTML; what is HTML in it is escaped all the same."""
    return Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(visible(text)))


def what_it_buys(report: Report) -> list[str]:
    """A sentence a temperature: the fastest lossless method of this loop, with its interval."""
    facts, found = report["environment"], []
    place = f"{Path(facts['target']['name']).name} in {facts['quantize'] or facts['dtype']}"
    for at, baseline, rows in charts.at_settings(report):
        at = at.capitalize() if baseline["temperature"] == 0 else f"Sampled at {at}"
        here = [row for row in rows if charts.kind(row) == "own" and row["speedup"] is not None]
        if not here:
            found.append(f"{at}: no lossless method was measured beside plain decoding.")
            continue
        best = max(here, key=lambda row: row["speedup"])
        interval = best["speedup_ci"]
        shown = f" (95% interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        if best["speedup"] <= 1:
            found.append(
                f"{at}, no lossless method is faster than plain decoding of {place}: the best, {shown_name(best)}, "
                f"makes {best['speedup']:.2f} times its tokens{shown}."
            )
            continue
        doubt = ", which plain decoding's noise may explain" if interval and interval[0] <= 1 else ""
        found.append(
            f"{at}, {shown_name(best)} makes {best['speedup']:.2f} times the tokens of plain decoding{shown}{doubt}: "
            f"{number(best['tokens_per_second'], 1)} tokens/s for {number(baseline['tokens_per_second'], 1)}, "
            f"from {place}."
        )
    return found


def _categories(report: Report, kind: str) -> dict[str, Any] | None:
    """The table of ``categories`` or ``sub_categories``; None below two of them."""
    rows = [row for row in report["rows"] if kind in row]
    names = list(dict.fromkeys(name for row in rows for name in row[kind]))
    if len(names) < 2:
        return None
    counts = {name: c["prompts"] for row in rows for name, c in row[kind].items()}
    most = max((c["speedup"] or 0.0 for row in rows for c in row[kind].values()), default=0.0)
    lines = []
    for row in rows:
        cells = []
        for name in names:
            figures = row[kind].get(name, {"speedup": None, "tau": None})
            shade = 0 if not figures["speedup"] or most <= 1 else max(0.0, (figures["speedup"] - 1) / (most - 1))
            text = f"{number(figures['speedup'], 2, 'x')} ({number(figures['tau'], 2)})"
            cells.append({"text": text, "shade": round(60 * shade)})
        lines.append({"name": shown_name(row), "where": setting_of(row), "kind": charts.kind(row), "cells": cells})
    return {"names": [f"{name} ({counts[name]})" for name in names], "rows": lines}


def _titled(charts_at: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Those that there are."""
    return [(title, chart) for title, chart in charts_at if chart]


def _acceptance_chart(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    lines = []
    for row in sorted(rows, key=lambda row: -(row["tau"] or 0.0)):
        if row.get("joint_alpha"):
            about = f"{shown_name(row)}, {setting_of(row)}: tau {row['tau']:.2f}"
            points = [(depth + 1.0, share) for depth, share in enumerate(row["joint_alpha"][:16])]
            lines.append((shown_name(row), about, points))
    return charts.curves(lines, "draft tokens", "share of drafts that had so many accepted")


def _batches(report: Report) -> dict[str, Any] | None:
    sizes = report["environment"]["batch"]
    if not isinstance(sizes, list):
        return None
    lines: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for row in report["rows"]:
        if row["tokens_per_second"] is not None:
            points = lines.setdefault((shown_name(row), row["temperature"]), [])
            points.append((float(row["batch"]), row["tokens_per_second"]))
    named = [(name, f"{name}, T = {temperature:g}", points) for (name, temperature), points in lines.items()]
    return charts.curves(named, "prompts decoded together", "tokens/s of all of them")


def _expected(report: Report) -> list[list[str]]:
    found = []
    for row in report["rows"]:
        if (chosen := row.get("expected")) is not None:
            figures = [number(chosen["tau"], 2), number(row["tau"], 2)]
            figures += [number(chosen["speedup"], 2, "x"), number(row["speedup"], 2, "x")]
            found.append([shown_name(row), setting_of(row), *figures, chosen["choice"]])
    return found


def texts_of(report: Report, texts: dict[str, Any], runs: list[Run]) -> dict[str, Any]:
    """What the page's script shows: every output's tokens, and which of its steps each came from.

    An output's ``steps`` are triples: tokens committed, of them drafted, and the drafter's place in ``sources``.
    """
    made = {
        (run.method, run.temperature, run.prompt): run
        for run in outputs_of([run for run in runs if run.round == 0 and run.batch == texts["batch"]])
    }
    rows = {(row["drafter"], row["temperature"]): row for row in report["rows"] if row["batch"] == texts["batch"]}
    sources: dict[str, int] = {}
    shown = []
    for index, prompt in enumerate(texts["shown"]):
        told = [output for output in prompt["outputs"] if (output["drafter"], output["temperature"]) in rows]
        outputs = []
        for output in sorted(told, key=lambda one: -(rows[one["drafter"], one["temperature"]]["speedup"] or 0.0)):
            key = output["drafter"], output["temperature"]
            outputs.append(_output(output, rows[key], made[*key, index], prompt["id"], sources))
        shown.append(
            {
                "id": visible(prompt["id"]),
                "category": visible(prompt["category"] or ""),
                "prompt": prompt["prompt"],
                "outputs": outputs,
            }
        )
    return {"prompts": shown, "left_out": texts["prompts"] - len(shown), "sources": [visible(name) for name in sources]}


def _output(
    output: dict[str, Any], row: dict[str, Any], run: Run, prompt: str, sources: dict[str, int]
) -> dict[str, Any]:
    steps = run.trace.steps if run.trace is not None else []
    flat = []
    for step in steps:
        kept = min(step.accepted, step.committed)
        flat += [step.committed, kept, sources.setdefault(step.source, len(sources)) if kept else 0]
    each = (row.get("divergences") or {}).get("each") or []
    parted = next((one for one in each if (one["prompt"], one["position"]) == (prompt, output["same"])), None)
    return {
        "name": visible(shown_name(row)),
        "kind": charts.kind(row),
        "t": row["temperature"],
        "same": output["same"],
        "rest": output["rest"],
        "first": run.first_tokens,
        "steps": flat,
        "parted": parted,
    }
