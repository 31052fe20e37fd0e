"""python -m data_prep.throughput: both sides do the same work, and nothing stays behind."""

import json

import pytest
from test_features import write_config

from data_prep import throughput
from data_prep.extraction import throughput as measuring
from drafters.model.target import TargetModel


def test_both_sides_run_the_same_batches(
    tmp_path,
    target_folder,  # noqa: F811
    monkeypatch,
    capsys,
):
    """Catches a dump flattered by larger batches than the bare target's, a side that always goes first, and litter."""
    config = write_config(tmp_path, target_folder, count=30)
    shapes: list[tuple[int, ...]] = []
    order: list[str] = []
    exact, bare, written = TargetModel.features, measuring.bare_pass, measuring.write_store

    def features_of(self, ids, lengths, taps):
        shapes.append((*ids.shape, *taps))
        return exact(self, ids, lengths, taps)

    def noted(name, call):
        return lambda *arguments, **options: (order.append(f"{name} {len(shapes)}"), call(*arguments, **options))[1]

    monkeypatch.setattr(TargetModel, "features", features_of)
    monkeypatch.setattr(measuring, "bare_pass", noted("bare", bare))
    monkeypatch.setattr(measuring, "write_store", noted("dump", written))
    out = tmp_path / "result" / "throughput.json"
    throughput.main(["--config", str(config), "--split", "train", "--rounds", "2", "--out", str(out), "limit=20"])
    assert [entry.split()[0] for entry in order] == ["bare", "bare", "dump", "dump", "bare"]
    starts = [int(entry.split()[1]) for entry in order[1:]] + [len(shapes)]
    passes = [shapes[start:end] for start, end in zip(starts, starts[1:], strict=False)]
    assert len(passes[0]) > 2 and all(each == passes[0] for each in passes)
    result = json.loads(out.read_text())
    real = sum(rows * length for rows, length, _ in passes[0]) * (1 - result["padding"])
    assert result["dialogues"] == 20 and result["tokens"] == pytest.approx(real)
    assert [len(result[name]) for name in ("bare_seconds", "dump_seconds", "ratios")] == [2, 2, 2]
    speed = result["tokens"] / result["dump_seconds"][0]
    assert result["ratios"][0] == pytest.approx(result["bare_seconds"][0] * speed / result["tokens"])
    assert result["environment"]["target"]["fingerprint"] and result["config"]["limit"] == 20
    assert "bare target" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "features.yaml",
        "heldout.jsonl",
        "result",
        "train.jsonl",
    ]
