"""What the Markdown page makes of a report's rows."""

from typing import Any

from eval.report.page import _grids, best_settings
from eval.report.rows import _without_all_readings
from eval.report.sections import acceptance_by_position


def row(speed: float, tau: float, **grid: int) -> dict[str, Any]:
    return {"entry": "O", "temperature": 0.0, "batch": 1, "grid": grid or None, "tokens_per_second": speed, "tau": tau}


def test_a_grid_is_a_table_with_its_last_knob_across() -> None:
    """Catches figures in another combination's cell, and the wrong one marked as the fastest."""
    rows = [row(10.0 * a + b, a / b, window=a, gamma=b) for a in (14, 15) for b in (3, 4)]
    assert _grids({"rows": [row(1.0, 1.0), *rows]})[2:-1] == [
        "| window | gamma = 3 | gamma = 4 |",
        "| ---: | ---: | ---: |",
        "| 14 | 143.0 (4.67) | 144.0 (3.50) |",
        "| 15 | 153.0 (5.00) | **154.0** (3.75) |",
    ]


def test_three_knobs_have_two_columns_down_and_one_or_four_no_table() -> None:
    """Catches rows of one knob's value that overwrite another's."""
    rows = [row(a * 100 + b * 10 + c, 1.0, a=a, b=b, c=c) for a in (1, 2) for b in (1, 2) for c in (1, 2)]
    assert _grids({"rows": rows})[2:-1] == [
        "| a | b | c = 1 | c = 2 |",
        "| ---: | ---: | ---: | ---: |",
        "| 1 | 1 | 111.0 (1.00) | 112.0 (1.00) |",
        "| 1 | 2 | 121.0 (1.00) | 122.0 (1.00) |",
        "| 2 | 1 | 211.0 (1.00) | 212.0 (1.00) |",
        "| 2 | 2 | 221.0 (1.00) | **222.0** (1.00) |",
    ]
    assert not _grids({"rows": [row(1.0, 1.0, a=1), row(1.0, 1.0, a=1, b=1, c=1, d=1)]})


def test_a_start_that_could_not_read_the_energy_is_told() -> None:
    """Catches dashes without a reason in an interrupted report whose first start had no counters."""

    def report(available: bool, joules: float | None) -> dict[str, Any]:
        energy = {"device": {"available": available, "how": "counters"}}
        return {"environment": {"energy": energy}, "rows": [{"joules_per_token": 1.0}, {"joules_per_token": joules}]}

    assert _without_all_readings(report(True, None))
    assert not _without_all_readings(report(True, 0.5))
    assert not _without_all_readings(report(False, None))  # which the reason for all rows covers


def test_acceptance_by_position_has_every_drafter_that_drafts() -> None:
    """Catches rows of dashes for plain decoding and stock generation, which have no positions, and columns mixed up."""
    told = {"drafter": "E", "temperature": 0.0, "batch": 1, "lossless": True, "stock": False, "tau": 2.5}
    told |= {"tau_by_prompt": 2.25, "n_alpha": [0.8, 0.5], "joint_alpha": [0.75, 0.375], "ctar": [0.7, 0.3]}
    plain, stock = told | {"joint_alpha": []}, told | dict.fromkeys(("joint_alpha", "n_alpha", "ctar", "tau"))
    assert acceptance_by_position([plain, told, stock])[1:] == [
        ["E", "0", "1", "2.50", "2.25", "0.80 0.50", "0.75 0.38", "0.70 0.30"]
    ]


def test_the_fastest_settings_by_batch_size() -> None:
    """Catches the best of another batch size, of another entry, or of the highest tau."""
    rows = [
        row(speed, 9.0 - speed, gamma=gamma) | {"batch": batch, "speedup": speed / batch}
        for batch, gamma, speed in ((1, 2, 5.0), (1, 4, 6.0), (2, 2, 8.0), (2, 4, 7.0))
    ]
    rows += [row(99.0, 1.0) | {"batch": 1, "speedup": 1.0}, rows[0] | {"entry": "P", "tokens_per_second": None}]
    report = {"environment": {"batch": [1, 2, 4]}, "rows": rows}
    assert best_settings(report) == [["O", "0", "gamma 4 (6.00x)", "gamma 2 (4.00x)", "-"]]
