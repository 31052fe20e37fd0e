"""``report.html``: one file without network access: charts, the page of ``report.md``, and the outputs as text.

jinja2 escapes every value; before, ``visible`` writes out invisible characters.
"""

from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from eval.measure.runner import Run
from eval.report import charts
from eval.report.page import markdown
from eval.report.remarks import warnings
from eval.report.tables import kind, number, shown_name, speedup_with_interval
from eval.report.texts import page_data, visible

Report = dict[str, Any]


def html(report: Report, texts: dict[str, Any], runs: list[Run]) -> str:
    """Return the page.

    Args:
        texts: prompts and outputs, see ``eval.report.texts``. runs: their steps colour the outputs.
    """
    facts = report["environment"]
    return render(
        "report.html",
        title=f"Speed of drafters: {Path(facts['target']['name']).name}",
        sentences=what_it_buys(report),
        warnings=warnings(report),
        charts=[(title, Markup(charts.svg(figure))) for title, figure in _figures(report) if figure is not None],
        body=as_html(markdown(report)),
        texts=page_data(report["rows"], texts, runs),
        facts=facts,
        config=yaml.safe_dump(facts["config"], sort_keys=False, allow_unicode=True, width=100),
    )


def _figures(report: Report) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [("Speedup over plain decoding in the same loop", charts.speedups(report))]
    for title, _, rows in charts.at_settings(report, smallest_batch=True):
        found.append((f"Tau against speed, {title}", charts.tau_against_speed(rows)))
        found.append((f"Acceptance by position, {title}", charts.acceptance(rows)))
    times = [(f"Time of a step, {at}", charts.step_times(rows)) for at, _, rows in charts.at_settings(report)]
    return [*found, *times, ("Speed by batch size", charts.throughput(report))]


def render(template: str, **values: Any) -> str:
    """Return a page of ``templates`` with every value escaped and visible."""
    loader = FileSystemLoader(Path(__file__).with_name("templates"))
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    return (
        Environment(loader=loader, autoescape=True, finalize=_finalize, **options).get_template(template).render(values)
    )


def _finalize(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def as_html(page: str) -> Markup:
    """Return a Markdown page of ours, without its title, with tables that a click sorts; HTML in it is escaped."""
    _, _, text = page.partition("\n")
    made = MarkdownIt("commonmark", {"html": False}).enable("table").render(visible(text))
    made = made.replace("<table>", '<div class="scroll"><table class="sortable">')
    return Markup(made.replace("</table>", "</table></div>"))


def what_it_buys(report: Report) -> list[str]:
    """Return a sentence per temperature and batch size: the fastest lossless method, with its interval."""
    facts, found = report["environment"], []
    place = f"{Path(facts['target']['name']).name} in {facts['quantize'] or facts['dtype']}"
    for at, baseline, rows in charts.at_settings(report):
        here = [row for row in rows if kind(row) == "own" and row["speedup"] is not None]
        if not here:
            found.append(f"{at.capitalize()}: no lossless method was measured beside plain decoding.")
            continue
        best = max(here, key=lambda row: row["speedup"])
        speeds = [number(row["tokens_per_second"], 1) for row in (best, baseline)]
        found.append(
            f"{at.capitalize()}: the fastest lossless method, {shown_name(best)}, has a speedup of "
            f"{speedup_with_interval(best)}: {' instead of '.join(speeds)} tokens/s from {place}."
        )
    return found
