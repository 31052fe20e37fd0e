"""What a run shows of itself: tau by the real loop, figures by position, MFU, and the summary."""

import json
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from data_prep.store.reader import FeatureStore
from drafters import TargetModel, generate, load_drafter
from drafters.loop.generate import Trace
from train.core.task import Task, make_task
from train.preflight.estimate import meta_ends
from train.run import loop
from train.run.files import read_metrics
from train.watch import heldout
from train.watch.flops import training_cost
from train.watch.heldout import answer_positions
from train.watch.tau import held_out_prompts, room

TAU = {"tau_every": 3, "tau_prompts": 3, "tau_new_tokens": 12}


def untimed(out: Path) -> list[dict[str, float]]:
    """The figures of training and held-out losses alone."""
    rows = [{name: value for name, value in row.items() if name not in tiny_run.TIMED} for row in read_metrics(out)]
    return [row for row in rows if "heldout_tau" not in row]


def test_tau_does_not_touch_the_training(settings: dict[str, Any]) -> None:
    """A module frozen or cast by a drafter that was given it; random numbers drawn from the training's generators."""
    out, other = Path(settings["out"]), Path(settings["out"]).with_name("without")
    run = tiny_run.train_here("eagle", {**settings, **TAU, "keep": "last"})
    state = torch.get_rng_state()
    run._measure_tau(loop.tqdm(disable=True))
    assert torch.equal(state, torch.get_rng_state())
    tiny_run.train_here("eagle", {**settings, "out": str(other)})
    assert untimed(out) == untimed(other)
    ours, theirs = load_file(out / "model.safetensors"), load_file(other / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [row["step"] for row in read_metrics(out) if "heldout_tau" in row] == [0, 3, 6, 6]
    assert run.tau is not None
    assert run.tau._target is None  # given back


def test_tau_is_that_of_the_exported_drafter(settings: dict[str, Any], features: Path) -> None:
    """tau of stale or half-copied weights, of other prompts, or by a definition of its own."""
    out = Path(settings["out"])
    changes = {"precision": "bf16", "steps": 10, "tau_every": 100, "tau_prompts": 3, "tau_new_tokens": 40}
    tiny_run.train_here("eagle", {**settings, **changes})
    row = [row for row in read_metrics(out) if "heldout_tau" in row][-1]
    target = TargetModel.from_pretrained(settings["target"], dtype="bfloat16")
    prompts = held_out_prompts(FeatureStore.open(features / "heldout"), 3, 200)
    for name, options in (("heldout_tau", {"tree": "chain", "depth": 5}), ("heldout_tau_tree", {"tree": "dynamic"})):
        drafter = load_drafter(str(out), target, **options)
        traces = [generate(target, drafter, [prompt], max_new_tokens=40).trace for prompt in prompts]
        steps = [step for trace in traces for step in trace.steps]
        assert row[name] == pytest.approx(Trace(steps=steps).tau, rel=1e-12)
        assert row[f"{name}_by_prompt"] == pytest.approx(sum(trace.tau for trace in traces) / 3) != row[name]
        kind = "tree" if "tree" in name else "chain"
        assert row[f"heldout_{kind}_ctar_1"] == pytest.approx(Trace(steps=steps).ctar(1))
        assert row[f"heldout_{kind}_alpha_0"] == pytest.approx(Trace(steps=steps).n_alpha(0))
    assert row["heldout_tau_tree"] > 1.0  # else the assertions above would hold for any weights


def test_prompts_end_where_the_first_answer_starts(features: Path) -> None:
    """A prompt that holds a part of the answer, is empty, or does not fit into the target's context."""
    store = FeatureStore.open(features / "heldout")
    dialogues = {tuple(item.input_ids[: int(item.loss_mask.nonzero()[0])].tolist()) for item in store}
    assert {tuple(prompt) for prompt in held_out_prompts(store, 99, 200)} == dialogues
    assert len(held_out_prompts(store, 2, 200)) == 2
    with pytest.raises(ValueError, match=r"none of the 3 held-out dialogues has a prompt of 1 to 1 tokens"):
        held_out_prompts(store, 2, 1)
    assert [room("tau_new_tokens", new, 256) for new in (1, 255)] == [255, 1]
    with pytest.raises(ValueError, match=r"tau_new_tokens is 1,000, and the context has 256 .*; give at most 255"):
        room("tau_new_tokens", 1000, 256)


def test_time_for_tau_is_not_the_runs(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of `minutes` that trains less because it measured tau, or a schedule that jumps when it does."""
    run = tiny_run.train_here("eagle", {**settings, **TAU, "minutes": 5.0})
    before = run.limits._began
    moments = iter([100.0, 160.0])
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(moments, 160.0))
    assert run.tau is not None
    monkeypatch.setattr(run.tau, "figures", lambda weights: {"heldout_tau": 1.0})
    run._measure_tau(loop.tqdm(disable=True))
    assert run.limits._began == before + 60.0


def let_tau_fail(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """In a run that goes on without tau, as it has to; and in every run from here on."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise error

    run = tiny_run.train_here("eagle", {**settings, **TAU})
    assert run.tau is not None
    monkeypatch.setattr(run.tau, "figures", fail)
    run._measure_tau(loop.tqdm(disable=True))
    assert run.tau is None
    monkeypatch.setattr(loop.HeldoutTau, "figures", fail)


def test_no_memory_for_the_target(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of training lost because the target did not fit beside it, or a start that hides that it never will."""
    let_tau_fail(settings, monkeypatch, torch.OutOfMemoryError("no memory"))
    with pytest.raises(ValueError, match=r"tau_every: no memory; if the target does not fit beside .* set tau_device"):
        tiny_run.train_here("eagle", {**settings, **TAU, "out": settings["out"] + "-2"})


@pytest.mark.slow
def test_tau_with_two_ranks(settings: dict[str, Any], tmp_path: Path) -> None:
    """Ranks that wait for one another for ever, or clocks that part, where only the first measures tau."""
    values = {**settings, **TAU, "zero_stage": 1, "heldout_tokens": 20, "minutes": 5.0}
    tiny_run.train_on_ranks(2, tmp_path, [{"kind": "eagle", "values": values}])
    out = Path(settings["out"])
    assert [row["step"] for row in read_metrics(out) if "heldout_tau" in row] == [0, 3, 6]
    assert json.loads((out / "summary.json").read_text())["ranks"] == 2


@pytest.mark.slow
def test_sigterm_leaves_a_summary(settings: dict[str, Any], tmp_path: Path) -> None:
    """A job that a cluster ends, with nothing to show for it."""
    out = Path(settings["out"])
    line = tiny_run.command("eagle", tmp_path, {**settings, "steps": 100_000, "save_every": 5})
    process = tiny_run.begin(line, tmp_path / "said.log")
    deadline = time.monotonic() + 120
    while not (out / "state" / "latest").is_file() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    status = process.wait(60)
    kept = r"interrupted; the state after step [\d,]+ is kept in .*; to go on from there: .* --resume"
    assert re.fullmatch(kept, process.log.read_text().splitlines()[-1])
    assert status == 128 + signal.SIGTERM
    made = json.loads((out / "summary.json").read_text())
    assert made["ended"].startswith("interrupted after step")
    assert made["steps"] >= 5


# ------------------------------------------------------------------------------------------- by position


def test_answer_positions() -> None:
    """Positions counted through from one turn, or one dialogue of the row, to the next."""
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 0]], dtype=torch.bool)
    segments = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, -1]])
    assert answer_positions(mask, segments).tolist() == [[-1, 0, 1, -1, 0, 1, 0, 1, -1]]
    full = torch.tensor([[1, 1, 0, 1, 1]], dtype=torch.bool)  # a dialogue that fills its row, and ends with an answer
    assert answer_positions(full, torch.zeros(1, 5, dtype=torch.int64)).tolist() == [[0, 1, -1, 0, 1]]


# ------------------------------------------------------------------------------------------- FLOPs


def task_of(kind: str, config: Any) -> Task:
    values = tiny_run.settings("t", Path("f"), Path("o"), **({"exit_layer": 1} if kind == "kangaroo" else {}))
    return make_task(tiny_run.read(kind, values), meta_ends(config, "cpu", torch.float32))


@pytest.mark.parametrize("kind", ["eagle", "kangaroo"])
def test_flops_equal_those_counted(kind: str, tiny_model: Any) -> None:
    """A product left out or counted twice: checked against torch's own counter, forward and backward."""
    config = tiny_model("llama").config
    task = task_of(kind, config)
    module, cost = task.module, training_cost(task)
    length = 12
    features = torch.randn(1, length, tiny.HIDDEN_SIZE)
    positions = torch.arange(length)[None]
    inputs = (features, features, positions) if kind == "eagle" else (features, positions)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(*inputs).sum().backward()
    with FlopCounterMode(display=False) as angles:  # a product in some releases of transformers
        module.rotary_emb(features, positions)
    every_pair = cost.token * length + cost.pair * length**2  # the counter knows no causal mask
    assert counter.get_total_flops() - angles.get_total_flops() == every_pair
    assert cost.of([length], 0) == cost.token * length + cost.pair * length * (length + 1) // 2


# ------------------------------------------------------------------------------------------- the summary


def test_nan_on_held_out_text_is_told_and_survived(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that ends over one bad held-out dialogue, a NaN in TensorBoard, or one that is not reported."""
    figures = heldout.Heldout.figures
    monkeypatch.setattr(
        heldout.Heldout, "figures", lambda self, *given: {**figures(self, *given), "heldout_loss": math.nan}
    )
    out = Path(settings["out"])
    tiny_run.train_here("eagle", settings)
    assert "NaN or infinite, so left out: heldout_loss" in capsys.readouterr().out
    rows = [row for row in read_metrics(out) if "heldout_0-alpha" in row]
    assert [row["step"] for row in rows] == [0, 6]
    assert all(row["heldout_not_finite"] == 1 and "heldout_loss" not in row for row in rows)
