"""train/eagle.py and the loop: what is trained, by how many ranks, and what is refused before."""

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from safetensors.torch import load_file

from drafters import TargetModel, generate, load_drafter, make_drafter
from drafters.config import load_config, validate
from drafters.heads.eagle.module import EagleHead
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.hub.checkpoint import load_checkpoint, make_config, save_checkpoint
from train import eagle
from train.data.packing import Span
from train.eagle import EagleConfig
from train.run import limits
from train.run.files import read_metrics
from train.run.loop import TrainingDiverged


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(out) if "loss" in row]


@pytest.fixture(scope="module")
def reference(target: TargetModel, features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of six float32 steps on one rank, without accumulation."""
    out = tmp_path_factory.mktemp("reference") / "run"
    tiny_run.train_here("eagle", tiny_run.settings(target.name, features, out))
    return out


def assert_same_training(out: Path, reference: Path, tolerance: float = 1e-5) -> None:
    assert losses(out) == pytest.approx(losses(reference), rel=tolerance)
    # Adam does not feel a gradient that is too large throughout; its norm tells.
    norms = [[row["grad_norm"] for row in read_metrics(folder) if "loss" in row] for folder in (out, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    ours, theirs = load_file(out / "model.safetensors"), load_file(reference / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():  # exported in bf16: 8 bits
        torch.testing.assert_close(value.float(), theirs[name].float(), rtol=0.02, atol=1e-3)


def test_it_learns_and_leaves_a_drafter(settings: dict[str, Any], target: TargetModel) -> None:
    """Gradients that do not reach the head; an export that does not load, or says nothing of its training."""
    out = Path(settings["out"])
    more = {"steps": 60, "eval_every": 30, "warmup_steps": 5}
    run, _, drafter = tiny_run.learned("eagle", settings | more, target, 0.8)
    rows = read_metrics(out)
    assert len(losses(out)) == 60
    evaluations = [row for row in rows if "heldout_loss" in row]
    assert [row["step"] for row in evaluations] == [0, 30, 60]
    assert "heldout_0-alpha" in evaluations[-1]
    assert list((out / "tensorboard").iterdir())
    state = run.engine.module.state_dict()
    for name, value in drafter.module.state_dict().items():
        torch.testing.assert_close(value, state[name].bfloat16().to(value.dtype), rtol=0, atol=0)
    saved = json.loads((out / "config.json").read_text())
    assert saved["drafter_type"] == "eagle"
    assert saved["training"]["steps"] == 60
    assert saved["training"]["tokens"] == rows[-2]["tokens"]
    assert saved["training"]["config"]["learning_rate"] == 0.01


def test_it_starts_from_a_trained_drafter(settings: dict[str, Any], target: TargetModel, tmp_path: Path) -> None:
    """Catches weights that are read and not used, a --resume that begins again with them, and a drafter of another
    shape or method that is found out after an hour (the dry run must tell)."""
    torch.manual_seed(5)
    head = EagleHead(target.config)
    trained = tmp_path / "trained"
    save_checkpoint(trained, head, make_config("eagle", {}, target))
    values = {**settings, "init_from": str(trained), "learning_rate": 1e-9, "steps": 1}
    tiny_run.train_here("eagle", values)
    out = Path(settings["out"])
    for name, weights in load_checkpoint(str(out))[1].items():
        assert torch.equal(weights, head.state_dict()[name].bfloat16()), name
    tiny_run.train_here(
        "eagle", {**values, "learning_rate": 0.1, "out": str(tmp_path / "b"), "steps": 2, "save_every": 2}
    )
    huge = {name: 1e30 * weights for name, weights in head.state_dict().items()}  # a resumed run reads none of them
    save_checkpoint(trained, huge, make_config("eagle", {}, target))
    tiny_run.train_here("eagle", {**values, "learning_rate": 0.1, "out": str(tmp_path / "b"), "steps": 3}, resume=True)
    (trained / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="trained"):
        tiny_run.train_here("eagle", {**values, "out": str(tmp_path / "c")})
    save_checkpoint(
        tmp_path / "other",
        KangarooAdapter(target.config, KangarooShape(exit_layer=1)),
        make_config("kangaroo", {}, target),
    )
    with pytest.raises(ValueError, match="init_from: .*other holds a drafter of type 'kangaroo'.*trains 'eagle'"):
        tiny_run.train_here("eagle", {**values, "out": str(tmp_path / "c"), "init_from": str(tmp_path / "other")})


@pytest.mark.parametrize("inputs", ["feature+unshifted_token", "token", "feature"])
def test_other_inputs(settings: dict[str, Any], target: TargetModel, inputs: str) -> None:
    """A head that is saved as one of other inputs, or steps of tokens alone that are trained over and over."""
    tiny_run.train_here("eagle", {**settings, "inputs": inputs, "steps": 2})
    assert losses(Path(settings["out"]))[0] > 0
    drafter = load_drafter(settings["out"], target)
    assert drafter.module.shape.inputs == inputs
    with pytest.raises(ValueError, match=f"inputs: {re.escape(inputs)}, and .* set head.inputs=.*, or"):
        tiny_run.train_here("eagle", {**settings, "init_from": settings["out"], "out": f"{settings['out']}-other"})
    if inputs == "token":
        with pytest.raises(ValueError, match=r"unroll: 2 feeds .*inputs: token has none; set unroll=1"):
            validate(EagleConfig, {**settings, "inputs": inputs, "unroll": 2}, source="test")


def test_a_head_gets_a_layer_that_engines_serve(target: TargetModel, features: Path, tmp_path: Path) -> None:
    """Catches a head for Qwen3 that trains for hours and that no engine takes, an older one that does not load any
    more, and training that goes on from weights of another kind of layer."""
    own = tiny_run.save_target(tmp_path / "qwen3", "qwen3")
    stores = tiny_run.write_stores(tmp_path / "features", own)
    values = tiny_run.settings(own.name, stores, tmp_path / "new", steps=2)
    tiny_run.train_here("eagle", values)
    assert load_checkpoint(str(tmp_path / "new"))[0]["drafter"] == {"layer": "llama"}
    config = json.loads((tmp_path / "new" / "run.json").read_text())["config"]
    assert config["head"]["layer"] == "llama"  # what auto came to
    plain = generate(own, make_drafter("autoregressive", own), [[5, 6, 7, 8]], max_new_tokens=8).tokens
    # A checkpoint from before there was a choice: of the target's layer, with norms of q and k.
    old = EagleHead(own.config)
    save_checkpoint(tmp_path / "old", old, make_config("eagle", {}, own))
    for name, layer in (("new", "llama"), ("old", "target")):
        drafter: Any = load_drafter(str(tmp_path / name), own)
        assert drafter.module.shape.layer == layer and hasattr(drafter.module.layers[0].self_attn, "q_norm") == (
            name == "old"
        )
        assert torch.equal(generate(own, drafter, [[5, 6, 7, 8]], max_new_tokens=8).tokens, plain)
        drafter.save_pretrained(tmp_path / f"{name}-again")
        assert load_checkpoint(str(tmp_path / f"{name}-again"))[0]["drafter"]["layer"] == layer
    further = {**values, "out": str(tmp_path / "further"), "init_from": str(tmp_path / "old")}
    with pytest.raises(ValueError, match="layer: target, and this trains one with layer: llama; set head.layer=target"):
        tiny_run.train_here("eagle", further)
    tiny_run.train_here("eagle", {**further, "layer": "target"})
    assert load_checkpoint(str(tmp_path / "further"))[0]["drafter"] == {"layer": "target"}
    tiny_run.train_here("eagle", tiny_run.settings(target.name, features, tmp_path / "llama", steps=1))
    assert load_checkpoint(str(tmp_path / "llama"))[0]["drafter"] == {"layer": "target"}


def test_learning_rate_and_clipping(settings: dict[str, Any]) -> None:
    """A schedule that is a step off, that ends above zero, or a clip that is not applied."""
    out = Path(settings["out"])
    changes = {"steps": 8, "warmup_steps": 4, "schedule": "linear", "gradient_clipping": 0.001, "learning_rate": 1.0}
    tiny_run.train_here("eagle", {**settings, **changes})
    rates = [row["learning_rate"] for row in read_metrics(out) if "loss" in row]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert all(row["grad_norm"] > 0.1 for row in read_metrics(out) if "loss" in row)  # as it was before clipping


def test_accumulation_equals_one_big_batch(settings: dict[str, Any], reference: Path) -> None:
    """Micro-batches averaged with equal weight although their answers differ in length, or divided by twice."""
    tiny_run.train_here("eagle", {**settings, "gradient_accumulation": 3})
    assert_same_training(Path(settings["out"]), reference)


def test_every_epoch_has_its_own_noise(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same noise on the same dialogue in every epoch, which the head would learn by heart."""
    seeds, noise = [], eagle.feature_noise

    def noted(features: torch.Tensor, spans: list[Span], kind: Any, seed: int) -> torch.Tensor:
        seeds.append(seed)
        return noise(features, spans, kind, seed)

    monkeypatch.setattr(eagle, "feature_noise", noted)
    run = tiny_run.train_here("eagle", {**settings, "noise": "paper", "steps": 9})
    assert run.progress.epoch > 1 and len(set(seeds)) >= run.progress.epoch


@pytest.mark.long
def test_two_ranks_equal_one(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of ranks' means instead of the mean over all tokens; ranks on the same data; a start that compiles."""
    settings = {**settings, "steps": 20, "learning_rate": 0.003, "schedule": "constant", "heldout_tokens": 20}
    alone = {**settings, "out": str(tmp_path / "alone")}
    tiny_run.train_here("eagle", alone)
    extensions = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    done = tiny_run.launch(2, tiny_run.command("eagle", tmp_path, settings))  # by DeepSpeed's launcher
    assert done.returncode == 0, done.stderr
    out = Path(settings["out"])
    assert len(losses(out)) == 20
    assert losses(out) == pytest.approx(losses(tmp_path / "alone"), rel=2e-4)  # Adam's division enlarges last digits
    assert losses(out)[:4] == pytest.approx(losses(tmp_path / "alone")[:4], rel=1e-6)
    assert json.loads((out / "run.json").read_text())["ranks"] == 2
    assert not extensions.exists()


def test_bf16_keeps_float32_masters_and_rotary_frequencies(settings: dict[str, Any], reference: Path) -> None:
    """Positions rounded with the weights (bf16 knows no position past 256 exactly), or updates lost in bf16."""
    run = tiny_run.train_here("eagle", {**settings, "precision": "bf16"})
    assert run.engine.module.fc.weight.dtype == torch.bfloat16
    frequencies = run.engine.module.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert not torch.equal(frequencies, frequencies.bfloat16().float())
    assert losses(Path(settings["out"])) == pytest.approx(losses(reference), rel=0.08)


def test_a_loss_that_is_not_finite_stops_the_run(settings: dict[str, Any]) -> None:
    """Hours of training on NaN, or a NaN written over the last good checkpoint."""
    out = Path(settings["out"])
    values = {
        **settings,
        "steps": 30,
        "learning_rate": 1e30,
        "warmup_steps": 0,
        "schedule": "constant",
        "save_every": 1,
    }
    with pytest.raises(TrainingDiverged, match=r"step \d+: .*(nan|inf).*learning_rate \(now 1e\+30\)") as error:
        tiny_run.train_here("eagle", values)
    latest = (out / "state" / "latest").read_text().strip()
    assert f"the last good state is {out / 'state' / latest}" in str(error.value)
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        assert all(
            value.isfinite().all() for value in load_file(out / "state" / latest / f"{kind}.safetensors").values()
        )
    assert not (out / "model.safetensors").exists()


def test_minutes_end_a_run_in_order(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit that is ignored, that leaves no drafter, or that never lets the learning rate fall."""
    ticks = itertools.count()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 0.05 * next(ticks)))  # a regular clock
    out = Path(settings["out"])
    tiny_run.train_here("eagle", {**settings, "steps": None, "minutes": 0.1, "schedule": "cosine"})
    rates = [row["learning_rate"] for row in read_metrics(out) if "loss" in row]
    assert 10 < len(rates) < 120
    assert rates[1:] == sorted(rates[1:], reverse=True)
    assert rates[-1] < 0.05 * max(rates)
    assert (out / "model.safetensors").is_file()


def test_a_store_of_another_target_is_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """Hours of training on features of another fine-tune, of the same shape."""
    other = tmp_path / "other"
    tiny.build("llama", seed=7).save_pretrained(other)
    with pytest.raises(
        ValueError, match=r"was made with target .*target'.* the config says target: .*other'.*fingerprint"
    ):
        tiny_run.train_here("eagle", {**settings, "target": str(other)})
    wider = tmp_path / "wider"
    tiny.build("llama", vocab_size=101).save_pretrained(wider)
    with pytest.raises(ValueError, match=r"vocabulary 97 against 101.*make the features again"):
        tiny_run.train_here("eagle", {**settings, "target": str(wider)})
    assert not Path(settings["out"]).exists()


def test_bad_input_is_refused_before_anything_starts(settings: dict[str, Any], tmp_path: Path) -> None:
    """A misspelt key that is ignored, a run without an end, a missing store, or a run folder that two runs share."""
    file = tmp_path / "run.yaml"
    tiny_run.command("eagle", tmp_path, settings)
    with pytest.raises(ValueError, match="unknown key 'learning_rat'; did you mean 'learning_rate'"):
        load_config(EagleConfig, file, ["learning_rat=1"])
    with pytest.raises(ValueError, match="set steps, epochs or minutes"):
        load_config(EagleConfig, file, ["steps=null"])
    with pytest.raises(ValueError, match=r"no feature store at .*nowhere"):
        tiny_run.train_here("eagle", {**settings, "features": str(tmp_path / "nowhere")})
    with pytest.raises(ValueError, match="--resume: there is no run at .*; start without"):
        tiny_run.train_here("eagle", settings, resume=True)
    out = Path(settings["out"])
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty and holds no state to resume: empty it"):
        tiny_run.train_here("eagle", settings)
    (out / "state").mkdir()
    (out / "state" / "latest").write_text("step-00000001")
    (out / "run.json").write_text('{"drafter": "eagle", "config": {}}')
    with pytest.raises(ValueError, match=r"is not empty: pass --resume .* or another out="):
        tiny_run.train_here("eagle", settings)
