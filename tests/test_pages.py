"""Every column of a page shows its own figure: all figures differ, and the cells are written out by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafters.base import Expected
from eval.figures import losslessness, paired
from eval.figures.goodness_of_fit import Fit
from eval.measure.runs import expected_of
from eval.report.build import best_throughput
from eval.report.changes import compare
from eval.report.changes import page as compare_page
from eval.report.pairs import COLUMNS
from eval.report.remarks import fastest
from eval.report.sections import columns_of

WHO: dict[str, Any] = {"drafter": "D", "temperature": 0.5, "batch": 4, "lossless": False, "stock": False, "grid": None}
FIGURES: dict[str, Any] = WHO | {
    "tau": 2.111, "tau_without_loops": 2.222, "tokens_per_second": 33.33, "end_to_end_tokens_per_second": 44.44,
    "speedup": 1.556, "speedup_ci": [1.444, 1.666], "speedup_median": 1.777, "exact_match": 0.8888, "perplexity": 9.119,
    "joules_per_token": 0.1234, "draft_ms": 3.456, "verify_ms": 4.567,
    "other_ms": 5.678, "host_ms": 6.789, "prefill_ms": 7.89, "overhead": 0.3217, "drafted_per_step": 8.76,
}  # fmt: skip


def cells(lines: list[str]) -> list[list[str]]:
    """The cells of a Markdown table, without the rule below its head."""
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    return [row for row in rows if not set("".join(row)) <= set("-: ")]


def test_columns_of_a_speed_report() -> None:
    """Catches a column with another column's figure, a wrong unit, and digits that hide a difference."""
    report = {"environment": {"batch": [1, 4]}, "rows": [FIGURES]}
    assert {name: cell(FIGURES) for name, cell in columns_of(report).items()} == {
        "drafter": "D (lossy)", "T": "0.5", "batch": "4", "tau": "2.11", "tau, no loops": "2.22", "tokens/s": "33.3",
        "end to end": "44.4", "speedup": "1.56x [1.44, 1.67]", "median": "1.78x", "exact": "0.889", "ppl": "9.12",
        "J/token": "0.123", "draft ms": "3.46", "verify ms": "4.57", "commit ms": "5.68",
        "host ms": "6.79", "prefill ms": "7.9", "overhead": "32.2%", "drafted": "8.8",
    }  # fmt: skip


def test_throughput_is_over_the_fastest_plain_decoding() -> None:
    """Catches a speed over plain decoding of the same batch, of another temperature, or of the first batch."""
    plain = [(0.0, 1, 10.0), (0.0, 8, 50.0), (1.0, 1, 8.0), (1.0, 8, None)]
    baselines = [{"temperature": t, "batch": b, "tokens_per_second": speed} for t, b, speed in plain]
    rows = [
        WHO | {"temperature": t, "batch": b, "tokens_per_second": speed}
        for t, b, speed in ((0.0, 1, 30.0), (0.0, 8, 75.0), (0.0, 16, 60.0), (1.0, 1, 12.0), (1.0, 8, None))
    ]
    found = best_throughput(rows, {"temperatures": baselines})
    assert [(one["temperature"], one["batch"], one["tokens_per_second"], one["over_plain"]) for one in found] == [
        (0.0, 8, 75.0, 1.5),
        (1.0, 1, 12.0, 1.5),
    ]


def test_what_a_drafter_expected_of_these_steps_only() -> None:
    """Catches expected figures that include earlier prompts, and a choice of the first prompt."""
    found = Expected(30.0, 75.0, 45.0, "tree of 9")
    drafter: Any = SimpleNamespace(policy=SimpleNamespace(expected=lambda: found))
    assert expected_of(drafter) == found
    assert expected_of(drafter, Expected(20.0, 45.0, 25.0, "chain of 2")) == Expected(10.0, 30.0, 20.0, "tree of 9")
    assert expected_of(SimpleNamespace(policy=None)) is None  # type: ignore[arg-type]


def test_figures_of_a_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a figure of the means instead of the sums, a speedup without its plain runs, and the two reports swapped.

    By hand, of two prompts: tau (6 + 30) / (3 + 9) and (8 + 40) / (2 + 6); tokens/s 36 / 12 and 48 / 8; speedup
    (36 / 12) / (24 / 16) and (48 / 8) / (24 / 16).
    """
    monkeypatch.setattr(paired, "SAMPLES", paired.BLOCK)
    tables = {"a": ([6, 2, 3, 6, 2, 4, 4], [30, 10, 9, 30, 10, 20, 12])}
    tables["b"] = ([8, 3, 2, 8, 3, 4, 4], [40, 5, 6, 40, 5, 20, 12])
    lines = {
        name: [
            {"drafter": "D", "temperature": 0.0, "batch": 1, "prompt": f"p{place}", "prompt_tokens": 9}
            | dict(zip(COLUMNS, map(float, values), strict=True))
            for place, values in enumerate(table)
        ]
        for name, table in tables.items()
    }
    limits = {"max_new_tokens": 64, "top_k": 0, "top_p": 1.0, "rounds": 1, "seed": 0}
    facts = {
        "target": {"fingerprint": "t"},
        "prompt_set": {"sha256": "p"},
        "limits": limits,
        "config": {"drafters": []},
    }
    report = {"environment": facts, "rows": [{"drafter": "D", "temperature": 0.0}]}
    found = compare((report, lines["a"]), (report, lines["b"]), ["first", "second"])
    figures = {row["figure"]: (row["a"], row["b"], row["ratio"]) for row in found["rows"]}
    assert figures["tau"] == pytest.approx((3.0, 6.0, 2.0))
    assert figures["tokens/s"] == pytest.approx((3.0, 6.0, 2.0))
    assert figures["speedup"] == pytest.approx((2.0, 4.0, 2.0))
    found["rows"] = [found["rows"][0] | {"ratio_ci": (1.5, 2.25), "p_adjusted": 0.0321, "significant": True}]
    (row,) = cells(compare_page(found, []).splitlines())[1:]
    assert row == ["D", "0", "1", "tau", "2", "3", "6", "+100.0% [+50.0, +125.0]", "0.032", "**changed**"]


def test_bonferroni_counts_every_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a p-value times the number of groups: each has two tests, and there is one of the ends."""
    fits = iter([Fit(400, 1.0, 0.5, 0.1), Fit(400, 9.0, 0.002, 0.1)])
    levels = []
    monkeypatch.setattr(losslessness, "strata", lambda sample: {"all": slice(None), "0 accepted": slice(0, 100)})
    monkeypatch.setattr(losslessness, "count_tail", lambda ends, expected: 0.25)
    monkeypatch.setattr(losslessness, "uniformity", lambda column, level: levels.append(level) or next(fits, None))
    column = np.linspace(0, 1, 400)
    sample = losslessness.Sample(*[column] * 5)
    found = losslessness.judge(sample, 3, 2.5, alpha=0.05)
    assert found["p_value"] == pytest.approx(0.002 * 5) and levels == pytest.approx([0.05 / 5] * 4)
    assert found["untested"] == {"0 accepted": 100} and found["ends_p_value"] == 0.25
    assert losslessness.judge(sample, 3, 2.5, alpha=0.05)["p_value"] == 1.0  # of the ends only


def line_of(speed: float, tau: float, **grid: int) -> dict[str, Any]:
    at = {"entry": "O", "drafter": "O", "temperature": 0.0, "batch": 1, "lossless": True, "stock": False}
    return at | {"grid": grid or None, "tokens_per_second": speed, "tau": tau, "speedup": None}


def test_the_fastest_lossless_method_is_named() -> None:
    """Catches the slowest, a lossy one or another batch size's, and a temperature without a sentence."""
    base = {"drafted_per_step": 3.0, "speedup_ci": [1.0, 2.0]}
    rows = [line_of(10.0 * speedup, 2.0) | base | {"drafter": name, "speedup": speedup}
            for name, speedup in (("slow", 1.2), ("fast", 1.5), ("lossy", 1.9), ("batched", 1.8))]  # fmt: skip
    rows[2]["lossless"], rows[3]["batch"] = False, 4
    plain = line_of(10.0, 1.0) | {"drafted_per_step": 0.0, "speedup": 1.0}
    report = {"environment": {"target": {"name": "a/b"}}, "rows": rows}
    report["baseline"] = {"temperatures": [plain, plain | {"temperature": 1.0}]}
    first, second = fastest(report)
    assert first == (
        "greedy: the fastest lossless method, fast, has a speedup of 1.50x [1.00, 2.00]: 15.0 instead of 10.0 tokens/s "
        "from b"
    )
    assert second == "temperature 1: no lossless method was measured beside plain decoding"
