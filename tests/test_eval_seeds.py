"""`python -m eval.seeds`: intervals over seeds, and what cannot be compared."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import status

from eval import seeds

FACTS = {
    "target": {"name": "t", "fingerprint": "f", "parameters": 1}, "dtype": "float32", "date": "2026-02-01", "cpu": "C",
    "cpu_cores": 2, "gpu": None, "threads": 1, "commit": "abc", "dirty": False, "argv": [], "config": {"drafters": []},
    "prompt_set": {"file": "q.jsonl", "sha256": "p", "prompts": 4},
    "limits": {"max_new_tokens": 64, "top_k": 0, "top_p": 1.0, "rounds": 1, "seed": 0},
}  # fmt: skip


def report(taus: dict[str, list[float]]) -> dict[str, Any]:
    """As eval.speed writes it, with a grid over checkpoints, after plain decoding."""
    plain = {"drafter": "plain", "entry": "plain", "grid": None, "temperature": 0.0, "tau": 1.0, "lossless": True}
    plain |= {"speedup": 1.0, "speedup_ci": None, "tokens_per_second": 9.0}
    rows: list[dict[str, Any]] = [plain]
    for entry, found in taus.items():
        rows += [
            {**plain, "entry": entry, "grid": {"checkpoint": f"{entry}-{seed}"}, "tau": tau}
            for seed, tau in enumerate(found)
        ]
    return {"environment": FACTS, "baseline": {"temperatures": [{"temperature": 0.0}]}, "rows": rows}


def test_intervals_worked_by_hand(tmp_path: Path) -> None:
    """Catches the normal's quantile in place of Student's, a deviation that is not divided
    by the seeds, and differences that are not taken seed by seed.
    """
    (tmp_path / "report.json").write_text(json.dumps(report({"paper": [2.0, 3.0, 4.0], "ours": [2.2, 3.3, 4.4]})))
    assert status(seeds.main, tmp_path) == 0
    paper, ours = json.loads((tmp_path / "seeds.json").read_text())["rows"]
    assert paper["tau"] == 3.0 and paper["over"] == {}
    assert paper["tau_ci"] == pytest.approx([3 - 4.303 / 3**0.5, 3 + 4.303 / 3**0.5])
    assert ours["over"]["paper"]["percent"] == pytest.approx(10)
    assert ours["over"]["paper"]["percent_ci"] == pytest.approx([10, 10])
    line = "| ours | 0 | 2.20 | 3.30 | 4.40 | 3.30 [0.57, 6.03] | +10.0% [+10.0, +10.0] |"
    assert line in (tmp_path / "seeds.md").read_text()


def test_over_what_has_no_seeds() -> None:
    """Catches an untrained model that is compared with the first seed alone, and a name that no row has."""
    (row,) = seeds.compare(report({"ours": [2.0, 3.0]}), ["plain"])
    assert row["over"]["plain"]["percent"] == pytest.approx(150)
    with pytest.raises(ValueError, match="--over .'plane'. is no entry"):
        seeds.compare(report({"ours": [2.0, 3.0]}), ["plane"])


@pytest.mark.parametrize("taus", [{}, {"one": [2.0]}, {"three": [1.0, 2.0, 3.0], "two": [1.0, 2.0]}])
def test_what_has_no_seeds_is_refused(taus: dict[str, list[float]]) -> None:
    """Catches an interval of one run, and seeds that are paired with none."""
    with pytest.raises(ValueError, match=r"grid: \{checkpoint"):
        seeds.compare(report(taus), [])
