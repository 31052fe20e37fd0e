"""``report.html``: report.md rendered as HTML, with the chart and the outputs' texts, in one file.

The page runs no script and fetches nothing. HTML and links in labels, prompts and outputs are shown as text.
"""

import base64
import io
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from matplotlib.figure import Figure

from eval.report import charts
from eval.report.page import markdown
from eval.report.tables import shown_name
from eval.report.texts import visible

Report = dict[str, Any]
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .2em .7em; border-bottom: 1px solid #ddd; }
img { max-width: 100%; }
pre { white-space: pre-wrap; background: #f5f5f5; padding: .6em; }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def html(report: Report, texts: dict[str, Any]) -> str:
    """Return the page; ``texts``: prompts and outputs, see ``eval.report.texts``."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "image", "autolink"])
    title, line, rest = parser.render(visible(markdown(report))).partition("</h1>\n")
    name = visible(f"Speed of drafters: {Path(report['environment']['target']['name']).name}")
    chart = picture("Speedup over plain decoding in the same loop", charts.speedups(report))
    body = "\n".join([title + line, chart, rest, *outputs(report, texts)])
    return PAGE.format(policy=POLICY, title=escape(name), style=STYLE, body=body)


def picture(name: str, figure: Figure) -> str:
    """Return a figure as PNG within the page."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110, bbox_inches="tight")
    data = base64.b64encode(content.getvalue()).decode()
    return f'<h2>{escape(visible(name))}</h2>\n<img alt="{escape(visible(name))}" src="data:image/png;base64,{data}">'


def outputs(report: Report, texts: dict[str, Any]) -> list[str]:
    """Return each prompt with its outputs: plain decoding's text, and where and how the others leave it."""
    names = {(row["drafter"], row["temperature"]): shown_name(row) for row in report["rows"]}
    lines = ["<h2>Outputs</h2>"]
    for prompt in texts["shown"]:
        category = f" ({prompt['category']})" if prompt["category"] else ""
        lines.append(f"<details><summary>{_text(prompt['id'] + category)}</summary>")
        lines.append(f"<pre>{_text(prompt['prompt'])}</pre>")
        for output in prompt["outputs"]:
            name = names.get((output["drafter"], output["temperature"]))
            if name is not None:  # not of a method that failed
                lines += _output(f"{name}, T = {output['temperature']:g}", output["same"], "".join(output["rest"]))
        lines.append("</details>")
    if left_out := texts["prompts"] - len(texts["shown"]):
        lines.append(f"<p>{left_out} more prompts are in measurements.jsonl.</p>")
    return lines


def _output(name: str, same: int, rest: str) -> list[str]:
    """Return one output; ``same``: number of its first tokens that are plain decoding's."""
    if same and not rest:
        return [f"<p>{_text(name)}: plain decoding's {same} tokens</p>"]
    start = f", after {same} tokens of plain decoding's" if same else ""
    return [f"<p>{_text(name)}{start}:</p>", f"<pre>{_text(rest)}</pre>"]


def _text(text: str) -> str:
    return escape(visible(text))
