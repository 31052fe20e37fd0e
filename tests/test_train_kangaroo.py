"""train/kangaroo.py: what is its own; the loop is tested with EAGLE."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from drafters import TargetModel, load_drafter
from train.run.files import read_metrics
from train.watch.flops import row_flops


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return tiny_run.save_target(tmp_path_factory.mktemp("target") / "target", "qwen3")


@pytest.fixture(scope="module")
def features(target: TargetModel) -> Path:
    return tiny_run.write_stores(Path(target.name).with_name("features"), target)


@pytest.fixture
def settings(target: TargetModel, features: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run.settings(target.name, features, tmp_path / "run", exit_layer=tiny_run.TAP)


def test_it_learns_and_leaves_a_drafter(settings: dict[str, Any], target: TargetModel) -> None:
    """The adapter trained on other states than it reads when drafting, or an export without its exit layer."""
    more = {"steps": 60, "warmup_steps": 5, "precision": "bf16"}
    _, _, drafter = tiny_run.learned("kangaroo", settings | more, target, 0.9)
    out = Path(settings["out"])
    rows = read_metrics(out)
    assert 0 < rows[-1]["heldout_expected_acceptance"] < 1
    assert 0 <= rows[-1]["heldout_top1_agreement"] <= 1
    assert json.loads((out / "config.json").read_text())["drafter"]["exit_layer"] == tiny_run.TAP
    assert drafter.taps == (tiny_run.TAP,)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_an_lm_head_of_its_own(settings: dict[str, Any], target: TargetModel, precision: str) -> None:
    """Catches one that is not trained, not saved, or not drafted with; one that starts elsewhere than at the target's;
    held-out figures of the target's in its place."""
    out, own = Path(settings["out"]), target.model.get_output_embeddings().weight.detach()
    run = tiny_run.train_here("kangaroo", settings | {"own_lm_head": True, "steps": 2, "precision": precision})
    head = run.task.module.lm_head.weight.detach()
    moved = (head - own.to(head.dtype)).abs()
    assert 1e-4 < moved.mean() < 0.1
    drafter = load_drafter(str(out), target)
    assert torch.equal(drafter.module.lm_head.weight, head.bfloat16().float())  # the export is in bf16
    states = torch.randn(3, target.hidden_size)
    torch.testing.assert_close(drafter.lm_head(states), states @ drafter.module.lm_head.weight.T)
    assert run.task.heads.drafter_heads == [run.task.module.lm_head]
    assert row_flops(run.task) == 4 * 2 * own.numel()
    drafter.save_pretrained(out / "again")
    assert load_drafter(str(out / "again"), target).module.shape.own_lm_head
    for changes in ({"zero_stage": 3}, {"lora": {}, "init_from": "x"}):
        with pytest.raises(ValueError, match="split the adapter's own LM head|trains its own; leave lora"):
            tiny_run.read("kangaroo", settings | {"own_lm_head": True} | changes)


def test_a_store_without_the_exit_layer_is_refused(settings: dict[str, Any]) -> None:
    """A KeyError in the first step instead of the fix; an exit layer that the target does not have."""
    lacking = (
        r"lacks output of layer 0 = hidden_states\[1\] \(tap 1\); it has the taps \[2\].*'exit_layers=\[1, 2\]' out="
    )
    with pytest.raises(ValueError, match=lacking):
        tiny_run.train_here("kangaroo", {**settings, "exit_layer": 1})
    with pytest.raises(ValueError, match="kangaroo reads tap 4, the state after 4 layers, and .* has 4 layers"):
        tiny_run.train_here("kangaroo", {**settings, "exit_layer": 4})
