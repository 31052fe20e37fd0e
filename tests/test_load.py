"""Load on served engines: closed loop, counts of every outcome, counters, the choice and its page."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import programs
import pytest
from served_engine import TOKENS, ServedEngine

from eval import load
from eval.figures.load import best, rows_of
from eval.measure.counters import read_counters, speculation


def questions(folder: Path, *texts: str) -> Path:
    """A prompt file in Spec-Bench's format."""
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps({"question_id": n, "turns": [text]}) + "\n" for n, text in enumerate(texts)))
    return file


def run(file: Path, out: Path, *arguments: Any) -> dict[str, Any]:
    """The measurement that the program writes."""
    assert programs.status(load.main, "--prompts", file, "--out", out, *arguments) == 0
    return json.loads((out / "load.json").read_text())


def test_each_prompt_counts_once_at_each_endpoint_and_number_of_requests(tmp_path: Path) -> None:
    """Catches warm-up or filler requests that are counted, prompts measured twice, and fewer requests in flight."""
    file = questions(tmp_path, *(f"question {n}" for n in range(7)))
    with ServedEngine(0.012) as plain, ServedEngine(0.002) as fast:
        report = run(
            file, tmp_path / "out", "--baseline", plain.url, "--endpoint", f"4={fast.url}", "--requests", "1,3"
        )
        assert (plain.busiest, fast.busiest) == (3, 3)
        assert len(fast.questions) > 2 * 7 + 2 * (1 + 3)  # two parts at each level have warm-up; others fill
    asked = Counter(
        (turn["endpoint"], turn["in_flight"], answer["prompt"])
        for turn in report["turns"]
        for answer in turn["answers"]
    )
    assert asked == {(label, level, prompt): 1 for label in ("plain", "4") for level in (1, 3) for prompt in range(7)}
    assert [(row["in_flight"], row["endpoint"]) for row in report["rows"]] == [
        (1, "plain"),
        (1, "4"),
        (3, "plain"),
        (3, "4"),
    ]
    for row in report["rows"]:
        assert row["answered"] == 7 and not row["failed"]
        assert row["tau"] == pytest.approx(3) and row["drafted"] == pytest.approx(4)
    alone = report["rows"][1]
    assert alone["change"]["prompts"] == 7 and alone["change"]["ratio"] > 1
    assert alone["tokens_per_second"] < TOKENS / (TOKENS * 0.002)
    assert alone["first"]["median"] > 0.002 and alone["per_token"]["median"] > 0.002
    page = (tmp_path / "out" / "load.md").read_text()
    choice = next(line for line in page.splitlines() if line.startswith("| 3 |"))
    assert choice.endswith("| 4 |") and "x [" in choice


def test_failed_requests_are_counted_and_the_others_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a failure that ends the run, one that is lost, and a server's message that shows the API key."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret-key")
    file = questions(tmp_path, "refuse", "hangup", "gone", "slow", "uncounted", "wrong", "garbled", "good", "better")
    with ServedEngine(fail=False) as plain, ServedEngine(counters=False) as server:
        report = run(file, tmp_path / "out", "--baseline", plain.url, "--endpoint", server.url, "--requests", "2",
                     "timeout=0.6", "parts=1")  # fmt: skip
        assert set(server.keys) == {"Bearer secret-key"}
    before, row = report["rows"]
    assert before["failed"] == {} and before["answered"] == 9
    assert row["failed"] == {"refused": 2, "disconnected": 2, "timeout": 1, "unreadable": 2} and row["answered"] == 2
    assert row["tau"] is None and row["change"]["prompts"] == 2
    page = (tmp_path / "out" / "load.md").read_text()
    assert "| - | - | 2 | 2 refused" in page and "served: no counters at /metrics" in page
    assert "served, 2 in flight, refused: 400 Bad Request: too long for Bearer [API key]" in page
    assert "secret-key" not in page + json.dumps(report)


def test_counters_that_fail_for_a_while(tmp_path: Path) -> None:
    """Catches a page of counters that breaks off and ends the run, and the other turns' counters lost with it."""
    with ServedEngine(cut_pages=1) as server:
        report = run(questions(tmp_path, "one", "two"), tmp_path / "out", "--endpoint", server.url, "--requests", "1")
    assert [turn["gains"] is None for turn in report["turns"]] == [True, False]
    assert report["rows"][0]["tau"] == pytest.approx(3)


def test_an_endpoint_is_added_to_an_earlier_measurement(tmp_path: Path) -> None:
    """Catches a second run that loses the first one's endpoints, or joins measurements of other settings."""
    file, out = questions(tmp_path, "one", "two", "three"), tmp_path / "out"
    with ServedEngine(0.008) as plain:
        run(file, out, "--baseline", plain.url, "--requests", "1")
    with ServedEngine() as fast:
        for _ in range(2):  # the second time replaces the first
            report = run(file, out, "--endpoint", f"2={fast.url}", "--requests", "1", "parts=1")
    assert [(row["endpoint"], row["answered"]) for row in report["rows"]] == [("plain", 3), ("2", 3)]
    assert report["rows"][1]["change"]["ratio"] > 1
    with ServedEngine() as other, programs.refused("load.json has another measurement: max_new_tokens was 128, is 9"):
        load.main(["--prompts", str(file), "--out", str(out), "--endpoint", other.url, "--max-new-tokens", "9"])


def test_an_endpoint_must_answer_at_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a wrong address that is found only as failed requests, and two endpoints with one label."""
    with ServedEngine() as server:
        pass
    words = ["--prompts", questions(tmp_path, "one", "two"), "--out", tmp_path / "out", "--endpoint", server.url]
    assert programs.status(load.main, *words) == 1
    assert "served: " in (error := capsys.readouterr().err) and "start the server, or fix --endpoint" in error
    assert programs.status(load.main, *words, "--endpoint", "http://localhost:1/v1") == 1
    assert "two endpoints are called 'served'; give each a label" in capsys.readouterr().err


def turn(endpoint: str, seconds: list[float], outcome: str = "answered") -> dict[str, Any]:
    """A turn at one request in flight with ten tokens an answer; ``outcome``: of the last answer."""
    answers = [
        {"prompt": at, "outcome": "answered", "seconds": each, "first": each / 2, "tokens": 10, "detail": ""}
        for at, each in enumerate(seconds)
    ]
    answers[-1]["outcome"] = outcome
    return {"endpoint": endpoint, "in_flight": 1, "answers": answers, "gains": None}


@pytest.mark.parametrize(
    ("seconds", "outcome", "chosen"),
    [
        ([0.5] * 9, "answered", "4"),  # faster than 2
        ([1.2] * 9, "answered", "2"),  # slower than plain
        ([0.5] * 9, "refused", "2"),  # faster, and loses requests
    ],
)
def test_choice(seconds: list[float], outcome: str, chosen: str) -> None:
    """Catches a choice that ignores the ratio, its interval, or failed requests."""
    turns = [turn("plain", [1.0] * 9), turn("4", seconds, outcome), turn("2", [0.8] * 9)]
    rows = rows_of({"baseline": "plain", "turns": turns})
    assert [row["endpoint"] for row in rows] == ["plain", "2", "4"]
    assert best(rows, 1, "plain") == chosen
    assert rows[1]["tokens_per_second"] == pytest.approx(12.5) and rows[1]["change"]["ratio"] == pytest.approx(1.25)
    noisy = [turn("plain", [1.0] * 9), turn("4", [0.2, 3.0] * 4 + [0.2])]
    assert best(rows_of({"baseline": "plain", "turns": noisy}), 1, "plain") == "plain"


def test_counters_of_sglang() -> None:
    """SGLang counts requests at their end: (100 tokens - 10 requests) / 30 verifications."""
    text = """
sglang:generation_tokens_total{is_streaming="true",model_name="a b"} 60.0
sglang:generation_tokens_total{is_streaming="false",model_name="a b"} 4e+01
sglang:num_requests_total{is_streaming="true"} 10.0
sglang:spec_verify_calls_total{model_name="a b"} 30.0
sglang:spec_verify_calls_created{model_name="a b"} 1.7e9
sglang:prompt_tokens_total 200.0
sglang:cached_tokens_total{cache_source="device"} 50.0
sglang:spec_accept_length 7.0
"""
    assert speculation(read_counters(text)) == {"tau": 3.0, "drafted": None, "cached": 0.25}
    assert speculation({}) == {"tau": None, "drafted": None, "cached": None}
