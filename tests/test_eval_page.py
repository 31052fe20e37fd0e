"""The tables of a report's page."""

from typing import Any

from eval.report.remarks import fastest
from eval.report.sections import _acceptance, _by_batch, _grids


def row(speed: float, tau: float, **grid: int) -> dict[str, Any]:
    at = {"entry": "O", "drafter": "O", "temperature": 0.0, "batch": 1, "lossless": True, "stock": False}
    return at | {"grid": grid or None, "tokens_per_second": speed, "tau": tau, "speedup": None}


def test_a_grid_is_a_table_with_its_last_knob_across() -> None:
    """Catches figures in another combination's cell, the wrong one marked as the fastest, and rows overwritten."""
    rows = [row(10.0 * a + b, a / b, window=a, gamma=b) for a in (14, 15) for b in (3, 4)]
    (section,) = _grids([row(1.0, 1.0), *rows])
    assert section.head == ["window", "gamma = 3", "gamma = 4"]
    assert section.rows == [["14", "143.0 (4.67)", "144.0 (3.50)"], ["15", "153.0 (5.00)", "**154.0** (3.75)"]]
    (three,) = _grids([row(a * 100 + b * 10 + c, 1.0, a=a, b=b, c=c) for a in (1, 2) for b in (1, 2) for c in (1, 2)])
    assert [line[:3] for line in three.rows][1:3] == [["1", "2", "121.0 (1.00)"], ["2", "1", "211.0 (1.00)"]]
    assert not _grids([row(1.0, 1.0, a=1), row(1.0, 1.0, a=1, b=1, c=1, d=1)])


def test_acceptance_by_position_has_every_drafter_that_drafts() -> None:
    """Catches rows of dashes for plain decoding and stock generation, and columns mixed up."""
    told = row(1.0, 2.5) | {"tau_by_prompt": 2.25, "n_alpha": [0.8, 0.5], "joint_alpha": [0.75, 0.375], "ctar": [0.7]}
    plain, stock = told | {"joint_alpha": []}, told | dict.fromkeys(("joint_alpha", "n_alpha", "ctar", "tau"))
    assert _acceptance([plain, told, stock]).rows == [["O", "0", "1", "2.50", "2.25", "0.80 0.50", "0.75 0.38", "0.70"]]


def test_the_fastest_settings_by_batch_size() -> None:
    """Catches the fastest of another batch size, of another entry, or of the highest tau."""
    rows = [
        row(speed, 9.0 - speed, gamma=gamma) | {"batch": batch, "speedup": speed / batch}
        for batch, gamma, speed in ((1, 2, 5.0), (1, 4, 6.0), (2, 2, 8.0), (2, 4, 7.0))
    ]
    rows += [row(99.0, 1.0), rows[0] | {"entry": "P", "tokens_per_second": None}]
    report = {"environment": {"batch": [1, 2, 4]}, "rows": rows, "throughput": []}
    assert _by_batch(report)[1].rows == [["O", "0", "gamma 4 (6.00x)", "gamma 2 (4.00x)", "-"]]


def test_the_fastest_lossless_method_is_named() -> None:
    """Catches the slowest, a lossy one or another batch size's, and a temperature without a sentence."""
    base = {"drafted_per_step": 3.0, "speedup_ci": [1.0, 2.0]}
    rows = [row(10.0 * speedup, 2.0) | base | {"drafter": name, "speedup": speedup}
            for name, speedup in (("slow", 1.2), ("fast", 1.5), ("lossy", 1.9), ("batched", 1.8))]  # fmt: skip
    rows[2]["lossless"], rows[3]["batch"] = False, 4
    plain = row(10.0, 1.0) | {"drafted_per_step": 0.0, "speedup": 1.0}
    report = {"environment": {"target": {"name": "a/b"}}, "rows": rows}
    report["baseline"] = {"temperatures": [plain, plain | {"temperature": 1.0}]}
    first, second = fastest(report)
    assert first == (
        "greedy: the fastest lossless method, fast, has a speedup of 1.50x [1.00, 2.00]: 15.0 instead of 10.0 tokens/s "
        "from b"
    )
    assert second == "temperature 1: no lossless method was measured beside plain decoding"
