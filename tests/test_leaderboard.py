"""The leaderboard: the committed pages are what the command gives, and every row says what it was trained with."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import status
from rich.console import Console

from eval import leaderboard
from eval.leaderboard_run import HTML, PAGE, collect, html, page, run

ROOT = Path(__file__).parents[1]


def test_the_committed_pages_are_those_of_the_results() -> None:
    """Catches figures that are on the page and in no report, and reports that are not on the page."""
    found = collect(ROOT / "docs" / "results", ROOT / "docs")
    again = "docs/results has changed since: python -m eval.leaderboard"
    assert (ROOT / "docs" / PAGE).read_text(encoding="utf-8") == page(found), again
    assert (ROOT / "docs" / HTML).read_text(encoding="utf-8") == html(found), again
    for one in found["tables"]:
        assert (ROOT / "docs" / one["link"]).is_file()


def report(entries: list[dict[str, Any]], rows: list[dict[str, Any]], date: str = "2026-02-01") -> dict[str, Any]:
    facts = {
        "target": {"name": "x", "fingerprint": "f", "parameters": 2e6}, "dtype": "bfloat16", "gpu": None, "cpu": "C",
        "cpu_cores": 2, "threads": 1, "date": date, "commit": None, "dirty": None, "argv": [],
        "limits": {"max_new_tokens": 9, "top_k": 0, "top_p": 1.0, "rounds": 1, "seed": 0},
        "config": {"drafters": entries}, "prompt_set": {"file": "data/mt/q.jsonl", "sha256": "p", "prompts": 3},
    }  # fmt: skip
    same = {"temperature": 0.0, "batch": 1, "lossless": True, "stock": False, "speedup_ci": [1.0, 2.0]}
    same |= {"tokens_per_second": 5.0, "drafted_per_step": 3.0}
    rows = [same | {"entry": row["drafter"]} | row for row in rows]
    return {"environment": facts, "baseline": {"temperatures": [{"temperature": 0.0, "batch": 1}]}, "rows": rows}


def summary(run: str, date: str, minutes: float, init_from: str | None = None, **more: Any) -> dict[str, Any]:
    config = {"out": run, "data": "train.jsonl", "init_from": init_from}
    return {"run": run, "date": date, "minutes": minutes, "tokens": 2_000_000, "config": config, **more}


def test_what_a_method_was_trained_with(tmp_path: Path) -> None:
    """Catches the training of later weights, of half of a head's history, or of another head; a lossy method that goes
    unmarked, the order by tau, and a name that breaks the table."""
    results = tmp_path / "results"
    head = {"drafter": "eagle", "checkpoint": "runs/head"}
    entries = [{"drafter": "autoregressive"}, head | {"label": "E"}, {"drafter": "hybrid", "label": "H", "head": head}]
    entries += [
        {"drafter": "speculative", "label": "S|x", "draft_model": "runs/draft"},
        {"drafter": "mjsd", "label": "M"},
    ]
    entries.append({"drafter": "kangaroo", "label": "K", "checkpoint": "runs/k"})
    speedups = {"K": 0.5, "autoregressive": 1.0, "E": 1.5, "H": 2.0, "S|x": 1.2, "M": 3.0}
    rows = [{"drafter": name, "speedup": speedup, "tau": 4.0 - speedup} for name, speedup in speedups.items()]
    rows[-1]["lossless"] = False
    rows[0]["trained"] = [{"drafter": "kangaroo", "data": "x/y/z.jsonl", "minutes": 9.0, "init_from": "runs/k0"}]
    rows[0]["trained"][0]["joules"] = None  # of a machine without counters
    files = {
        "m/one/report.json": report(entries, rows),
        "m/ablations/two/report.json": report(entries, rows),
        "m/head-summary.json": summary("runs/head", "2026-01-03", 30.0, "runs/head-first", joules=7.2e6),
        "m/head-first-summary.json": summary("runs/head", "2026-01-02", 12.0, joules=3.6e6),
        "m/head-later-summary.json": summary("runs/head", "2026-03-01", 99.0),
    }
    for name, found in files.items():
        (results / name).parent.mkdir(parents=True, exist_ok=True)
        (results / name).write_text(json.dumps(found))
    (results / "targets.yaml").write_text("f: A target\n")
    (table,) = run(results, tmp_path / "docs", Console(quiet=True))["tables"]
    by_name = {row["name"]: row["cells"] for row in table["rows"]}
    assert list(by_name) == ["M (lossy)", "H", "E", "S|x", "autoregressive", "K"] and table["target"] == "A target"
    assert by_name["E"][:3] == ["4.0M positions of train.jsonl", "42 min (12 + 30)", "3 kWh"] == by_name["H"][:3]
    assert by_name["K"][:3] == ["y/z.jsonl", "9 min, after k0 (not recorded)", "not counted"]
    assert by_name["S|x"][:3] == ["the draft model draft", "not recorded", "not recorded"]
    assert by_name["M (lossy)"][5] == "lossy" and by_name["autoregressive"][:3] == ["-", "-", "-"]
    text = (tmp_path / "docs" / PAGE).read_text()
    assert "| S\\|x |" in text and "](../results/m/one/report.json)" in text
    best = text.split("## ")[1]
    assert "| A target | mt/q.jsonl, 3 prompts, greedy, bfloat16 | H | 4.0M" in best


def test_a_file_that_is_no_report_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a traceback in place of the file's name."""
    (tmp_path / "report.json").write_text("{}")
    assert status(leaderboard.main, "--results", tmp_path, "--out", tmp_path) == 1
    assert f"{tmp_path / 'report.json'} is not what python -m eval.speed writes: missing key" in capsys.readouterr().err
