"""`python -m eval.batch_cost` on a tiny target: what is fed, and what becomes of the readings."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from programs import status
from transformers import PreTrainedModel

import eval.batch_cost
from drafters import TargetModel
from drafters.common.energy import EnergyMeter
from eval.configs import BatchCostConfig
from eval.rooflines.batch_cost import Block, measure, row_of


def config_for(path: Path, out: Path, **changes: Any) -> dict[str, Any]:
    return {
        "target": {"path": str(path), "dtype": "float32", "device": "cpu"},
        "out": str(out),
        "batches": [1, 3],
        "context": 9,
        "runs": 2,
        "blocks": 3,
        "warmup": 1,
        **changes,
    }


def run(config: dict[str, Any], folder: Path) -> int:
    path = folder / "cost.yaml"
    path.write_text(yaml.safe_dump(config))
    return status(eval.batch_cost.main, "--config", path)


def test_both_files_are_written(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Catches a batch size left out, per-input figures that are per run, and energy made up where none is measured."""
    assert run(config_for(tiny_checkpoint("llama"), tmp_path / "out"), tmp_path) == 0
    found = json.loads((tmp_path / "out" / "batch_cost.json").read_text())
    assert [row["batch"] for row in found["rows"]] == [1, 3]
    for row in found["rows"]:
        assert row["seconds_per_run"] == pytest.approx(sorted(row["seconds_of_blocks"])[1] / 2)
        assert row["seconds_per_input"] == pytest.approx(row["seconds_per_run"] / row["batch"])
    assert found["environment"]["target"]["parameters"] > 0
    page = (tmp_path / "out" / "batch_cost.md").read_text()
    assert "| batch size | ms/run |" in page
    assert "energy: " in page


def test_every_forward_is_the_same_token_after_the_same_context(
    tiny_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a context that grows from run to run, an empty one, and rows that see another row's context."""
    target = TargetModel(tiny_model("llama"))
    seen: list[tuple[torch.Tensor, list[int], torch.Tensor]] = []
    plain = target.run

    def noted(tokens: torch.Tensor, cache: Any, **options: Any) -> Any:
        output = plain(tokens, cache, **options)
        if tokens.shape[1] == 1:
            seen.append((tokens, list(cache.lengths), output.features))
        return output

    drawn: list[torch.Tensor] = []
    draw = torch.randint

    def remembered(*arguments: Any, **options: Any) -> torch.Tensor:
        drawn.append(draw(*arguments, **options))
        return drawn[-1]

    monkeypatch.setattr(target, "run", noted)
    monkeypatch.setattr(torch, "randint", remembered)
    config = BatchCostConfig(**config_for(tmp_path, tmp_path / "out"))
    blocks = measure(target, config, EnergyMeter(target.device))
    assert Counter(block.batch for block in blocks) == {1: 3, 3: 3}
    assert [block.batch for block in blocks] != [1, 1, 1, 3, 3, 3]
    assert Counter(len(tokens) for tokens, _, _ in seen) == {1: 1 + 3 * 2, 3: 1 + 3 * 2}
    for tokens, lengths, features in seen:
        ids = next(ids for ids in drawn if len(ids) == len(tokens))
        assert lengths == [9] * len(ids)
        expected = target.features(ids).features[:, -1:]
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)


def test_medians_are_of_blocks_and_a_missing_reading_is_not_zero() -> None:
    """Catches best-of, means, and an energy made of the blocks that happened to have one; by hand."""
    blocks = [Block(4, 8.0, 80.0, 1.0), Block(4, 2.0, 20.0, None), Block(4, 4.0, 60.0, 1.0)]
    row = row_of(4, blocks, runs=10)
    assert (row["seconds_per_run"], row["seconds_per_input"]) == (0.4, 0.1)
    assert (row["joules_per_run"], row["joules_per_input"]) == (6.0, 1.5)
    assert (row["host_joules_per_run"], row["host_joules_per_input"]) == (None, None)
