"""The drafter with the best tau is kept while the training goes on, and patience ends it; other trackers."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_run
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drafters import generate, make_drafter
from train.run import training
from train.run.files import BEST, Metrics, StateFolder, check_run_folder, check_trackers, read_metrics
from train.run.inputs import open_inputs
from train.run.keep import read_best
from train.watch.heldout import BUCKETS, bucket_name
from train.watch.tau import HeldoutTau

TAU = {"tau_every": 2, "tau_prompts": 4, "tau_new_tokens": 18, "noise": "none"}


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that learns four of the target's own texts by heart, and is judged on them: tau rises to 3."""
    path = tmp_path_factory.mktemp("keep")
    target = tiny_run.save_target(path / "target")
    begun = torch.randint(3, tiny.VOCAB_SIZE, (4, 6), generator=torch.Generator().manual_seed(0))
    plain = make_drafter("autoregressive", target)
    texts = torch.cat([begun, generate(target, plain, begun, max_new_tokens=18, eos_token_id=[]).tokens], dim=1)
    features = tiny_run.write_texts(path / "features", target, [*texts], [torch.arange(24) >= 6] * 4)
    tiny_run.write_stores(path / "other", target, {"train": [13]})
    (path / "other" / "heldout").symlink_to(features / "heldout")
    return tiny_run.settings(str(path / "target"), features, path / "base", batch_tokens=96, **TAU)


@pytest.fixture(scope="module")
def overfit(learning: dict[str, Any]) -> dict[str, Any]:
    """A run from the drafter that learnt them, on one dialogue of random tokens: its loss falls, and tau falls."""
    tiny_run.train_here("eagle", {**learning, "steps": 120, "tau_every": 120})
    out, other = Path(learning["out"]), Path(learning["features"]).with_name("other")
    changes = {"init_from": str(out), "features": str(other), "learning_rate": 3e-3, "schedule": "constant"}
    return {**learning, **changes, "steps": 10, "save_every": 4, "export_every": 4}


def kept(out: Path) -> dict[str, Any]:
    """Step and tau of the exported drafter's choice, by its provenance."""
    provenance = json.loads((out / "config.json").read_text())["training"]
    assert provenance["steps"] == provenance["best"]["step"]
    return dict(provenance["best"])


def equal(one: Path, other: Path) -> bool:
    ours, theirs = load_file(one), load_file(other)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_training_that_lowers_tau_exports_the_drafter_it_began_with(overfit: dict[str, Any], tmp_path: Path) -> None:
    """A worse drafter exported because its loss fell, or a message that does not say it."""
    config = tiny_run.read("eagle", {**overfit, "out": str(tmp_path / "run")})
    run = tiny_run.train_here("eagle", {**overfit, "out": str(config.out)})
    rows = read_metrics(config.out)
    losses = [row["loss"] for row in rows if "loss" in row]
    taus = {row["step"]: row["heldout_tau"] for row in rows if "heldout_tau" in row}
    assert losses[-1] < 0.5 * losses[0]
    assert taus[10] < 0.7 * taus[0]
    assert kept(config.out) == {"step": 0, "tau": taus[0]}
    assert equal(config.out / "model.safetensors", Path(str(config.init_from)) / "model.safetensors")
    inputs = open_inputs(config)
    assert training.finished_at(config, inputs.train) == run.progress.step == 10
    assert "no step was better than" in training.farewell(config, 10, inputs.heldout, inputs.ends)


def test_a_run_exports_an_earlier_drafter(
    overfit: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last weights exported, weights of another step than the tau they are named with, a state that is the best
    one's, or a best that no report shows."""
    out, short, last = tmp_path / "run", tmp_path / "short", tmp_path / "last"
    scripted(monkeypatch, [1.0, 3.0, 0.5, 2.0, 1.5, 1.0] + [1.0, 3.0] + [1.0] * 6)
    tiny_run.train_here("eagle", {**overfit, "out": str(out)})
    assert kept(out) == {"step": 2, "tau": 2.0}  # the mean of steps 0 and 2
    tiny_run.train_here("eagle", {**overfit, "out": str(short), "steps": 2})
    assert equal(out / "model.safetensors", short / "model.safetensors")
    tiny_run.train_here("eagle", {**overfit, "out": str(last), "keep": "last"})
    assert not equal(out / "model.safetensors", last / "model.safetensors")
    assert not (last / "state" / BEST).exists()
    ours, theirs = (folder / "state" / StateFolder.tag(10) / "weights.safetensors" for folder in (out, last))
    assert equal(ours, theirs)
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["steps"], summary["kept"]) == (10, {"step": 2, "tau": 2.0})
    board = EventAccumulator(str(out / "tensorboard")).Reload()
    steps = [(point.step, point.value) for point in board.Scalars("kept_step")]
    assert steps == [(0, 0), *((n, 2) for n in (2, 4, 6, 8, 10))]


def scripted(monkeypatch: pytest.MonkeyPatch, taus: list[float]) -> None:
    """Let the measurements of a run give ``taus``; the first is that before step 1."""
    given = iter(taus)
    monkeypatch.setattr(HeldoutTau, "figures", lambda self, weights: {"heldout_tau": next(given)})


@pytest.mark.parametrize(
    ("taus", "patience", "best", "end"),
    [
        ([1.0, 1.0, 1.5, 3.0, 1.2, 2.4, 2.4], None, (12, 2.4), 12),  # one lucky measurement
        ([9.0, 2.0, 1.0, 1.8, 1.8, 1.8, 1.8], None, (2, 2.0), 12),  # before the first step: no result of the training
        ([1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0], 2, (6, 2.0), 10),  # the same again is no gain
        ([1.0, 2.0, 1.0, 4.0, 1.0, 1.0, 1.0], 2, (6, 2.5), 10),  # a gain starts the count again
    ],
)
def test_which_measurement_is_the_best(
    learning: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taus: list[float],
    patience: int | None, best: tuple[int, float], end: int,
) -> None:  # fmt: skip
    """A choice by one measurement, or a count of patience that starts at another one."""
    scripted(monkeypatch, taus)
    run = tiny_run.train_here("eagle", {**learning, "out": str(tmp_path), "steps": 12, "patience": patience})
    assert kept(tmp_path) == {"step": best[0], "tau": best[1]}
    assert run.progress.step == end == read_metrics(tmp_path)[-1]["step"]
    assert StateFolder(tmp_path).latest() == StateFolder.tag(end)


def test_a_run_out_of_patience_is_finished(
    learning: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run that trains on after patience ended it, or one that more patience does not continue."""
    values = {**learning, "out": str(tmp_path), "steps": 12}
    scripted(monkeypatch, [1.0, 2.0, 1.0, 1.0, 1.5, 1.0, 3.0])
    tiny_run.train_here("eagle", {**values, "patience": 2})
    config = tiny_run.read("eagle", {**values, "patience": 2})
    inputs = open_inputs(config)
    assert training.finished_at(config, inputs.train) == 6
    assert "step 6" in (said := training.farewell(config, 6, inputs.heldout, inputs.ends))
    assert "of step 2 with tau 2.000" in said
    more = config.model_copy(update={"patience": 3})
    assert training.finished_at(more, inputs.train) is None
    run = tiny_run.train_here("eagle", {**values, "patience": 3}, resume=True)
    assert (run.progress.step, kept(tmp_path)) == (8, {"step": 2, "tau": 2.0})


def test_the_time_limit_of_tau_leaves_the_same_prompts(
    learning: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measurements that are compared although each is over as many prompts as there was time for."""
    run = tiny_run.train_here("eagle", {**learning, "out": str(tmp_path), "steps": 2})
    assert run.tau is not None
    monkeypatch.setattr("train.watch.tau.MOST_SECONDS", 0.0)
    few = run.tau.figures(run._weights())
    monkeypatch.undo()
    again = run.tau.figures(run._weights())
    assert {**few, "tau_seconds": 0} == {**again, "tau_seconds": 0}
    assert few["heldout_tau"] != read_metrics(tmp_path)[-2]["heldout_tau"]


@pytest.mark.slow
def test_killed_anywhere(learning: dict[str, Any], overfit: dict[str, Any], tmp_path: Path) -> None:
    """A best that is lost, half written, or of other weights than its tau, after a kill -9."""
    rising = {**learning, "steps": 40, "tau_every": 10, "save_every": 20, "export_every": 20}
    runs = {"rising": rising, "falling": overfit}
    points = {"rising": ("keeping:3", "kept:3"), "falling": ("named:2",)}
    jobs = []
    for name, values in runs.items():
        tiny_run.train_here("eagle", {**values, "out": str(tmp_path / name)})
        each = {point: {**values, "out": str(tmp_path / f"{name}-{point}")} for point in points[name]}
        jobs += [{"kind": "eagle", "values": value, "point": point} for point, value in each.items()]
    tiny_run.killed_and_resumed(jobs, tmp_path)
    assert kept(tmp_path / "rising")["step"] > 30  # the kills are before the best
    for job in jobs:
        out = Path(job["values"]["out"])
        whole = tmp_path / out.name.split("-")[0]
        assert kept(out) == kept(whole), job["point"]
        for file in ("model.safetensors", f"state/{BEST}"):
            assert equal(out / file, whole / file), job["point"]
        taus = [
            [(row["step"], row["heldout_tau"]) for row in read_metrics(o) if "kept_tau" in row] for o in (out, whole)
        ]
        assert taus[0] == taus[1], job["point"]
        assert not [*(out / "state").glob(f".{BEST}*")], job["point"]


@pytest.mark.slow
def test_all_ranks_decide_the_same(overfit: dict[str, Any], tmp_path: Path) -> None:
    """Ranks that wait for one another for ever because one of them ran out of patience, also when resumed on others."""
    values = {**overfit, "out": str(tmp_path / "run"), "zero_stage": 1, "save_every": 2}
    tiny_run.train_on_ranks(2, tmp_path, [{"kind": "eagle", "values": {**values, "steps": 4}}])
    more = {"kind": "eagle", "values": {**values, "patience": 3}, "resume": True}
    tiny_run.train_on_ranks(2, tmp_path, [more])
    assert kept(tmp_path / "run")["step"] == 0
    assert StateFolder(tmp_path / "run").latest() == StateFolder.tag(6)
    assert tiny_run.train_here("eagle", {**values, "patience": 5}, resume=True).progress.step == 10
    assert kept(tmp_path / "run")["step"] == 0


def test_a_damaged_best_is_named(learning: dict[str, Any], tmp_path: Path) -> None:
    """A resumed run that ends in the trace of a parser, or takes a damaged file for no best."""
    values = {**learning, "out": str(tmp_path), "steps": 2}
    tiny_run.train_here("eagle", values)
    (tmp_path / "state" / BEST).write_bytes(b"\x08" + bytes(20))
    with pytest.raises(ValueError, match=rf"{BEST} is damaged .* delete it and resume"):
        tiny_run.train_here("eagle", {**values, "steps": 4}, resume=True)


def test_a_best_without_a_state_is_no_hindrance(learning: dict[str, Any], tmp_path: Path) -> None:
    """A run that was killed between its first measurement and its first state, and cannot be started again."""
    values = {**learning, "out": str(tmp_path), "steps": 2}
    tiny_run.train_here("eagle", values)
    for name in ("config.json", "model.safetensors", "README.md", "LICENSE"):
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / "state" / "latest").unlink()
    tag = tmp_path / "state" / StateFolder.tag(2)
    tag.rename(tag.with_name(f".{tag.name}"))
    check_run_folder(tiny_run.read("eagle", values), resume=False)
    run = tiny_run.train_here("eagle", values)
    assert (run.progress.step, kept(tmp_path)["step"]) == (2, 2)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"keep": "best"}, r"keep: best is chosen by tau, and tau_every is null; set tau_every=500, or keep=last"),
        ({"patience": 3}, r"patience is 3, and nothing is chosen by tau \(keep: last, tau_every: None\)"),
        ({"patience": 3, "tau_every": 5, "keep": "last"}, r"keep: last, tau_every: 5\); set keep=best"),
        ({"patience": 0, "tau_every": 5}, r"patience.*greater than or equal to 1"),
        ({"keep": "first", "tau_every": 5}, r"keep.*'best' or 'last'"),
        ({"trackers": ["wandb", "excel"]}, r"trackers.*'tensorboard', 'mlflow', 'swanlab', 'trackio' or 'wandb'"),
    ],
)
def test_what_a_config_cannot_ask_for(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    """A run that ends with the last weights although the best were asked for."""
    with pytest.raises(ValueError, match=error):
        tiny_run.read("eagle", tiny_run.settings("t", tmp_path / "f", tmp_path, **changes))


def test_best_is_the_default_where_tau_is_measured(tmp_path: Path) -> None:
    """The last weights of an overfit run by default, or a best that nothing chooses."""
    values = tiny_run.settings("t", tmp_path / "f", tmp_path)
    measured = [(None, None), (None, 0), (None, 5), ("last", 5), ("best", 5)]
    found = [tiny_run.read("eagle", {**values, "keep": keep, "tau_every": tau}).keeps_best for keep, tau in measured]
    assert found == [False, False, True, False, True]
    assert read_best(tiny_run.read("eagle", values)) is None


TRACKIO = """
calls = []
class Config(dict):
    pass
config = Config()
class Run:
    def log(self, values, step=None, **more):
        calls.append((step, values))
    def finish(self):
        calls.append("finished")
def init(**options):
    calls.append(options)
    return Run()
"""


def test_trackers_get_the_figures(learning: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker without the config, the figures of tau or the end; or TensorBoard that is written although left out."""
    (tmp_path / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "tracked"
    config = tiny_run.read("eagle", {**learning, "out": str(out), "steps": 2, "trackers": ["trackio"]})
    check_trackers(config)
    tiny_run.train_here("eagle", config.model_dump(mode="json"))
    package: Any = sys.modules.pop("trackio")
    begun, *logged, end = package.calls
    assert begun == {"project": "drafters", "name": "tracked"}
    assert package.config["head.layer"] == "target"
    assert logged == [(row.pop("step"), row) for row in read_metrics(out)]
    assert end == "finished"
    assert not (out / "tensorboard").exists()


def test_a_tracker_that_fails_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hours lost because a tracker's server was away, or a warning for every figure."""
    broken: Any = SimpleNamespace(name="mlflow", log=lambda values, step: 1 / 0)
    metrics = Metrics(tmp_path, 0, tensorboard=False, trackers=[broken])
    for step in (1, 2):
        metrics.add(step, {"loss": 1.0})
    metrics.close()
    assert capsys.readouterr().err == "warning: mlflow gets no more figures: ZeroDivisionError: division by zero\n"
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_names_of_figures_suit_all_trackers() -> None:
    """A name that MLflow refuses."""
    assert all(re.fullmatch(r"[\w\-. :/]+", bucket_name(*bucket)) for bucket in BUCKETS)


def test_a_missing_tracker_is_named_before_the_training(learning: dict[str, Any]) -> None:
    """A run that fails after its target was loaded, or hides which package it needs."""
    config = tiny_run.read("eagle", {**learning, "trackers": ["tensorboard", "swanlab", "mlflow"]})
    error = r"not installed: swanlab, mlflow; pip install swanlab mlflow, or trackers=\[tensorboard\]"
    with pytest.raises(ValueError, match=error):
        check_trackers(config)
