"""`python -m eval.compare REPORT`: the trainings of one report, with intervals over their seeds."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eval import compare

FACTS = {
    "target": {"name": "t", "fingerprint": "f", "parameters": 1}, "dtype": "float32", "date": "2026-02-01", "cpu": "C",
    "gpu": None, "threads": 1, "commit": "abc", "dirty": False, "argv": [], "config": {"drafters": []},
    "prompt_set": {"file": "q.jsonl", "sha256": "p", "prompts": 4},
    "limits": {"max_new_tokens": 64, "top_k": 0, "top_p": 1.0, "rounds": 1, "seed": 0},
}  # fmt: skip
TRAINED = {"tokens": 2_500_000, "minutes": 30.0}


def report(taus: dict[str, list[float]], **grid: Any) -> dict[str, Any]:
    """As eval.speed writes it, with a grid over checkpoints, after plain decoding."""
    plain: dict[str, Any] = {
        "drafter": "plain",
        "entry": "plain",
        "grid": None,
        "temperature": 0.0,
        "batch": 1,
        "tau": 1.0,
    }
    plain |= {"lossless": True, "speedup": 1.0, "speedup_ci": None, "tokens_per_second": 9.0}
    rows: list[dict[str, Any]] = [plain]
    for entry, values in taus.items():
        for seed, tau in enumerate(values):
            more = {"entry": entry, "grid": {"checkpoint": f"{entry}-{seed}", **grid}, "tau": tau}
            trained = [TRAINED | {"minutes": 5.0}, TRAINED | {"minutes": 30.0 + seed}]  # continued
            rows.append(plain | more | {"trained": trained, "n_alpha": [0.5 + seed / 4]})
    return {"environment": FACTS, "baseline": {}, "rows": rows}


def rows_of(folder: Path, content: dict[str, Any], *arguments: str) -> list[dict[str, Any]]:
    """The rows of trainings.json."""
    (folder / "report.json").write_text(json.dumps(content))
    compare.main([str(folder), *arguments])
    return list(json.loads((folder / "trainings.json").read_text())["rows"])


def test_intervals_worked_by_hand(tmp_path: Path) -> None:
    """Catches the normal's quantile in place of Student's, a deviation that is not divided by the seeds, differences
    that are not taken seed by seed, and means of one seed only."""
    paper, ours = rows_of(tmp_path, report({"paper": [2.0, 3.0, 4.0], "ours": [2.2, 3.3, 4.4]}))
    assert paper["tau"] == 3.0 and paper["over"] == {}
    assert paper["tau_ci"] == pytest.approx([3 - 4.303 / 3**0.5, 3 + 4.303 / 3**0.5])
    assert ours["over"]["paper"]["percent"] == pytest.approx(10)
    assert ours["over"]["paper"]["percent_ci"] == pytest.approx([10, 10])
    line = "| ours | T = 0 | 31.0 | 2.50M | 0.75 | 2.20 | 3.30 | 4.40 | 3.30 [0.57, 6.03] | +10.0% [+10.0, +10.0] |"
    assert line in (tmp_path / "trainings.md").read_text()


def test_over_what_has_no_seeds(tmp_path: Path) -> None:
    """Catches an untrained model that is compared with the first seed only, seeds paired with none, and a name that no
    row has."""
    (row,) = rows_of(tmp_path, report({"ours": [2.0, 3.0]}), "--over", "plain")
    assert row["over"]["plain"]["percent"] == pytest.approx(150)
    rows = rows_of(tmp_path, report({"three": [1.0, 2.0, 3.0], "two": [1.0, 2.0]}))
    assert rows[1]["over"] == {"three": None}
    with pytest.raises(ValueError, match="--over .'plane'. is no entry"):
        rows_of(tmp_path, report({"ours": [2.0, 3.0]}), "--over", "plane")
    with pytest.raises(ValueError, match="found 11 seeds of one training; give at most 10"):
        rows_of(tmp_path, report({"many": [2.0] * 11}))


def test_a_report_without_trainings_is_refused(tmp_path: Path) -> None:
    """Catches an empty table."""
    with pytest.raises(ValueError, match="no row of the report names a training"):
        rows_of(tmp_path, report({}))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within a report."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))
