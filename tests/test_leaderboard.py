"""The leaderboard: the committed pages match the reports, and every row says what it was trained with."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from eval.report.leaderboard import HTML, PAGE, collect, html, page, run

ROOT = Path(__file__).parents[1]


def test_the_committed_pages_are_those_of_the_results() -> None:
    """Catches figures on the page that are in no report, and a page that grows again."""
    found = collect(ROOT / "docs" / "results", ROOT / "docs")
    again = "docs/results has changed since: python -m eval.leaderboard"
    assert (ROOT / "docs" / PAGE).read_text(encoding="utf-8") == page(found), again
    assert (ROOT / "docs" / HTML).read_text(encoding="utf-8") == html(found), again
    assert len(found["tables"]) <= 15
    for one in found["tables"]:
        assert (ROOT / "docs" / one["link"]).is_file()


def written(folder: Path, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(content))


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


def test_what_a_method_was_trained_with(tmp_path: Path) -> None:
    """Catches a training that is not shown, a lossy method that goes unmarked, an order other than by speedup, and a
    name that breaks the table."""
    results = tmp_path / "results"
    head = {"drafter": "eagle", "checkpoint": "runs/head"}
    entries = [{"drafter": "autoregressive"}, head | {"label": "E"}, {"drafter": "hybrid", "label": "H", "head": head}]
    entries += [
        {"drafter": "speculative", "label": "S|x", "draft_model": "runs/draft"},
        {"drafter": "mjsd", "label": "M"},
        {"drafter": "kangaroo", "label": "K", "checkpoint": "runs/k"},
    ]
    speedups = {"K": 0.5, "autoregressive": 1.0, "E": 1.5, "H": 2.0, "S|x": 1.2, "M": 3.0}
    rows = [{"drafter": name, "speedup": speedup, "tau": 4.0 - speedup} for name, speedup in speedups.items()]
    rows[-1]["lossless"] = False
    trained = {"drafter": "eagle", "data": "x/y/z.jsonl", "tokens": 2_000_000, "minutes": 42.0, "joules": 10.8e6}
    rows[2]["trained"], rows[3]["trained"] = [trained], [trained | {"init_from": "runs/e0", "joules": None}]
    written(results / "m" / "one", report(entries, rows))
    (results / "targets.yaml").write_text("f: A target\n")
    (table,) = run(results, tmp_path / "docs", Console(quiet=True))["tables"]
    by_name = {row["name"]: row["cells"] for row in table["rows"]}
    assert list(by_name) == ["M (lossy)", "H", "E", "S|x", "autoregressive", "K"] and table["target"] == "A target"
    assert by_name["E"][:3] == ["2.0M positions of y/z.jsonl", "42 min", "3 kWh"]
    assert by_name["H"][:3] == ["2.0M positions of y/z.jsonl", "42 min, after e0", "not counted"]
    assert by_name["K"][:3] == ["k: not recorded", "not recorded", "not recorded"]
    assert by_name["S|x"][:3] == ["the draft model draft", "not recorded", "not recorded"]
    assert by_name["M (lossy)"][5] == "lossy" and by_name["autoregressive"][:3] == ["-", "-", "-"]
    text = (tmp_path / "docs" / PAGE).read_text()
    assert "| S\\|x |" in text and "](../results/m/one/report.json)" in text
    best = text.split("## ")[1]
    assert "| A target | mt/q.jsonl, 3 prompts, greedy, bfloat16 | H | 2.0M" in best


def test_one_table_per_target_and_prompt_set(tmp_path: Path) -> None:
    """Catches a second table of the same prompts, and sampled, batched, quantised, small or old reports chosen."""
    entries = [{"drafter": "autoregressive"}, {"drafter": "suffix"}]
    rows: list[dict[str, Any]] = [{"drafter": one["drafter"], "speedup": 1.0, "tau": 1.0} for one in entries]
    many = report(entries, [*rows, rows[0] | {"drafter": "other"}], date="2026-03-01")
    for setting in ({"temperature": 1.0}, {"batch": 4}):
        sampled = json.loads(json.dumps(many))
        for part in (sampled["baseline"]["temperatures"], sampled["rows"]):
            part[:] = [one | setting for one in part]
        written(tmp_path / f"a-{'-'.join(setting)}", sampled)
    quantised = json.loads(json.dumps(many))
    quantised["environment"]["quantize"] = "int8"
    written(tmp_path / "a-quantised", quantised)
    written(tmp_path / "few", report(entries, rows[:1], date="2026-03-01"))
    written(tmp_path / "new", report(entries, rows, date="2026-02-02"))
    written(tmp_path / "old", report(entries, rows))
    (table,) = collect(tmp_path, tmp_path)["tables"]
    assert table["link"] == "new/report.json"
