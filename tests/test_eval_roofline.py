"""python -m eval.roofline: a whole run at a tiny shape, the arithmetic of its ratios, and what it refuses."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import status

from drafters.loop.generate import Step, Trace
from eval import roofline
from eval.rooflines import parts, shapes
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


def test_bandwidths_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches bytes that a copy writes left out, bytes of a sum counted twice, and a mean or a first run's time.

    Two runs of nine seconds warm up; the others take 0.25, 4 and 0.5 seconds, with a second between them.
    """
    device = torch.device("cpu")
    monkeypatch.setattr(parts, "COPIED", {"cpu": 1 << 10})
    for bandwidth, expected in ((parts.copy_bandwidth, 2 * 1024 / 0.5), (parts.read_bandwidth, 1024 / 0.5)):
        clock = itertools.accumulate([0.0, 9.0, 9.0, 0.25, 1.0, 4.0, 1.0, 0.5])
        monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda clock=clock: next(clock)))
        assert bandwidth(device, tries=3) == expected


def test_verification_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the time of several forwards as that of one, and one number of rows under another.

    The clock runs only in a forward: an eighth of a second for each row.
    """
    clock, sizes = [0.0], set()

    def run(ids: torch.Tensor, cache: Any) -> SimpleNamespace:
        clock[0] += 0.125 * ids.shape[1]
        sizes.add(ids.shape[1])
        return SimpleNamespace(features=ids)

    cache = SimpleNamespace(commit_first=lambda counts: None)
    target: Any = SimpleNamespace(vocab_size=9, device=torch.device("cpu"), new_cache=lambda *shape: cache, run=run)
    target.lm_head = lambda features: features
    monkeypatch.setattr(parts, "most_likely", lambda logits: logits)
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    found = parts.verification_seconds(target, 16, [1, 4], 3, 0)
    assert found == [{"rows": 1, "seconds": 0.125}, {"rows": 4, "seconds": 0.5}] and sizes == {16, 1, 4}


def test_figures_of_a_method_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a time of all steps as that of one, parts swapped, and stock generation with its prefill."""
    steps = [Step(0, 4, 2, 2, 3, 1), Step(0, 2, 2, 0, 1, 1)]
    trace = Trace(steps, [0.125, 0.375], [0.5, 0.75], [0.0625, 0.1875], [0.5, 1.0], 0.25)
    monkeypatch.setattr(parts, "generate", lambda *given, **options: SimpleNamespace(trace=trace))
    whole = 0.5 + 1.25 + 0.25
    found = parts._ours(SimpleNamespace(), SimpleNamespace(), [[1], [2]], 5)  # type: ignore[arg-type]
    assert found == {
        "batch": 2, "tau": 2.0, "tokens_per_second": 4 / whole, "step_seconds": whole / 2, "draft_seconds": 0.25,
        "verify_seconds": 0.625, "other_seconds": 0.125, "forward_seconds": 0.75, "overhead": 0.25,
        "prefill_seconds": 0.25,
    }  # fmt: skip
    clock = itertools.accumulate([0.0, 0.75, 0.0, 3.25])
    monkeypatch.setattr(parts, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    asked = []
    model = SimpleNamespace(generate=lambda ids, attention_mask, generation_config: asked.append(generation_config))
    target: Any = SimpleNamespace(device=torch.device("cpu"), model=model)
    assert parts._stock(target, [1, 2], 11, False) == {"batch": 1, "tokens_per_second": 10 / 2.5}
    assert [(one.min_new_tokens, one.max_new_tokens) for one in asked] == [(1, 1), (11, 11)]


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
