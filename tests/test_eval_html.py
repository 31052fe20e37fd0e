"""report.html: nothing that a model wrote is obeyed or lost, and the page is made again from the journal alone."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from changed import check_refusals
from programs import status, without_pictures
from rich.console import Console
from test_eval_metrics import placed
from test_eval_prompts import sharegpt, tiny_tokenizer, write
from tiny import build

import eval.pages
import eval.speed
from data_prep.dialogues.encoding import load_tokenizer
from drafters.config import load_config
from drafters.loop.generate import Step, Trace
from eval.configs import SpeedConfig
from eval.figures import metrics
from eval.measure.runner import Outcome, Run
from eval.measure.speed import conditions_of
from eval.prompts.prompts import Prompt
from eval.report import sweep
from eval.report.html import html
from eval.report.rows import build as build_report
from eval.report.rows import ending
from eval.report.speed import finished_report, write_again
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
    end = ending(facts(), *known, judged, [], make_texts(runs, *known, Letters(text)))
    end = json.loads(json.dumps(end))  # as it comes out of the journal
    return html(build_report(end, runs), end["texts"])


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
    assert seen.tags.count("img") >= 2  # the charts
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u200b\u2028\u202a-\u202e\u2066-\u2069\ud800-\udfff]", page)
    text = "".join(seen.texts)
    assert visible(HOSTILE + SHOWN) in text and "(lossy)" in text
    assert f"T = 0, after {len(HOSTILE + SHOWN) - 1} tokens of plain decoding's:\n<" in text


def test_the_rest_of_an_output_is_its_text() -> None:
    """Catches halves of characters, and characters twice, where an output parts within one of several tokens."""
    tokenizer = load_tokenizer("checkpoints/stdlib-target").tokenizer
    text = "na\u00efve \u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f680 def f():\n    return 'x'"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    for same in range(len(ids)):
        other = run_of("other", ids, [0] * (len(ids) - 1))
        plain = run_of("plain", [*ids[:same], ids[same] + 1], [0] * same)
        described = {"plain": {}, "other": {}}
        (shown,) = make_texts([plain, other], described, "plain", [Prompt("p", None, [1])], tokenizer)["shown"]
        (output,) = (one for one in shown["outputs"] if one["drafter"] == "other")
        assert output["same"] == same
        assert tokenizer.decode(ids[:same]).rstrip("\ufffd") + output["rest"] == text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report: plain decoding and prompt lookup, greedy and sampled."""
    folder = tmp_path_factory.mktemp("html")
    build("llama").save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    prompts = write(folder / "prompts.jsonl", [sharegpt(f"w{i} w7 w{i} w7", "w1") for i in range(4)])
    config = {
        "target": {"path": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "prompts": {"file": str(prompts), "count": 3}, "drafters": [{"drafter": "prompt_lookup"}],
        "out": str(folder / "out"), "max_new_tokens": 12, "warmup": 1, "stock_generate": False,
    }  # fmt: skip
    (folder / "speed.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        without_pictures(patch)
        assert status(eval.speed.main, "--config", folder / "speed.yaml") == 0
    return folder / "out"


def test_made_again_from_the_journal_alone(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a report that needs its model, or anything but its journal, to be made again; and old journals."""
    without_pictures(monkeypatch)
    shutil.copy(finished / "measurements.jsonl", tmp_path)
    assert status(eval.pages.main, tmp_path) == 0
    for name in ("report.json", "report.md", "report.html"):
        assert (tmp_path / name).read_text() == (finished / name).read_text()
    lines = (tmp_path / "measurements.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "measurements.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(ValueError, match="has no line 'end'.* earlier version wrote it, or it is cut off"):
        eval.pages.main([str(tmp_path)])
    (tmp_path / "measurements.jsonl").write_text("".join([*lines[:-1], '{"end": {"prompts": []}}\n']))
    with pytest.raises(ValueError, match="or of another version of eval.speed: end: missing key 'environment'"):
        eval.pages.main([str(tmp_path)])


def test_a_changed_journal_is_refused_by_file_and_key(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stack trace, or files of a half-read report, for a part that is missing or of another type."""
    without_pictures(monkeypatch)
    monkeypatch.setattr("eval.report.speed.replace_text", lambda path, text: None)
    monkeypatch.setattr("eval.report.speed.replace_json", lambda path, report: None)
    monkeypatch.setattr(metrics, "BOOTSTRAP_SAMPLES", 10)
    first, *lines = (finished / "measurements.jsonl").read_text().splitlines(keepends=True)
    content = {"run": json.loads(lines[0]), "end": json.loads(lines[-1])["end"]}
    content["end"]["environment"]["config"] = {"drafters": content["end"]["environment"]["config"]["drafters"]}

    def dump(changed: dict[str, Any]) -> str:
        end = {key: value for key, value in changed.items() if key == "end"}
        return "".join([first, json.dumps(changed.get("run")) + "\n", *lines[1:-1], json.dumps(end) + "\n"])

    quiet = Console(quiet=True)
    read = lambda: write_again(tmp_path / "measurements.jsonl", tmp_path, quiet)  # noqa: E731
    lines_of = ("run", "end")  # a whole line that is missing
    assert check_refusals(content, tmp_path / "measurements.jsonl", read, lines_of, dump) > 300


def test_a_changed_finished_report_is_refused_by_file_and_key(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a sweep or search that is resumed and ends in a stack trace on a damaged report of its own."""
    config = load_config(SpeedConfig, finished.parent / "speed.yaml", [f"out={tmp_path}"])
    same = conditions_of(config)
    monkeypatch.setattr("eval.report.speed.conditions_of", lambda config: same)
    found = json.loads((finished / "report.json").read_text())
    found["environment"]["config"] = config.model_dump(mode="json")
    kept = []

    def resume() -> None:
        if (report := finished_report(config)) is not None:
            kept.append(report)
            sweep.markdown(sweep.summarise("seed", [0], ["seed=0"], [report], []), [report])

    assert check_refusals(found, tmp_path / "report.json", resume) > 300
    assert kept[-1] == found
