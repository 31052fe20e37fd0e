"""``lora:`` of a learned drafter's training: adapters of a trained head, and how they are merged and refused."""

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny_run
import torch
from safetensors.torch import load_file

from drafters import TargetModel, generate, load_drafter, make_drafter
from drafters.heads.eagle.module import EagleHead
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.hub.checkpoint import WEIGHTS_FILE, load_checkpoint, make_config, save_checkpoint
from drafters.layouts.export import check, export
from train.core.weights import exported
from train.run.files import read_metrics
from train.run.training import finished_at


@pytest.fixture(scope="module")
def head(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("head") / "base"
    save_checkpoint(folder, EagleHead(target.config), make_config("eagle", {"tree": "chain", "depth": 3}, target))
    return folder


@pytest.fixture(scope="module")
def trained(target: TargetModel, features: Path, head: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that has left an adapter."""
    out = tmp_path_factory.mktemp("adapter") / "run"
    lora = {"r": 4, "alpha": 12}
    changes = {"steps": 30, "init_from": str(head), "lora": lora, "batch_tokens": 128}
    return tiny_run.train_here("eagle", tiny_run.settings(target.name, features, out, **changes))


@pytest.fixture
def settings(target: TargetModel, features: Path, head: Path, tmp_path: Path) -> dict[str, Any]:
    return tiny_run.settings(target.name, features, tmp_path / "run", init_from=str(head), lora={"r": 2})


@torch.no_grad()
def test_an_adapter_is_trained_and_merged(trained: Any, head: Path, target: TargetModel, tmp_path: Path) -> None:
    """Catches an adapter of untrained matrices, one that peft does not load, a merge of another scale or into nothing,
    a state with the frozen head in it, a finished run that is not seen as one, and options that are lost."""
    out, config = trained.config.out, trained.config
    course = [row["heldout_loss"] for row in read_metrics(out) if "heldout_loss" in row]
    assert course[-1] < 0.95 * course[0]
    state = load_file(out / "state" / "step-00000030" / "weights.safetensors")
    assert state and all("lora_" in name for name in state)
    assert not (out / "model.safetensors").exists() and not (out / ".export").exists()
    assert finished_at(config, trained.inputs.train) == 30
    bare = EagleHead(target.config)
    bare.load_state_dict(load_checkpoint(head)[1])
    inputs = torch.randn(1, 9, target.hidden_size), torch.randn(1, 9, target.hidden_size), torch.arange(9)[None]
    before = bare(*inputs)
    expected = peft.PeftModel.from_pretrained(bare, str(out))(*inputs)
    assert (expected - before).abs().max() > 0.1 * before.abs().max()
    plain = generate(target, make_drafter("autoregressive", target), [[5, 6, 7]], max_new_tokens=12).tokens[0]
    for drafter in (
        load_drafter(str(out), target),
        make_drafter("eagle", target, checkpoint=str(head), adapter=str(out)),
    ):
        torch.testing.assert_close(drafter.module(*inputs), expected, rtol=1e-3, atol=1e-3)
        assert (drafter.settings.tree, drafter.shaper.depth) == ("chain", 3)  # the base's
        assert torch.equal(generate(target, drafter, [[5, 6, 7]], max_new_tokens=12).tokens[0], plain)
    weights = {name: value.detach().clone() for name, value in trained.task.module.state_dict().items()}
    for name, value in exported(trained.task, weights)[0].items():  # what tau is measured with
        torch.testing.assert_close(value, drafter.module.state_dict()[name], rtol=1e-5, atol=1e-5)
    drafter.save_pretrained(tmp_path / "whole")
    assert load_drafter(str(tmp_path / "whole"), target).module.fc.weight.dtype == target.dtype
    export(str(out), "vllm", tmp_path / "vllm")  # merged
    assert check(tmp_path / "vllm", "vllm", target.name).endswith(f"float32, for {target.name}")
    export(str(head), "vllm", tmp_path / "both", adapter=str(out))
    assert (tmp_path / "both" / WEIGHTS_FILE).read_bytes() == (tmp_path / "vllm" / WEIGHTS_FILE).read_bytes()
    torch.testing.assert_close(
        load_file(tmp_path / "vllm" / "model.safetensors")["fc.weight"], drafter.module.fc.weight
    )


def test_a_resumed_adapter_is_the_same(settings: dict[str, Any], head: Path, tmp_path: Path) -> None:
    """Catches a resumed run with random weights beneath the LoRA, or with those of another head, and a state that does
    not fit."""
    shutil.copytree(head, tmp_path / "base")
    values = settings | {"init_from": str(tmp_path / "base"), "save_every": 2, "weight_average": 0.9}
    tiny_run.train_here("eagle", values | {"steps": 4, "schedule": "constant", "out": str(tmp_path / "reference")})
    for steps in (2, 4):
        changes = {"steps": steps, "schedule": "constant"}
        tiny_run.train_here("eagle", values | changes, resume=steps > 2)
    one, other = (load_file(tmp_path / run / "adapter_model.safetensors") for run in ("run", "reference"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in other)
    rows = [
        [{k: v for k, v in row.items() if k not in tiny_run.TIMED} for row in read_metrics(tmp_path / run)]
        for run in ("run", "reference")
    ]
    assert [row for row in rows[0] if "loss" in row] == [row for row in rows[1] if "loss" in row]
    config, weights = load_checkpoint(head)
    save_checkpoint(tmp_path / "base", {name: value * 2 for name, value in weights.items()}, config)
    with pytest.raises(ValueError, match=r"init_from .*base' is another drafter \(fingerprint .*begun on"):
        tiny_run.train_here("eagle", values | {"steps": 6, "schedule": "constant"}, resume=True)


def test_trainings_that_are_refused(
    settings: dict[str, Any], trained: Any, target: TargetModel, tmp_path: Path
) -> None:
    """Catches hours spent on an adapter of nothing, of an adapter, or of a head of another method."""
    for changes, message in (
        ({"init_from": None}, "lora needs a trained drafter: set init_from"),
        ({"draft_vocab": 20}, "draft_vocab is 20, and with lora that of init_from stays"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_run.read("eagle", settings | changes)
    with pytest.raises(ValueError, match="a head like this trains its own; leave lora out"):
        tiny_run.read("medusa", settings | {"own_lm_heads": True})
    with pytest.raises(ValueError, match="is an adapter itself, of '.*base'; name that"):
        tiny_run.train_here("eagle", settings | {"init_from": str(trained.config.out)})
    with pytest.raises(ValueError, match="lora.targets: .*nothing_such"):
        tiny_run.train_here("eagle", settings | {"lora": {"targets": ["nothing_such"]}})
    for name in ("lm_head", "markov_w2"):
        with pytest.raises(ValueError, match=f"lora.targets: a drafter's {name} stays as it is"):
            tiny_run.train_here("eagle", settings | {"lora": {"targets": ["fc", name]}})
    save_checkpoint(
        tmp_path / "k", KangarooAdapter(target.config, KangarooShape(exit_layer=1)), make_config("kangaroo", {}, target)
    )
    with pytest.raises(ValueError, match="init_from: .*k holds a drafter of type 'kangaroo'"):
        tiny_run.train_here("eagle", settings | {"init_from": str(tmp_path / "k")})


BLOCK: dict[str, Any] = {"tap_layers": [tiny_run.TAP], "block_size": 5, "mask_token_id": 2, "layers": 1}
MORE: dict[str, dict[str, Any]] = {
    "kangaroo": {"exit_layer": tiny_run.TAP},
    "medusa": {"heads": 2},
    "dflash": BLOCK | {"draft_vocab": 60},
    "dspark": BLOCK | {"markov_rank": 8, "markov_head": "gated"},
    "eagle3": {"tap_layers": [tiny_run.TAP], "ttt_steps": 2, "draft_vocab": 60},
    "mtp": {"start": "random"},
}


@pytest.mark.parametrize("kind", MORE)
def test_other_methods_have_adapters_too(
    kind: str, settings: dict[str, Any], target: TargetModel, tmp_path: Path
) -> None:
    """Catches a task that builds its module otherwise, and trains or saves it whole; an LM head or a Markov head's W2
    that moves, or draft ids that are lost."""
    more = MORE[kind]
    base = settings | {"init_from": None, "lora": None, "steps": 1, "out": str(tmp_path / "whole")} | more
    tiny_run.train_here(kind, base)
    tiny_run.train_here(kind, settings | {"init_from": base["out"], "steps": 2} | more)
    drafter, whole = (load_drafter(str(path), target) for path in (tmp_path / "run", tmp_path / "whole"))
    ours, theirs = drafter.module.state_dict(), whole.module.state_dict()
    moved = {name for name, value in ours.items() if not torch.equal(value, theirs[name])}
    assert moved and all(theirs[name].dim() == 2 for name in moved)
    assert not moved & {"lm_head.weight", "markov_head.markov_w2.weight"}
    assert generate(target, drafter, [[5, 6, 7]], max_new_tokens=5).tokens.shape == (1, 5)
