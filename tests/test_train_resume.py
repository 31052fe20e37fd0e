"""A run that was killed and resumed equals one that was not, bit for bit."""

import itertools
import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_run
import torch
from safetensors.torch import load_file, save_file

from drafters.config import validate
from train.eagle import EagleConfig
from train.run import limits
from train.run.files import Metrics, StateFolder, check_run_folder, read_metrics
from train.run.state import SavedState, checksums

STEPS = 120


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("resume")
    features = tiny_run.write_stores(path / "features", tiny_run.save_target(path / "target"))
    changes = {"steps": STEPS, "save_every": 10, "eval_every": 25, "export_every": 25, "gradient_accumulation": 2}
    return tiny_run.settings(str(path / "target"), features, path / "uninterrupted", **changes)


def comparable(out: Path) -> list[dict[str, float]]:
    """All figures but those that measure time."""
    return [{key: value for key, value in row.items() if key not in tiny_run.TIMED} for row in read_metrics(out)]


def kill_when_saved(line: list[str], out: Path, after: str) -> None:
    """Start a run and kill -9 it once a checkpoint later than ``after`` is whole."""
    process = tiny_run.begin(line, out.with_name("killed.log"))
    deadline = time.monotonic() + 200
    while (StateFolder(out).latest() or "") <= after and process.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint after 200 s"
        time.sleep(0.005)
    assert process.poll() is None, "the run ended before it could be killed"
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(settings: dict[str, Any], tmp_path: Path) -> None:
    """Optimiser state, data position, noise or learning rate lost in a kill; a step logged twice or not at all."""
    tiny_run.train_here("eagle", settings)
    reference, out = Path(settings["out"]), tmp_path / "killed"
    line = tiny_run.command("eagle", tmp_path, {**settings, "out": str(out)})
    kill_when_saved(line, out, after=StateFolder.tag(20))
    killed_at = StateFolder(out).latest()
    assert killed_at is not None
    assert killed_at < StateFolder.tag(STEPS)
    half_written = out / "state" / StateFolder.tag(STEPS + 10)  # what a kill in the middle of a save leaves
    half_written.mkdir()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 119, "lo')
    tiny_run.train_here("eagle", {**settings, "out": str(out)}, resume=True)
    assert comparable(out) == comparable(reference)
    ours, theirs = load_file(out / "model.safetensors"), load_file(reference / "model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    kept = sorted(folder.name for folder in (out / "state").glob("step-*") if folder != half_written)
    assert kept == [StateFolder.tag(STEPS - 10), StateFolder.tag(STEPS)]


def losses(out: Path) -> list[dict[str, float]]:
    return [row for row in comparable(out) if "loss" in row]


# Stages 1 and 2 are one class of DeepSpeed's, and bf16 runs stage 0 as stage 1: each class in each precision, once.
@pytest.mark.parametrize(
    ("precision", "stage", "offload", "optimizer"),
    [*((*given, "none", "adamw") for given in (("float32", 0), ("float32", 3), ("bf16", 2), ("bf16", 3))),
     ("bf16", 2, "optimizer", "adamw"), ("bf16", 2, "none", "muon")],
)  # fmt: skip
def test_resume_is_exact_with_every_optimiser(
    settings: dict[str, Any], tmp_path: Path, precision: str, stage: int, offload: str, optimizer: str
) -> None:
    """Float32 masters rounded to bf16, moments or Adam's count of steps lost, on the way through a state."""
    zero = {"zero_stage": stage, "offload": offload, "optimizer": optimizer}
    values = {**settings, **zero, "precision": precision, "schedule": "constant", "export_every": 1000}
    tiny_run.train_here("eagle", {**values, "steps": 8, "out": str(tmp_path / "whole")})
    tiny_run.train_here("eagle", {**values, "steps": 4, "out": str(tmp_path / "parts")})
    tiny_run.train_here("eagle", {**values, "steps": 8, "out": str(tmp_path / "parts")}, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 8
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        ours, theirs = (
            load_file(tmp_path / o / "state/step-00000008" / f"{kind}.safetensors") for o in ("parts", "whole")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


VARIANTS = [("float32", 0), ("float32", 2), ("float32", 3), ("bf16", 1), ("bf16", 3)]
KILLS = ("file:1", "file:4", "file:6", "unnamed:2", "named:2", "named:3", "unexported")


@pytest.mark.slow
def test_killed_anywhere_in_a_save(settings: dict[str, Any], tmp_path: Path) -> None:
    """A state that is named before it is whole, or an older one that is gone before the new one is named."""
    values = {**settings, "steps": 6, "save_every": 2, "export_every": 2, "eval_every": 4}
    variants: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"zero_stage": 3}]
    jobs = []
    for number, variant in enumerate(variants):
        tiny_run.train_here("eagle", {**values, **variant, "out": str(tmp_path / f"{number}-whole")})
        for point in KILLS if number == 0 else ("file:5", "unnamed:2"):
            each = {**values, **variant, "out": str(tmp_path / f"{number}-{point}")}
            jobs.append({"kind": "eagle", "values": each, "point": point})
    tiny_run.killed_and_resumed(jobs, tmp_path)
    for job in jobs:
        out = Path(job["values"]["out"])
        whole = tmp_path / f"{out.name[0]}-whole"
        assert comparable(out) == comparable(whole), job["point"]
        ours, theirs = load_file(out / "model.safetensors"), load_file(whole / "model.safetensors")
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), job["point"]
        found = sorted(path.name for path in (out / "state").iterdir())
        assert found == ["latest", StateFolder.tag(4), StateFolder.tag(6)], job["point"]


@pytest.mark.slow
def test_resume_on_another_number_of_ranks_and_stage(settings: dict[str, Any], tmp_path: Path) -> None:
    """An optimizer's state that only as many ranks can read, or parts put together in another order."""
    values = {**settings, "schedule": "constant", "save_every": 5, "export_every": 1000, "eval_every": 1000}
    alone = {**values, "steps": 10, "out": str(tmp_path / "alone")}
    tiny_run.train_here("eagle", alone)
    tiny_run.train_here("eagle", {**alone, "precision": "bf16", "out": str(tmp_path / "alone-bf16")})
    variants = {f"{precision}{stage}": {"precision": precision, "zero_stage": stage} for precision, stage in VARIANTS}
    first = [{**values, **variant, "steps": 5, "out": str(tmp_path / f"2{name}")} for name, variant in variants.items()]
    tiny_run.train_here("eagle", {**alone, "steps": 5, "out": str(tmp_path / "1to2")})
    more = {**alone, "out": str(tmp_path / "1to2"), "zero_stage": 2}
    jobs = [{"kind": "eagle", "values": each, "partition_all": True} for each in first]
    tiny_run.train_on_ranks(2, tmp_path, [*jobs, {"kind": "eagle", "values": more, "resume": True}])
    jobs, pairs = [], [("1to2", "alone")]
    for name, variant in variants.items():
        for ranks in (1, 4) if name in ("float323", "bf161") else (1,):
            out = tmp_path / f"2{name}to{ranks}"
            shutil.copytree(tmp_path / f"2{name}", out)
            other = {**variant, "zero_stage": (variant["zero_stage"] + ranks) % 4, "gradient_accumulation": 4 // ranks}
            job = {"kind": "eagle", "values": {**values, **other, "steps": 10, "out": str(out)}, "resume": True}
            if ranks == 1:
                tiny_run.train_here(**job)
            else:
                jobs.append({**job, "partition_all": True})
            pairs.append((out.name, "alone-bf16" if "bf16" in name else "alone"))
    tiny_run.train_on_ranks(4, tmp_path, jobs)
    for name, reference in pairs:
        found, expected = losses(tmp_path / name), losses(tmp_path / reference)
        assert [row["tokens"] for row in found] == [row["tokens"] for row in expected], name  # the same data
        # Sums in another order: in bf16 that moved losses by 2.8% on one processor, 4.6% on another.
        tolerance = 0.1 if "bf16" in name else 2e-3
        assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=tolerance), name


def test_a_full_disk_loses_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    """Half a state under a state's name, `latest` naming it, or the state before deleted to make room."""
    out = tmp_path / "run"
    values = {**settings, "out": str(out), "steps": 4, "save_every": 2, "export_every": 100}
    tiny_run.train_here("eagle", values)
    before = {path: path.read_bytes() for path in (out / "state").rglob("*") if path.is_file()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))  # a file cannot grow past 60 kB; weights are larger
    try:
        with pytest.raises(
            OSError, match=r"step-00000006 could not be written .*the last good state is .*step-00000004"
        ):
            tiny_run.train_here("eagle", {**values, "steps": 8}, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in (out / "state").rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in (out / "state").iterdir()) == ["latest", StateFolder.tag(2), StateFolder.tag(4)]
    run = tiny_run.train_here("eagle", {**values, "steps": 8}, resume=True)
    assert run.progress.step == 8


def sign(folder: Path, **changes: Any) -> None:
    """Give a state the checksums of its present files."""
    progress = {**json.loads((folder / "progress.json").read_text()), **changes}
    progress.pop("sha256")
    (folder / "progress.json").write_text(json.dumps({**progress, "sha256": checksums(folder, progress)}))


def test_flipped_bytes_in_a_state_are_found(settings: dict[str, Any], tmp_path: Path) -> None:
    """Training that goes on with garbage in Adam's moments, or at another place in the data."""
    out = tmp_path / "run"
    values = {**settings, "out": str(out), "steps": 4, "save_every": 2}
    tiny_run.train_here("eagle", values)
    newest = out / "state" / StateFolder.tag(4)
    for name, place in (("exp_avg.safetensors", -5), ("exp_avg_sq.safetensors", -5), ("weights.safetensors", -5)):
        whole = (newest / name).read_bytes()
        flipped = bytearray(whole)
        flipped[place] ^= 0x40
        (newest / name).write_bytes(flipped)
        with pytest.raises(
            ValueError, match=rf"step-00000004 is damaged \({name} differ .*step-00000002 into .*latest"
        ):
            SavedState(newest)
        (newest / name).write_bytes(whole)
    progress = json.loads((newest / "progress.json").read_text())
    for wrong in ({**progress, "batch": progress["batch"] + 1}, {**progress, "sha256": {}}, [1]):
        (newest / "progress.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="step-00000004 is damaged"):
            SavedState(newest)
    (newest / "progress.json").write_text(json.dumps(progress))
    assert SavedState(newest).progress["step"] == 4


def test_a_run_that_died_before_its_first_state_is_no_hindrance(settings: dict[str, Any], tmp_path: Path) -> None:
    """A command corrected after a failed start that is refused; its figures mixed with the next run's; more deleted."""
    out = tmp_path / "run"
    values = {**settings, "out": str(out), "steps": 2}
    config = validate(EagleConfig, values, source="test")
    (out / "state" / ".step-00000002").mkdir(parents=True)
    (out / "run.json").write_text("{}")
    (out / "metrics.jsonl").write_text('{"step": 0, "heldout_loss": 9.0}\n')
    alive = Metrics(out, 0)
    with pytest.raises(ValueError, match="another process is training in .*run"):
        check_run_folder(config, resume=False)
    alive.close()
    for name in ("model.safetensors", "notes.txt", "state/step-00000002"):
        (out / name).mkdir()
        with pytest.raises(ValueError):
            check_run_folder(config, resume=False)
        (out / name).rmdir()
    check_run_folder(config, resume=False)
    assert len(read_metrics(out)) == 1  # a check deletes nothing
    tiny_run.train_here("eagle", values)
    assert [row["heldout_loss"] for row in read_metrics(out) if row["step"] == 0 and "heldout_loss" in row] != [9.0]
    assert StateFolder(out).latest() == StateFolder.tag(2)


def test_states_that_cannot_be_read_are_named(settings: dict[str, Any], tmp_path: Path) -> None:
    """A traceback out of a library instead of what to type; another drafter's weights taken in silence."""
    out = tmp_path / "run"
    values = {**settings, "out": str(out), "steps": 4, "save_every": 2}
    tiny_run.train_here("eagle", values)
    newest = out / "state" / StateFolder.tag(4)
    weights = newest / "weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"step-00000004 is damaged .* write one of step-00000002 into .*latest"):
        tiny_run.train_here("eagle", {**values, "steps": 5}, resume=True)
    tensors = load_file(out / "state" / StateFolder.tag(2) / "weights.safetensors")
    save_file({**tensors, "fc.weight": torch.zeros(3, 3)}, weights)
    sign(newest)
    with pytest.raises(ValueError, match=r"step-00000004 is of another drafter: fc.weight differ"):
        tiny_run.train_here("eagle", {**values, "steps": 5}, resume=True)
    (newest / "progress.json").unlink()
    with pytest.raises(ValueError, match=r"step-00000004 is damaged .*progress.json"):
        tiny_run.train_here("eagle", {**values, "steps": 5}, resume=True)
    shutil.rmtree(newest)
    with pytest.raises(ValueError, match=r"step-00000004 does not exist.*write one of step-00000002 into"):
        tiny_run.train_here("eagle", {**values, "steps": 5}, resume=True)
    (out / "state" / "latest").write_text(StateFolder.tag(2))
    assert tiny_run.train_here("eagle", {**values, "steps": 5}, resume=True).progress.step == 5


def test_minutes_count_on_after_a_resume(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time limit that restarts with every resume."""
    ticks = itertools.count()
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: 0.05 * next(ticks)))
    values = {**settings, "steps": 20, "save_every": 10, "schedule": "constant", "out": str(tmp_path / "run")}
    first = tiny_run.train_here("eagle", {**values, "minutes": 1})
    spent = first.progress.seconds
    more = tiny_run.train_here("eagle", {**values, "steps": None, "minutes": 2 * spent / 60}, resume=True)
    assert more.progress.seconds == pytest.approx(2 * spent, rel=0.1)
    assert 30 <= more.progress.step <= 50


def test_resume_refuses_another_training(settings: dict[str, Any], tmp_path: Path) -> None:
    """A resumed run with another seed or batch, which is neither the old training nor a new one."""
    values = {**settings, "out": str(tmp_path / "run"), "steps": 3}
    tiny_run.train_here("eagle", values)
    with pytest.raises(ValueError, match=r"the config differs .*batch_tokens was 64, is 128"):
        tiny_run.train_here("eagle", {**values, "batch_tokens": 128}, resume=True)
    data = {"train": "a.jsonl", "heldout": "b.jsonl"}
    online = {**values, "features": "online", "data": data}
    before = validate(EagleConfig, online, source="test").model_dump(mode="json")
    run_json = Path(values["out"]) / "run.json"
    whole = run_json.read_text()
    run_json.write_text(json.dumps({"drafter": "eagle", "config": before}))
    memory = {**data, "target_batch_tokens": 1, "target_device_map": "auto"}
    check_run_folder(validate(EagleConfig, {**online, "data": memory}, source="test"), resume=True)
    config = validate(EagleConfig, {**online, "data": {**memory, "limit": 3}}, source="test")
    with pytest.raises(ValueError, match=r"run: data.limit was None, is 3; undo"):
        check_run_folder(config, resume=True)
    run_json.write_text(whole)
    run = tiny_run.train_here("eagle", {**values, "steps": 5}, resume=True)  # a longer run is the same training
    assert run.progress.step == 5


def test_resume_takes_a_run_that_knew_fewer_keys(settings: dict[str, Any], tmp_path: Path) -> None:
    """A run of days that no newer version goes on with, or one that goes on with another loss than it began with."""
    values = {**settings, "steps": 4, "save_every": 2, "out": str(tmp_path / "run")}
    tiny_run.train_here("eagle", values)
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    del info["config"]["classification_loss"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(info))
    check_run_folder(validate(EagleConfig, values, source="test"), resume=True)
    with pytest.raises(ValueError, match="classification_loss was 'cross_entropy', is 'lk_alpha'"):
        check_run_folder(validate(EagleConfig, {**values, "classification_loss": "lk_alpha"}, source="test"), True)
