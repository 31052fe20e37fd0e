"""`python -m eval.compare`: chance is no change, a change is found, and what cannot be compared is said."""

import itertools
import json
import math
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from programs import status

from eval import compare
from eval.figures import paired
from eval.measure.run_journal import RUN_FIELDS, run_from_line
from eval.report.by_prompt import as_csv, by_prompt
from eval.report.changes import compare as compare_tables
from eval.report.pairs import Read

NAMES = ["a", "b"]
PROMPTS = 24
FIGURES = ("tau", "speedup", "tokens_per_second")
METHODS = {"autoregressive": 1.0, "eagle": 2.0, "kangaroo": 1.5}  # tau


def report(seed: int, slower: float = 1.0, prompts: int = PROMPTS, noise: float = 0.03, **facts: Any) -> Read:
    """As eval.speed writes it: what is ``seed``'s of the times is noise; ``slower``: eagle's seconds."""
    generator = np.random.default_rng(seed)
    lengths = np.random.default_rng(99).integers(20, 60, prompts)
    lines = []
    for index, tokens in enumerate(lengths.tolist()):
        for method, tau in METHODS.items():
            steps = round(tokens / tau)
            seconds = 0.01 * steps * generator.lognormal(0, noise) * (slower if method == "eagle" else 1.0)
            line: dict[str, Any] = dict.fromkeys(RUN_FIELDS)
            line |= {"method": method, "temperature": 0.0, "round": 0, "first_tokens": 1, "index": index}
            line |= {"tokens": [5] * (tokens + 1), "decode_seconds": seconds, "wall_seconds": seconds + 0.1}
            line |= {"prompt": f"p{index}", "prompt_tokens": 9, "prefill_seconds": 0.1}
            line |= {name: [1] * steps for name in ("drafted", "depth", "accepted", "committed", "forwards")}
            line |= {f"{name}_seconds": [0.0] * steps for name in ("draft", "verify", "other", "model")}
            lines.append(line)
    environment = {
        "target": {"name": "t", "fingerprint": "t", "parameters": 1}, "dtype": "float32", "cpu": "C", "cpu_cores": 2,
        "gpu": None, "threads": 1, "date": "2026-02-01", "commit": None, "dirty": None, "argv": [],
        "prompt_set": {"file": "q.jsonl", "sha256": "p", "prompts": prompts},
        "limits": {"max_new_tokens": 64, "top_k": 0, "top_p": 1.0, "rounds": 1, "seed": 0},
        "config": {"drafters": [{"drafter": "eagle", "depth": 5}]},
    } | facts  # fmt: skip
    row = {"temperature": 0.0, "batch": 1, "lossless": True, "speedup_ci": None} | dict.fromkeys(FIGURES, 1.0)
    rows = [{"drafter": method, **row} for method in METHODS]
    return {"environment": environment, "rows": rows, "baseline": {"temperatures": [{"temperature": 0.0}]}}, lines


def tabled(of: Read) -> Read:
    """A report with its table of prompts instead of its journal."""
    found, lines = of
    runs = [(line["prompt"], line["prompt_tokens"], run_from_line(line)) for line in lines]
    return found, by_prompt(runs, "autoregressive")


def compared(a: Read, b: Read, names: list[str]) -> dict[str, Any]:
    return compare_tables(tabled(a), tabled(b), names)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples enough for five figures."""
    monkeypatch.setattr(paired, "SAMPLES", 1000)


def test_reports_of_the_same_thing(quick: None) -> None:
    """Catches intervals that are too narrow for few prompts, and many figures each with a chance of its own: of
    forty pairs at most four may show a change (two are to be expected at most).
    """
    pairs = [compared(report(2 * seed), report(2 * seed + 1), NAMES) for seed in range(40)]
    assert len(pairs[0]["rows"]) == 7  # plain decoding's speed; tau, speed and speedup of two drafters
    assert sum(any(row["significant"] for row in found["rows"]) for found in pairs) <= 4


def test_five_per_cent_are_found(quick: None) -> None:
    """Catches a test without power, a sign that is turned round, and a change that is put down to another drafter."""
    for seed in range(10):
        rows = compared(report(seed, noise=0.005), report(100 + seed, slower=1.05, noise=0.005), NAMES)["rows"]
        eagle = {row["figure"]: row for row in rows if row["drafter"] == "eagle"}
        assert eagle["speedup"]["significant"] and eagle["tau"]["p_value"] == 1.0
        assert eagle["speedup"]["ratio_ci"][0] < 1 / 1.05 + 0.02 and eagle["speedup"]["ratio_ci"][1] < 1
        assert eagle["tokens/s"]["ratio"] == pytest.approx(1 / 1.05, abs=0.03)
        assert eagle["tokens/s"]["p_adjusted"] is None and not eagle["tokens/s"]["significant"]
        assert not any(row["significant"] for row in rows if row["drafter"] == "kangaroo" and row["figure"] == "tau")


def test_runs_that_differ_on_all_prompts_alike(quick: None) -> None:
    """Catches a certainty that prompts cannot give: in each run every method is a little faster or slower throughout,
    as processes are, and the machine runs at half its speed in some."""
    generator = np.random.default_rng(5)

    def drifting(seed: int) -> Read:
        found, lines = report(seed, noise=0.002)
        of_all = 1.0 + generator.integers(2)
        of_method = {method: of_all * generator.lognormal(0, 0.005) for method in METHODS}
        for line in lines:
            line["decode_seconds"] *= of_method[line["method"]]
        return found, lines

    pairs = [compared(drifting(2 * seed), drifting(2 * seed + 1), NAMES) for seed in range(40)]
    assert sum(any(row["significant"] for row in found["rows"]) for found in pairs) <= 4
    moods = [row["ratio"] for found in pairs for row in found["rows"] if row["drafter"] == "autoregressive"]
    assert min(moods) < 0.6 and max(moods) > 1.7


def test_turns_of_a_conversation_count_together() -> None:
    """Catches turns as independent prompts, which makes the interval too narrow, and names of prompts that look like
    turns."""

    def named(turns: int) -> Read:
        found, lines = report(0)
        for line in lines:
            first, turn = divmod(line["index"], turns)
            line["prompt"] = f"HumanEval/{first}" + (f"/{turn + 1}" if turn else "")
        return found, lines

    for turns in (1, 3):
        rows = compared(named(turns), named(turns), NAMES)["rows"]
        assert {row["prompts"] for row in rows} == {PROMPTS // turns} and len(rows) == 7


def test_what_differs_is_said_and_not_compared() -> None:
    """Catches speeds of two machines side by side, other texts that pass for the same, and settings left unsaid."""
    a, b = report(0), report(1, cpu="other", config={"drafters": [{"drafter": "eagle", "depth": 6}]})
    found = compared(a, b, NAMES)
    assert found["differences"]["cpu"] == ["C", "other"] and "options of eagle" in found["differences"]
    assert found["not_compared"] == ["tokens/s"] and {row["figure"] for row in found["rows"]} == {"tau", "speedup"}
    with pytest.raises(ValueError, match="of different texts.*target is 't' and 'u'"):
        compared(a, report(1, target={"fingerprint": "u"}), NAMES)
    marks = [f"{'a' * 16}-{'b' * 16}", f"{'a' * 16}-{'c' * 16}", "a" * 16]  # the last as former versions recorded it
    first, tuned, former = (report(seed, target={"fingerprint": mark}) for seed, mark in enumerate(marks))
    with pytest.raises(ValueError, match="of different texts.*target is"):
        compared(first, tuned, NAMES)
    assert "target" not in compared(first, former, NAMES)["differences"]
    for line in b[1]:
        line["prompt"] = f"other {line['prompt']}"
    with pytest.raises(ValueError, match="no method decodes 2 or more of the same prompts"):
        compared(a, b, NAMES)


def test_p_values_and_intervals_by_enumeration() -> None:
    """Catches swaps counted on one side only, another tail of the normal distribution than its two, and an interval
    without the difference between runs. The reference makes all 256 swaps of eight prompts."""
    generator, seen = np.random.default_rng(0), []
    swaps = [np.array(swap)[:, None] for swap in itertools.product([False, True], repeat=8)]

    def figure(sums: np.ndarray) -> np.ndarray:
        return np.asarray(sums[..., 0] / sums[..., 1])

    def logarithm(one: np.ndarray, other: np.ndarray) -> float:
        return float(np.log(figure(other.sum(0)) / figure(one.sum(0))))

    for seed in range(6):
        a, b = generator.uniform(1, 2, (2, 8, 2))
        b[:, 0] *= generator.uniform(0.6, 1.6)
        found = logarithm(a, b)
        swapped = np.array([logarithm(np.where(swap, b, a), np.where(swap, a, b)) for swap in swaps])
        exact = float((np.abs(swapped) >= abs(found) - 1e-12).mean())
        narrow = paired.change(a, b, figure, seed=seed)
        assert narrow.ratio == pytest.approx(np.exp(found)) and narrow.p_value == pytest.approx(exact, abs=0.02)
        # With a difference between runs, the p-value is at least the normal distribution's two tails.
        between = abs(found) / generator.uniform(0.5, 2.5)
        wider = paired.change(a, b, figure, between, seed)
        tails = 2 * NormalDist().cdf(-abs(found) / math.hypot(swapped.std(), between))
        assert wider.p_value == pytest.approx(max(exact, tails), abs=0.02)
        for end, far in zip(narrow.ratio_ci, wider.ratio_ci, strict=True):
            by_prompts = math.log(end) - found
            expected = math.copysign(math.hypot(by_prompts, 1.96 * between), by_prompts)
            assert math.log(far) - found == pytest.approx(expected)
        seen += [exact, tails]
    assert min(seen) < 0.1 and max(seen) > 0.3


def test_holm_worked_by_hand() -> None:
    """Catches p-values in the wrong order, and adjusted ones that fall."""
    assert paired.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired.holm([0.9, 0.001]) == pytest.approx([0.9, 0.002])


def test_the_program(tmp_path: Path) -> None:
    """Catches a page without the change, or written over the first report's, and a report without its table."""
    for name, (found, lines) in (("a", report(0)), ("b", report(1, slower=1.1))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(found))
        (tmp_path / name / "prompts.csv").write_text(as_csv(tabled((found, lines))[1]))
    assert status(compare.main, tmp_path / "a", tmp_path / "b" / "report.json") == 0
    page = (tmp_path / "b" / "compare.md").read_text()
    assert "- autoregressive, T = 0: tokens/s " in page and "the loop for all methods; not tested" in page
    assert "- eagle, T = 0: speedup -" in page and "| **changed** |" in page and "python -m eval.compare" in page
    assert not (tmp_path / "a" / "compare.md").exists()
    (tmp_path / "a" / "prompts.csv").unlink()
    with pytest.raises(ValueError, match="there is no .*prompts.csv; give the folders of two reports"):
        compare.main([str(tmp_path / "a"), str(tmp_path / "b")])
