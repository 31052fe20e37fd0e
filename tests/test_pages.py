"""Every column of a page shows its own figure: all figures differ, and the cells are written out by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from drafters.base import Expected
from eval.figures import losslessness, paired
from eval.figures.goodness_of_fit import Fit
from eval.measure.runs import expected_of
from eval.report import certificate_page as lossless_page
from eval.report.build import best_throughput
from eval.report.changes import compare
from eval.report.changes import page as compare_page
from eval.report.page import setting
from eval.report.pairs import COLUMNS
from eval.report.remarks import fastest, statements, warnings
from eval.report.sections import _acceptance, _by_batch, _by_context, _categories, _two_engines, columns_of
from eval.report.series import _tables
from eval.rooflines.shape_page import markdown as roofline_page
from eval.rooflines.shape_page import median_of

WHO: dict[str, Any] = {"drafter": "D", "temperature": 0.5, "batch": 4, "lossless": False, "stock": False, "grid": None}
FIGURES: dict[str, Any] = WHO | {
    "tau": 2.111, "tau_without_loops": 2.222, "tokens_per_second": 33.33, "end_to_end_tokens_per_second": 44.44,
    "speedup": 1.556, "speedup_ci": [1.444, 1.666], "speedup_median": 1.777, "exact_match": 0.8888, "perplexity": 9.119,
    "joules_per_token": 0.1234, "host_joules_per_token": 0.2346, "draft_ms": 3.456, "verify_ms": 4.567,
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
        "J/token": "0.123", "host J/token": "0.235", "draft ms": "3.46", "verify ms": "4.57", "commit ms": "5.68",
        "host ms": "6.79", "prefill ms": "7.9", "overhead": "32.2%", "drafted": "8.8",
    }  # fmt: skip


def test_sections_of_a_speed_report() -> None:
    """Catches tau and speedup in each other's place, another category's figures, and steps of another engine."""
    kinds = {"a": {"prompts": 2, "tau": 3.25, "speedup": 1.5}, "b": {"prompts": 5, "tau": None, "speedup": 0.75}}
    (section,) = [one for one in _categories([FIGURES | {"categories": kinds}]) if one.rows]
    assert section.head == ["drafter", "T", "a (2)", "b (5)"]
    assert section.rows == [["D (lossy)", "0.5", "1.50x (3.25)", "0.75x (-)"]]
    ours = FIGURES | {"steps": 98, "n_alpha": [0.5], "tau_ci": [2.0, 2.25]}
    engine = ours | {"drafter": "V", "engine": "vllm", "beside": "D", "n_alpha": [0.6], "steps": 1098, "tau": 2.5}
    engine["tau_ci"] = None
    # Agresti and Coull: (98 / 2 + 1) / 100, so 1.96 * 0.05; (1098 * 0.6 + 1) / 1100 = 0.59982, 1.96 * 0.01477.
    assert _two_engines([ours, engine])[0].rows == [
        ["D (lossy)", "98", "2.111 [2.000, 2.250]", "0.500 ± 0.098"],
        ["V (vllm) (lossy)", "1,098", "2.500", "0.600 ± 0.029"],
        ["difference, in standard errors", "", "", "+1.9"],  # 0.1 / sqrt(0.05^2 + 0.01477^2)
    ]


def test_setting_of_a_speed_report() -> None:
    """Catches mean and largest prompt swapped, loads swapped, and a peak of memory in another unit or place."""
    prompts = {"prompts": 20, "later_turns": 3, "file": "q.jsonl", "format": "questions", "categories": {"a": 12}}
    prompts |= {"consecutive": 2, "prompt_tokens": {"mean": 45.4, "max": 99}, "warmup_prompts": 4, "skipped": {"x": 7}}
    prompts |= {"context": {"tokens": 1024, "files": "c.jsonl"}, "suites": {"s": {"max_new_tokens": 32}}}
    facts = {
        "target": {"name": "t", "revision": "r1", "parameters": 7_650_000}, "dtype": "float32", "engine": "fused",
        "quantize": "int8", "batch": 1, "prompt_set": prompts, "gpu": None, "cpu": "C", "cpu_cores": 8, "threads": 6,
        "fewest_threads": 5, "load_average": 0.31, "load_average_after": 1.72, "commit": "0123456789abcdef",
        "peak_memory_bytes": {"host": 1_500_000_000, "device": None}, "versions": {"torch": "2.11"}, "dirty": True,
        "date": "2026-02-01", "processes": 3,
        "limits": {"max_new_tokens": 64, "rounds": 5, "top_k": 0, "top_p": 0.9, "seed": 11},
        "parts": [{"runs": 1200, "date": "d1", "load_average": 2.26}, {"runs": 9, "date": "d2", "load_average": 0.0}],
    }  # fmt: skip
    assert setting({"environment": facts}) == [
        "- target: t at revision r1, 7.7M parameters, float32, engine fused, layers in int8, batch 1",
        "- machine: C, 8 CPU cores, 6 threads (at times 5, beside other processes); load average 0.3 before, 1.7 "
        "after; peak memory 1.50 GB (host)",
        "- prompts: 20, 3 of them later turns of q.jsonl (questions) (by category: a 12; 2 of one category in a row), "
        "45 tokens on average, at most 99 (filled up to 1,024 with dialogues of c.jsonl); 4 others for warm-up; "
        "skipped: x 7",
        "- limits: at most 64 new tokens (of s 32), 5 round(s); sampled rows top-k off, top-p 0.9; seed 11",
        "- software: torch 2.11; commit 0123456789ab with local changes; 2026-02-01",
        "- 3 processes shared the prompts: every speed is that of one process, and a method that remembers prompts "
        "remembers those of its own process",
        "- interrupted and resumed 1 time(s): 1,200 runs from d1 (load average 2.3), the rest from d2",
    ]


def test_warnings_of_a_speed_report() -> None:
    """Catches a ratio upside down, and unexplained outputs counted with the explained ones."""
    divergences = {"count": 5, "unexplained": 2, "each": None}
    row = WHO | {"lossless": True, "divergences": divergences, "prompts": 40}
    failure = WHO | {"prompt": "p7", "reason": "RuntimeError: x"}
    baseline = {"temperature": 0.5, "batch": 1, "over_stock_generate": 0.8}
    report = {"failures": [failure], "baseline": {"temperatures": [baseline]}, "rows": [row]}
    assert warnings(report) == [
        "D (lossy), T = 0.5, batch 4: no figures, it failed on prompt 'p7': RuntimeError: x",
        "T = 0.5: the baseline is slower than stock generate (0.80 times its speed): every speedup there is 1.25 times "
        "the speedup over stock generate",
        "D, batch 4 is lossless, but 2 of 40 greedy outputs differ from plain decoding's by more than rounding "
        "explains: a fault in the method or in the loop",
    ]


def test_statements_of_a_speed_report() -> None:
    """Catches explained outputs counted with the unexplained ones, a ratio upside down, and swapped figures."""
    divergences = {"count": 7, "unexplained": 2, "largest_margin": 0.4567, "each": None}
    row = FIGURES | {
        "lossless": True,
        "divergences": divergences,
        "prompts": 40,
        "perplexity": None,
        "temperature": 0.0,
    }
    row |= {"perplexity_unavailable": "x", "expected": {"tau": 2.345, "speedup": 1.654, "choice": "chain of 3"}}
    row |= {"over_best_fixed": {"drafter": "F", "speedup": 1.0567, "speedup_ci": [0.956, 1.156]}}
    row |= {"draft_vocab": 8192, "draft_vocab_coverage": 0.9876}
    each = [{"position": place} for place in (31, 4, 17)]
    engine = FIGURES | {"engine": "vllm", "temperature": 0.0, "prompts": 40}
    engine["divergences"] = {"count": 3, "unexplained": 1, "each": each}
    baseline = {"temperature": 0.0, "batch": 1, "tokens_per_second": 123.45, "over_stock_generate": 1.256}
    baseline |= {"stock_generate_tokens_per_second": 98.29, "loop_share": 0.0625}
    facts = {
        "prompt_set": {"prompts": 43, "later_turns": 3, "requested": 80, "file": "q.jsonl"}, "dtype": "bfloat16",
        "quantisation": {"kl": 0.01234, "same_argmax": 0.9753, "positions": 12_345}, "quantize": "int8",
        "energy": {"device": {"available": True, "how": "RAPL"}}, "load_average": 9.87, "cpu_cores": 8,
        "parts": [{"load_average": 9.87}, {"load_average": None}],
    }  # fmt: skip
    report = {"environment": facts, "baseline": {"temperatures": [baseline]}, "rows": [row, engine]}
    report["left_out"] = [WHO | {"most": 1}]
    assert statements(report) == [
        "only 40 prompts are measured, not the 80 asked for: q.jsonl has no more usable ones",
        "layers in int8: KL 0.0123 from the target in bfloat16, same best token at 97.5% of 12,345 positions of "
        "prompts and plain decoding's answers",
        "T = 0: plain decoding in this loop makes 123.5 tokens/s, 1.26 times stock generate's 98.3",
        "T = 0: 6.2% of plain decoding's outputs end in a loop (loops raise tau of every drafter; see tau, no loops)",
        "energy: RAPL",
        "the machine was busy when runs began (load average 9.9): times are rough",
        "D, batch 4: 7 of 40 greedy outputs leave plain decoding's path, 5 of them where rounding in bfloat16 explains "
        "it (largest top-2 margin there: 0.457 logits)",
        "D, T = 0, batch 4: auto chose its options, at the end chain of 3; expected tau 2.35 and 1.65x, measured 2.11 "
        "and 1.56x; 1.06 (0.96 to 1.16) times the fastest fixed setting of its method, F",
        "D, T = 0, batch 4: drafts with 8,192 tokens, those of the text included, which are 98.8% of its outputs' "
        "tokens",
        "D, T = 0, batch 4: no perplexity of its outputs (x)",
        "D (vllm) (lossy): 37 of 40 greedy outputs are plain decoding's; the others leave it after 17 tokens (median; "
        "the first after 4), 2 of them where rounding in bfloat16 explains it",
        "D (lossy), T = 0.5, batch 4: not measured, it decodes at most 1 row(s) at once",
    ]


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


def test_tables_of_a_sweep() -> None:
    """Catches a value's figures under another value, and a method without a row there that moves the others."""
    rows = [
        [FIGURES],
        [FIGURES | {"tokens_per_second": 55.5, "speedup": 2.5}, FIGURES | {"drafter": "E", "stock": True}],
    ]
    values = [{"value": value, "rows": of} for value, of in zip((3, [1, 2]), rows, strict=True)]
    lines = cells(_tables({"key": "k", "values": values}))
    assert lines[:3] == [
        ["drafter", "T", "k = 3", "k = [1, 2]"],
        ["D (lossy)", "0.5", "33.3 (1.56x)", "55.5 (2.50x)"],
        ["E (stock) (lossy)", "0.5", "-", "33.3 (1.56x)"],
    ]
    assert lines[3] == ["k", "drafter", "T", "tokens/s", "speedup", "tau", "ppl", "J/token"]
    assert lines[4] == ["3", "D (lossy)", "0.5", "33.3", "1.56x [1.44, 1.67]", "2.11", "9.12", "0.123"]
    assert [line[0] for line in lines[4:]] == ["3", "[1, 2]", "[1, 2]"]


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


def test_columns_of_a_certificate() -> None:
    """Catches counts swapped between texts, tokens and differences, and a p-value without its number of tests."""
    each = {"prompt": 3, "position": 17, "margin": 0.125, "gap": 0.25, "tolerance": 0.5, "explained": True}
    part = {"dtype": "bfloat16", "texts": 32, "tokens": 3721, "exact_texts": 29, "unexplained": 1}
    lines = lossless_page._greedy([part | {"divergences": [each, each | {"explained": False, "gap": 0.75}]}])
    assert cells(lines)[1] == ["bfloat16", "32", "3,721", "29", "2", "1"]
    assert cells(lines)[3:] == [
        ["3", "17", "0.12", "0.75", "0.5", "**no**"],
        ["3", "17", "0.12", "0.25", "0.5", "yes"],
    ]
    tests = [{"tokens": "all", "order": "draft", "count": 14658, "p_value": 0.458, "distance": 0.0337}]
    sampled = {"texts": 512, "tokens": 14659, "longest_draft": 5, "p_value": 0.123, "alpha": 0.01, "level": 2.5e-4}
    sampled |= {"ends": {"observed": 1097, "expected": 98.73}, "ends_p_value": 0.0456, "outside": 6, "tests": tests}
    sampled |= {"untested": {"2 accepted": 35}, "power": 0.99}
    lines = lossless_page._sampled(sampled, {"top_k": 0, "top_p": 0.9, "temperature": 0.5})
    assert lines[0] == "## Sampled, temperature 0.5, top-k off, top-p 0.9"
    assert lines[2:5] == [
        "- 512 texts, 14,659 tokens; drafts 5 tokens deep",
        "- p = 0.12; it fails below 0.01, a single test below 2.5e-04",
        "- texts that ended: 1,097, expected 98.7 (p = 0.046); tokens outside of the target's distribution: 6",
    ]
    assert cells(lines)[1] == ["all", "the draft's", "14,658", "0.46", "0.034"]
    assert "Too few to test: 2 accepted (35)." in lines
    found = {"drafter": {"name": "eagle"}, "verdict": "lossless", "sampled": sampled}
    assert lossless_page.verdict_line(found).endswith(
        "sampled p = 0.12 on 14,659 tokens, a total variation of 0.034 would have been found with a probability of 99%"
    )


def test_columns_of_a_roofline() -> None:
    """Catches milliseconds of another row's count, a floor of one kind of bytes, and parts of a step swapped."""
    method = {"method": "M", "batch": 2, "tau": 3.456, "tokens_per_second": 123.45, "roofline_share": 0.8125}
    method |= {"speedup": 2.345, "draft_seconds": 0.00123, "verify_seconds": 0.00456, "other_seconds": 0.00078}
    method |= {"overhead": 0.0321, "limit_share": 0.9876}
    facts = {
        "shape": "s", "config": {"context": 1024, "new_tokens": 64, "rounds": 3}, "argv": ["x"], "engine": "fused",
        "target": {"name": "t", "revision": None, "parameters": 1e6}, "dtype": "float32", "quantize": None, "gpu": "G",
        "cpu": "C", "cpu_cores": 8, "threads": 6, "load_average": 0.5, "load_average_after": 0.5, "versions": {},
        "commit": None, "dirty": False, "date": "2026",
    }  # fmt: skip
    found = {
        "environment": facts, "bytes_per_step": {"weights": 30_000_000, "cache": 10_000_000},
        "bandwidth_bytes_per_second": 20e9, "bandwidths": {"copy": 15e9, "read": 20e9},
        "verification_seconds": [{"rows": 1, "seconds": 0.002}, {"rows": 26, "seconds": 0.0025}],
        "rows": [method, {"method": "stock", "batch": 1, "missing": "no compiler"}],
    }  # fmt: skip
    page = roofline_page(found)
    assert (
        "Bandwidth 20.0 GB/s (copy 15.0 GB/s, read 20.0 GB/s); a step reads 30.0 MB of weights and 10.0 MB of cache: "
        "2.000 ms per token at least." in page
    )
    rows = cells(page.splitlines())
    assert rows[1:3] == [["1", "2.000", "1.00"], ["26", "2.500", "1.25"]]
    shares = ["81.2%", "2.35x", "1.23", "4.56", "0.78", "3.2%", "98.8%"]
    assert rows[4] == ["M", "2", "3.46", "123.5", *shares]
    assert rows[5][:4] == ["stock", "1", "", "not measured: no compiler"]
    taken = [{"a": 1.0, "b": None}, {"a": 5.0, "b": None}, {"a": 2.0, "b": None}]
    assert median_of(taken) == {"a": 2.0, "b": None}
    assert median_of([*taken, {"missing": "x"}]) == {"missing": "x"}


def line_of(speed: float, tau: float, **grid: int) -> dict[str, Any]:
    at = {"entry": "O", "drafter": "O", "temperature": 0.0, "batch": 1, "lossless": True, "stock": False}
    return at | {"grid": grid or None, "tokens_per_second": speed, "tau": tau, "speedup": None}


def test_acceptance_by_position_has_every_drafter_that_drafts() -> None:
    """Catches rows of dashes for plain decoding and stock generation, and columns mixed up."""
    told = line_of(1.0, 2.5) | {
        "tau_by_prompt": 2.25,
        "n_alpha": [0.8, 0.5],
        "joint_alpha": [0.75, 0.375],
        "ctar": [0.7],
    }
    plain, stock = told | {"joint_alpha": []}, told | dict.fromkeys(("joint_alpha", "n_alpha", "ctar", "tau"))
    assert _acceptance([plain, told, stock]).rows == [["O", "0", "1", "2.50", "2.25", "0.80 0.50", "0.75 0.38", "0.70"]]


def test_speeds_by_batch_size() -> None:
    """Catches another batch size's speed, and a method's row overwritten where it decodes fewer sizes."""
    rows = [line_of(4.0 * batch, 2.0) | {"batch": batch, "speedup": 1.5} for batch in (1, 2)]
    report = {"environment": {"batch": [1, 2, 4]}, "rows": [*rows, rows[0] | {"drafter": "P"}], "throughput": []}
    assert _by_batch(report).rows == [
        ["O", "0", "4.0 (1.50x)", "8.0 (1.50x)", "-"],
        ["P", "0", "4.0 (1.50x)", "-", "-"],
    ]
    assert not _by_batch({"environment": {"batch": 1}, "rows": rows}).rows


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


def test_tau_by_context() -> None:
    """Catches a length's tau in another length's column."""
    bins = [{"from": 8, "to": 15, "tau": 2.25}, {"from": 1024, "to": 2047, "tau": 3.125}]
    rows = [FIGURES | {"by_context": bins}, FIGURES | {"drafter": "E", "by_context": bins[1:]}]
    assert _by_context(rows).head[3:] == ["8 to 15", "1,024 to 2,047"]
    assert [row[3:] for row in _by_context(rows).rows] == [["2.25", "3.12"], ["-", "3.12"]]
    assert not _by_context([FIGURES | {"by_context": bins[:1]}]).rows
