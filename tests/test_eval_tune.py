"""`python -m eval.tune`: the order of the search, what it takes for best, and that a killed search goes on."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml
from test_eval_prompts import questions

import eval.tune
from drafters.config import validate
from eval.configs import SpeedConfig, TuneConfig
from eval.report.measured import measure_and_report

run = partial(programs.run, eval.tune.main)


@pytest.fixture
def config(tiny_checkpoint: Callable[..., Path], speed_config: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """A search of two knobs of Ouroboros."""
    entry = {"label": "O", "drafter": "ouroboros", "draft_model": str(tiny_checkpoint("llama", 1)), "k": 2}
    keys = {"knobs": {"gamma": [1, 2, 3], "window": [2, 3]}, "start": {"gamma": 1, "window": 3}}
    keys |= {"drafters": [entry], "temperatures": [0.0], "max_new_tokens": 4}
    return speed_config(questions("a", "b", count=4), {"count": 2}, **keys)


def pretend(monkeypatch: pytest.MonkeyPatch, figures: Callable[[dict[str, Any]], tuple[float, float]]) -> list[Any]:
    """Reports whose (tokens/s, perplexity) depend on the knobs as ``figures`` says; the grids asked for, in order."""
    asked = []

    def measured(one: SpeedConfig) -> dict[str, Any]:
        rows: list[dict[str, Any]] = [{"grid": None, "perplexity": 4.0}]  # plain decoding
        for entry in one.entries[1:]:
            rate, perplexity = figures(entry.options)
            row = {"grid": entry.knobs, "tokens_per_second": rate, "perplexity": perplexity, "tau": 2.0}
            rows.append(row | {"speedup": rate, "speedup_ci": [rate - 0.1, rate + 0.1], "lossless": True})
        asked.append(one.drafters[0].grid)
        return {"rows": rows}

    monkeypatch.setattr("eval.report.search.finished_report", measured)
    monkeypatch.setattr("eval.report.search.setting", lambda report: [])
    return asked


def test_knobs_are_searched_one_after_the_other(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a knob searched at the start's values instead of those just found, and the slowest taken for the best."""
    asked = pretend(monkeypatch, lambda o: (10.0 - (o["gamma"] - 2) ** 2 + (o["window"] == 2) * o["gamma"], 5.0))
    assert run(config) == 0
    assert asked == [{"gamma": [1, 2, 3], "window": [3]}, {"gamma": [2], "window": [2, 3]}]
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())
    assert best == [config["drafters"][0] | {"gamma": 2, "window": 2}]
    validate(TuneConfig, config, source="config").drafters[0].model_validate(best[0])


def test_a_bound_on_perplexity(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a lossy method tuned for speed at any price, a bound that is absolute, and a search that ends where the
    first knob alone cannot keep the bound."""
    # gamma: the faster the worse, and with window 3 none of them good enough; window 2 makes up for it.
    pretend(monkeypatch, lambda o: (o["gamma"], 4.0 + o["gamma"] / 10 + (o["window"] == 3)))
    assert run(config, "max_perplexity=1.06") == 0
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert found["best"] == {"gamma": 1, "window": 2}
    assert [stage["bound"] for stage in found["stages"]] == [pytest.approx(4.24)] * 2
    page = (tmp_path / "out" / "tune.md").read_text()
    assert page.count("no value keeps this bound") == 1 and "at most 1.06 times the perplexity" in page
    assert run(config | {"start": {"window": 2}}, "max_perplexity=1.06", f"out={tmp_path / 'two'}") == 0
    assert json.loads((tmp_path / "two" / "tune.json").read_text())["best"] == {"gamma": 2, "window": 2}


def test_a_killed_search_goes_on(config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a finished knob measured again, and time spent on stock generate; every figure is a real run's here."""
    assert run(config) == 0
    report = json.loads((tmp_path / "out" / "1-gamma" / "report.json").read_text())
    assert report["baseline"]["over_stock_generate"] is None
    first = json.loads((tmp_path / "out" / "tune.json").read_text())
    (tmp_path / "out" / "2-window" / "report.json").unlink()
    seen: list[str] = []
    measuring = lambda one, *rest: (seen.append(one.out.name), measure_and_report(one, *rest))[1]  # noqa: E731
    monkeypatch.setattr("eval.report.search.measure_and_report", measuring)
    assert run(config) == 0
    again = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert seen == ["2-window"] and again["stages"][0] == first["stages"][0]
    assert {row["value"] for row in again["stages"][0]["values"]} == {1, 2, 3}
