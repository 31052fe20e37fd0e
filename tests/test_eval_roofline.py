"""python -m eval.roofline: a whole run at a tiny shape, the arithmetic of its ratios, and what it refuses."""

import json
from pathlib import Path

import pytest
from programs import status

from eval import roofline
from eval.rooflines import shapes
from eval.rooflines.parts import add_ratios, scaled

SMALL = ["context=24", "new_tokens=12", "rounds=1", "rows=[1,3]", "dtype=float32", "threads=1"]


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(shapes.LLAMAS, "llama-tiny", (32, 48, 3, 4, 2, 61))
    monkeypatch.setattr("eval.rooflines.parts.COPIED", {"cpu": 1 << 16, "cuda": 1 << 16})
    return "llama-tiny"


def test_a_whole_run(tiny_shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a figure left out, one without the replay mark, and JSON that is none."""
    out = tmp_path / "results"
    assert status(roofline.main, "--shape", tiny_shape, *SMALL, f"out={out}", "batches=[1,2]") == 0
    found = json.loads((out / "roofline-llama-tiny.json").read_text())
    rows = {row["method"]: row for row in found["rows"]}
    eagle = ["EAGLE chain, replay", "EAGLE static tree, replay"]
    expected = ["plain decoding", *eagle, "plain decoding, batch 2", *(f"{name}, batch 2" for name in eagle)]
    assert list(rows) == [*expected, "Kangaroo, exit 2, replay", "stock generate"]
    assert all(row["tokens_per_second"] > 0 and row["speedup"] > 0 for row in rows.values())
    assert rows["plain decoding"]["speedup"] == 1.0 and rows["plain decoding"]["tau"] == 1.0
    assert all(rows[name]["limit_share"] > 0 for name in rows if "replay" in name)
    weights = 3 * (32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48 + 2 * 32) + 32 + 61 * 32
    assert found["bytes_per_step"] == {"weights": 4 * weights, "cache": 24 * 3 * 2 * 16 * 4}
    assert [row["rows"] for row in found["verification_seconds"]] == [1, 3]
    page = (out / "roofline-llama-tiny.md").read_text()
    assert "REPLAY" in page and page.count("replay") >= 5
    assert "roofline-llama-tiny.json" in capsys.readouterr().out


def test_quantised(tiny_shape: str, tmp_path: Path) -> None:
    """Catches bytes of the floor counted as if nothing were quantised, and stock generate run on emptied layers."""
    assert status(roofline.main, "--shape", tiny_shape, *SMALL, f"out={tmp_path}", "batches=[1]", "quantize=int8") == 0
    found = json.loads((tmp_path / "roofline-llama-tiny-int8.json").read_text())
    assert not any("stock" in row["method"] for row in found["rows"])
    layers = 3 * (32 * 32 * 2 + 2 * 16 * 32 + 3 * 32 * 48)
    assert found["bytes_per_step"]["weights"] < 1.2 * layers + 4 * (61 * 32 + 7 * 32) + 4 * 3 * (64 + 32 + 96 + 32)


def test_ratios_by_hand() -> None:
    """Catches a speedup over another batch's plain decoding, and the formula upside down."""
    rows = [
        {"method": "plain decoding", "batch": 1, "tau": 1.0, "tokens_per_second": 100.0, "forward_seconds": 0.009},
        {"method": "X, replay", "batch": 1, "tau": 3.0, "tokens_per_second": 200.0, "forward_seconds": 0.0135},
        {"method": "plain decoding, batch 2", "batch": 2, "tau": 1.0, "tokens_per_second": 160.0},
        {"method": "X, replay, batch 2", "batch": 2, "tau": 3.0, "tokens_per_second": 200.0},
    ]
    plain, replayed, _, double = add_ratios(rows, floor=0.004)
    assert plain["roofline_share"] == pytest.approx(0.4)
    assert replayed["speedup"] == 2.0 and replayed["limit"] == pytest.approx(2.0)
    assert replayed["limit_share"] == pytest.approx(1.0) and double["speedup"] == 1.25


@pytest.mark.parametrize("tau", [1.5, 2.94, 3.94, 4.8])
def test_profiles_are_scaled_to_a_tau(tau: float) -> None:
    """Catches a power applied to the product instead of to each rate."""
    rates = scaled([0.79, 0.74, 0.72, 0.73, 0.67], 5, tau)
    total, reach = 1.0, 1.0
    for rate in rates:
        reach *= rate
        total += reach
    assert total == pytest.approx(tau, abs=1e-4)
    with pytest.raises(ValueError, match="no power"):
        scaled([0.5], 3, 4.5)
