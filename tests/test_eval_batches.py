"""Speed of batches: what is decoded together, how it is counted, what goes on after a kill, and what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import programs
import pytest
from test_eval_metrics import PROMPTS, placed, rows_of
from test_eval_prompts import sharegpt
from test_eval_resume import decoded, journalled, killed_after, report

import eval.engines
import eval.speed
import eval.sweep
import eval.tune
from drafters.loop.generate import Step, Trace
from eval.measure.run_journal import journal_line, run_from_line
from eval.measure.runs import Outcome

run = partial(programs.run, eval.speed.main)


@pytest.fixture
def config(tiny_checkpoint: Callable[..., Path], speed_config: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """Batches of 1 and 2 over prompts of unequal length; a draft model, what remembers, and what decodes one row."""
    texts = [" ".join(f"w{n}" for n in range(1, 3 + 4 * i % 7)) + f" w{20 + i}" for i in range(6)]
    draft = str(tiny_checkpoint("llama", 1))
    drafters = [
        {"label": "lookup", "drafter": "prompt_lookup", "gamma": 4},
        {"label": "draft model", "drafter": "speculative", "draft_model": draft, "gamma": 2},
        {"drafter": "lookahead", "temperatures": [0.0]},
    ]
    keys = {"stock": [{"label": "copies", "prompt_lookup_num_tokens": 3}], "batch": [1, 2], "temperatures": [0.0]}
    records = [sharegpt(text, "w1") for text in texts]
    return speed_config(records, {"count": 4}, drafters=drafters, max_new_tokens=12, **keys)


def test_one_report_compares_batch_sizes(config: dict[str, Any], tmp_path: Path) -> None:
    """Catches tokens of one row of a batch only, a speedup over another batch size's plain decoding, outputs that a
    batch changes, and methods that vanish where they decode one row at a time."""
    assert run(config, "temperatures=[0.0, 1.0]") == 0
    found, lines = report(config), journalled(config)
    rows = [(row["temperature"], row["batch"], row["drafter"]) for row in found["rows"]]
    both = ["autoregressive", "lookup", "draft model"]
    assert [row for row in rows if row[0] == 0] == [
        *((0.0, 1, name) for name in (*both, "lookahead", "copies")),
        *((0.0, 2, name) for name in both),
    ]
    for row in found["rows"]:
        key = row["temperature"], row["drafter"]
        own = [line for line in lines if (line["temperature"], line["method"]) == key]
        own = [line for line in own if len(line.get("lengths", [0])) == row["batch"]]
        assert len(own) == 4 // row["batch"] and row["prompts"] == 4
        assert row["new_tokens"] == sum(line["new_tokens"] for line in own) == sum(len(line["tokens"]) for line in own)
        seconds = sum(line["decode_seconds"] for line in own)
        if row["drafter"] != "copies":
            assert row["decoded_tokens"] == row["new_tokens"] - 4
            assert row["tau"] == pytest.approx(row["decoded_tokens"] / row["steps"])
        assert row["tokens_per_second"] == pytest.approx(row["decoded_tokens"] / seconds)
        assert row["exact_match"] == (1.0 if row["temperature"] == 0 else None)
        plain = next(r for r in found["rows"] if r["drafter"] == "autoregressive" and r["batch"] == row["batch"])
        if row["temperature"] == 0:
            assert row["speedup"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
    settings = found["baseline"]["temperatures"]
    assert [(one["temperature"], one["batch"]) for one in settings] == [(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)]
    assert [one["stock_generate_exact_match"] for one in settings] == [1.0, 1.0, None, None]
    left = [(row["drafter"], row["temperature"], row["batch"], row["most"]) for row in found["left_out"]]
    assert left == [("lookahead", 0.0, 2, 1), ("copies", 0.0, 2, 1), ("copies", 1.0, 2, 1)]
    for best in found["throughput"]:
        speeds = {
            row["batch"]: row["tokens_per_second"]
            for row in found["rows"]
            if (row["drafter"], row["temperature"]) == (best["drafter"], best["temperature"])
        }
        assert (speeds[best["batch"]], max(speeds.values())) == (best["tokens_per_second"],) * 2
        assert best["over_plain"] == 1.0 or best["drafter"] != "autoregressive"
    page = " ".join((tmp_path / "out" / "report.md").read_text().split())
    assert "engine eager, batch 1 and 2" in page or ", batch 1 and 2 " in page
    assert "lookahead, T = 0, batch 2: not measured, it decodes at most 1 row(s) at once" in page
    assert "| drafter | T | batch | tau |" in page and "| drafter | T | batch 1 | batch 2 |" in page
    assert "highest throughput, draft model, T = 0: " in page and "paired bootstrap over batches" in page
    assert (tmp_path / "out" / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_a_killed_run_goes_on_within_a_batch_size(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, no_picture: None, tmp_path: Path
) -> None:
    """Catches batches of one size taken for another's, half a batch that counts as whole, and rows given to the wrong
    prompt when they are read again."""
    config |= {"max_new_tokens": 5}
    whole = config | {"out": str(tmp_path / "whole")}
    assert run(whole, "rounds=3") == 0
    one, two = 6 * 4, 4 * 2  # runs of a round with batches of 1 and of 2: six methods; four take two rows
    killed_after(one + 5, config, monkeypatch, "rounds=3")  # of the first round's second batch of 2, one
    killed_after(one + 7, config, monkeypatch, "rounds=3")
    assert run(config, "rounds=3") == 0
    assert [part.get("runs") for part in report(config)["environment"]["parts"]] == [one + 4, 4 + one, None]
    assert decoded(journalled(config)) == decoded(journalled(whole))
    assert len(journalled(config)) == 3 * (one + two)
    timeless = ("drafter", "batch", "tau", "exact_match", "new_tokens", "perplexity", "steps", "ctar")
    tables = [[{name: row[name] for name in timeless} for row in report(made)["rows"]] for made in (whole, config)]
    assert tables[0] == tables[1]


def batch_of(rows: list[list[int]], steps: list[Step], seconds: float = 1.0) -> Outcome:
    tokens, lengths = [token for row in rows for token in row], tuple(map(len, rows))
    trace = Trace(steps, [0.0], [seconds], [0.0], [0.0], 0.5)
    return Outcome(tokens, 0.5, seconds, trace, first_tokens=len(rows), lengths=lengths)


def test_a_batch_by_hand() -> None:
    """Catches steps of another row, times counted once a row, loops of one prompt charged to all, and a row that is
    compared with its neighbour's answer.

    Four prompts in batches of two. The second batch ends in a loop: it takes 24 of its 25 tokens in two steps.
    """
    answers = [[3, 4, 5], [7] * 25, [8, 9], [10, 11, 12, 13]]
    steps = [Step(0, 2, 2, 1, 2), Step(1, 12, 12, 11, 12), Step(1, 12, 12, 11, 12)]
    plain = [Step(row, 0, 0, 0, 1) for row in (0, 0, *[1] * 24)], [Step(row, 0, 0, 0, 1) for row in (0, 1, 1, 1)]
    runs = []
    for place in (0, 2):
        rows = answers[place : place + 2]
        own = steps if place == 0 else [Step(0, 2, 2, 0, 1), Step(1, 3, 3, 2, 3)]
        runs.append(placed(batch_of(rows, plain[place // 2], 8.0), place, 9.0, "plain"))
        runs.append(placed(batch_of(rows, own, 2.0 if place == 0 else 4.0), place, 5.0, "m"))
    described = {name: {"lossless": True, "stock": False, "entry": name, "grid": None} for name in ("plain", "m")}
    prompts = [replace(prompt, category="c") for prompt in PROMPTS[:4]]
    _, (_, row) = rows_of(runs, described, prompts)
    assert (row["prompts"], row["new_tokens"], row["decoded_tokens"], row["batch"]) == (4, 34, 30, 2)
    assert row["tokens_per_second"] == pytest.approx(30 / 6) and row["speedup"] == pytest.approx(16 / 6)
    assert row["speedup_without_loops"] == pytest.approx(8 / 4)  # of the second batch, in which nothing loops
    assert (row["tau"], row["tau_without_loops"]) == (pytest.approx(30 / 5), pytest.approx(6 / 3))
    assert (row["loop_share"], row["exact_match"], row["divergences"]["count"]) == (0.25, 1.0, 0)
    assert "categories" not in row
    read = [run_from_line(json.loads(json.dumps(journal_line(run, *PROMPTS[:2])))) for run in runs]
    assert read == runs and [len(run.outputs()) for run in read] == [2] * 4
    wrong = replace(runs[3], tokens=[8, 9, 10, 11, 12, 99 % 60])
    _, (_, row) = rows_of([*runs[:3], wrong], described, prompts)
    assert (row["exact_match"], row["divergences"]["count"]) == (0.75, 1)
    assert row["divergences"]["each"][0]["prompt"] == "p3"
