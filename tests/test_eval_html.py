"""report.html: nothing that a model wrote is obeyed or lost."""

import re
from html.parser import HTMLParser
from typing import Any

from test_eval_metrics import placed

from drafters.loop.generate import Step, Trace
from eval.measure.runs import Outcome, Run
from eval.prompts.prompts import Prompt
from eval.report.build import build
from eval.report.html import html
from eval.report.texts import make_texts, visible

HOSTILE = "</script><script>document.title = 'obeyed'</script><!--<img src=x onerror=alert(1)>"
SHOWN = "\u05e9\u05dc\u05d5\u05dd {{ 7 * 7 }} & \u202eenod\u202c \x00\x1b[31m\x7f\u200b\u2028" + "x" * 100_000


class Letters:
    """A tokenizer: token n is letter n of what a model wrote."""

    def __init__(self, text: str) -> None:
        self.text = text

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.text[token] for token in ids)


def run_of(method: str, tokens: list[int], accepted: list[int], temperature: float = 0.0, source: str = "") -> Run:
    """A run with these accepted draft tokens per step; the last step is cut to the tokens left."""
    left, steps = len(tokens) - 1, []
    for each in accepted:
        steps.append(Step(0, each, each, each, min(each + 1, left), source=source if each else ""))
        left -= steps[-1].committed
    times = [0.01] * len(steps)
    trace = Trace(steps, times, times, times, times, 0.1)
    return placed(Outcome(tokens, 0.1, 0.04 * len(steps), trace), 0, 1.0, method, temperature)


def report_of(text: str) -> str:
    """The page of plain decoding and of a lossy drafter that parts from it, whose labels are hostile, too."""
    ids = list(range(len(text)))
    drafter, prompt = f"mine {HOSTILE} ![x](//h/x.png) [y](//h) <//h>", Prompt(f"p {HOSTILE}", "c\u202e", ids[:5])
    half = len(ids) // 2
    runs = [run_of("plain", ids, [0] * (len(ids) - 1))]
    runs.append(run_of(drafter, ids[:-1] + [0], [half - 2, len(ids) - half - 1], source="lookup"))
    described: dict[str, Any] = {name: {"lossless": name == "plain", "stock": False} for name in ("plain", drafter)}
    described = {name: {**known, "entry": name, "grid": None} for name, known in described.items()}
    each = [{"prompt": prompt.id, "position": len(ids) - 1, "margin": 0.5, "gap": 1.0, "tolerance": 0.1}]
    parted = {"count": 1, "unexplained": 1, "largest_margin": 0.5, "each": [{**each[0], "accepted": False}]}
    figures = [{"perplexity": 2.0, "exact_match": 1.0}, {"perplexity": 2.0, "exact_match": 0.0, "divergences": parted}]
    places = [{"drafter": name, "temperature": 0.0, "batch": 1} for name in described]
    judged = [{**place, "figures": each} for place, each in zip(places, figures, strict=True)]
    known = described, "plain", [prompt]
    return html(build(facts(), *known, judged, [], runs), make_texts(runs, *known, Letters(text)))


def facts() -> dict[str, Any]:
    """A report's environment."""
    prompts = {"file": HOSTILE, "format": "f", "prompts": 1, "requested": 1, "categories": {}, "consecutive": None}
    prompts |= {"warmup_prompts": 1, "context": None, "prompt_tokens": {"mean": 5.0, "max": 5}, "skipped": {}}
    limits = {"max_new_tokens": 9, "temperatures": [0.0], "top_k": 0, "top_p": 1.0, "rounds": 1, "warmup": 1, "seed": 0}
    return {
        "target": {"name": HOSTILE, "revision": None, "parameters": 1e6}, "dtype": "float32", "engine": "fused",
        "quantize": None, "date": "2026-01-01", "load_average": 0.1, "load_average_after": 0.1, "cpu": "C", "gpu": None,
        "cpu_cores": 2, "threads": 2, "versions": {}, "commit": None, "dirty": False, "batch": 1, "limits": limits,
        "prompt_set": prompts, "config": {"out": HOSTILE}, "argv": ["python", HOSTILE], "energy": {},
    }  # fmt: skip


class Seen(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append(tag)
        assert not [name for name, _ in attributes if name.startswith("on") or name in ("href", "srcset")]
        assert all(value.startswith("data:image/png;") for name, value in attributes if name == "src")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_what_a_model_wrote_is_neither_obeyed_nor_lost() -> None:
    """Catches an answer that becomes a part of the page, text that turns its neighbours round, one that is cut, and a
    page that fetches something."""
    page = report_of(HOSTILE + SHOWN)
    seen = Seen(page)
    assert not {"script", "a", "iframe"} & {*seen.tags} and "http" not in re.sub(r"http-equiv", "", page)
    assert seen.tags.count("img") == 1  # the chart
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u2028\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page)
    text = "".join(seen.texts)
    assert visible(HOSTILE + SHOWN) in text and "(lossy)" in text
    assert f"T = 0, after {len(HOSTILE + SHOWN) - 1} tokens of plain decoding's:\n<" in text
