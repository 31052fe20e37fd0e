"""``init_from`` with a head whose layers have other heads, MLP and RoPE than the target's."""

from pathlib import Path
from typing import Any

import pytest
import test_block_layouts
import test_eagle3_layouts
import tiny_run
import torch

from drafters import TargetModel, generate, load_drafter
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import export
from train.preflight.dry_run import dry_run

THETA, WIDTH = 500.0, 12
ROPE = {"rope_type": "default", "rope_theta": THETA}
SHAPE = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": WIDTH, "intermediate_size": 40}
BLOCK: dict[str, Any] = {"block_size": 5, "mask_token_id": 2, "layers": 1}


def imported(kind: str, target: TargetModel, folder: Path, shape: dict[str, Any]) -> str:
    """A head of this shape, as it comes back from vLLM's form."""
    options: dict[str, Any] = {"taps": [tiny_run.TAP], "shape": shape}
    if kind == "eagle3":
        test_eagle3_layouts.save_head(folder / "head", target, **options)
    else:
        layout = "anchor-first" if kind == "dspark" else "fill-in"
        test_block_layouts.save_head(folder / "head", kind, target, layout=layout, **BLOCK, **options)
    export(str(folder / "head"), "vllm", folder / "theirs")
    convert(str(folder / "theirs"), target.name, folder / "imported")
    return str(folder / "imported")


@pytest.mark.parametrize("shape", [{"rope_parameters": ROPE}, SHAPE | {"rope_parameters": ROPE}])
@pytest.mark.parametrize("kind", ["dflash", "dspark", "eagle3"])
def test_a_head_of_another_shape_to_begin_with(
    settings: dict[str, Any], target: TargetModel, tmp_path: Path, kind: str, shape: dict[str, Any]
) -> None:
    """Catches an imported head that trains with the target's RoPE, which no weight shows, or that cannot be trained; a
    checkpoint, a resumed run or a dry run without its shape."""
    start = imported(kind, target, tmp_path, shape)
    values = settings | {"init_from": start, "tap_layers": [tiny_run.TAP]}
    values |= {"ttt_steps": 2} if kind == "eagle3" else BLOCK
    values |= {"markov_rank": 8} if kind == "dspark" else {}
    config, weights = load_checkpoint(start)
    assert config["drafter"]["shape"] == shape
    report = dry_run(tiny_run.read(kind, values | {"steps": 2}), tiny_run.arguments())
    count = sum(value.numel() for name, value in weights.items() if name != "d2t")
    assert not report.problems and f"{count:,} parameters" in report.text()
    tiny_run.train_here(kind, values | {"steps": 1})
    run: Any = tiny_run.train_here(kind, values | {"steps": 2}, resume=True)
    assert load_checkpoint(values["out"])[0]["drafter"]["shape"] == shape
    drafter: Any = load_drafter(values["out"], target, tree="chain")
    width = shape.get("head_dim", target.config.head_dim)
    turns = THETA ** -(torch.arange(0, width, 2) / width)
    for module in (run.task.module, drafter.module):
        torch.testing.assert_close(module.rotary_emb.inv_freq, turns)
        assert module.config.rope_parameters["rope_theta"] == THETA  # what decoding reads
    assert generate(target, drafter, [[5, 6, 7, 8]], max_new_tokens=6).tokens.shape == (1, 6)


def test_a_dry_run_without_the_head(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches a report that ends in the middle because init_from is not there."""
    values = settings | BLOCK | {"tap_layers": [tiny_run.TAP], "init_from": str(tmp_path / "none")}
    report = dry_run(tiny_run.read("dflash", values), tiny_run.arguments())
    (problem,) = report.problems
    assert problem.startswith("drafter: init_from: no drafter") and "the run cannot start like this" in report.text()
