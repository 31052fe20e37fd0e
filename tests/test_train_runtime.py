"""How a process finds its rank: launcher, Slurm, or alone."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from train.core import runtime
from train.run.files import read_metrics

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[07-08],gpu12",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
}


def described(**environment: str) -> dict[str, str]:
    runtime.describe_process(environment)
    return environment


def test_a_slurm_task_is_a_rank() -> None:
    """Sixteen processes that each train alone, or that look for each other in different places."""
    found = described(**TASK)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("9", "16", "1", "8")
    assert found["MASTER_ADDR"] == "gpu07"
    assert found["MASTER_PORT"] == described(**{**TASK, "SLURM_PROCID": "0"})["MASTER_PORT"]
    assert found["MASTER_PORT"] != described(**{**TASK, "SLURM_STEP_ID": "3"})["MASTER_PORT"]
    given = described(**TASK, MASTER_ADDR="10.0.0.1", MASTER_PORT="123")
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "123")
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        described(**{key: value for key, value in TASK.items() if key != "SLURM_STEP_NODELIST"})


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one GPU, which NCCL reports in a language of its own; a task that sees one GPU and asks for more."""
    taken: list[int] = []
    monkeypatch.setattr(runtime.torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(runtime.torch.accelerator, "set_device_index", taken.append)
    runtime.take_device({"LOCAL_RANK": "3"})
    with pytest.raises(ValueError, match=r"process 5 of this machine has no GPU, there are 4"):
        runtime.take_device({"LOCAL_RANK": "4"})
    monkeypatch.setattr(runtime.torch.accelerator, "device_count", lambda: 1)
    runtime.take_device({**TASK, "LOCAL_RANK": "1"})
    assert taken == [3, 0]


def test_ranks_go_on_from_one_step() -> None:
    """Catches ranks whose network drives showed them different states: each would train a part of another's weights."""

    class Others(runtime.Ranks):
        def total(self, values: torch.Tensor) -> torch.Tensor:
            return values + torch.tensor([0, 40])

    runtime.check_same_step(Others(0, 2), 40, torch.device("cpu"))
    with pytest.raises(ValueError, match="saved states of different steps \\(20, 40\\): the run folder must lie where"):
        runtime.check_same_step(Others(0, 2), 20, torch.device("cpu"))


def test_the_batch_script_resumes_what_it_finds(tmp_path: Path) -> None:
    """A requeued job that restarts over its own state, or a first one that asks to resume nothing."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text("")
    srun = tmp_path / "bin" / "srun"
    srun.write_text('#!/bin/sh\necho "$@"\n')
    srun.chmod(0o755)
    config = tmp_path / "run.yaml"
    config.write_text(f"target: t\nout: {tmp_path}/one   # here\n")
    for name in ("one", "two"):
        (tmp_path / name / "state").mkdir(parents=True)

    def line(*overrides: str) -> str:
        script = str(tiny_run.ROOT / "configs" / "slurm" / "eagle.sbatch")
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = tiny_run.run(["bash", script, str(config), *overrides], VENV=str(tmp_path), PATH=path)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    start = f"--kill-on-bad-exit=1 --cpus-per-task=8 python train/eagle.py --config {config}"
    assert line() == start
    assert line("steps=3", f"out={tmp_path}/two") == f"{start} steps=3 out={tmp_path}/two"
    (tmp_path / "two" / "state" / "latest").write_text("step-00000001")
    assert line() == start
    assert line(f"out={tmp_path}/two") == f"{start} --resume out={tmp_path}/two"
    (tmp_path / "one" / "state" / "latest").write_text("step-00000001")
    assert line() == f"{start} --resume"


@pytest.mark.slow
def test_two_slurm_tasks_train_one_drafter(tmp_path: Path) -> None:
    """Variables that look right, and with which torch.distributed does not start; a rank without a dialogue."""
    lengths = {"train": [19, 14, 20, 17, 12, 18], "heldout": [15, 11, 20]}  # no two fit into a batch
    features = tiny_run.write_stores(tmp_path / "features", tiny_run.save_target(tmp_path / "target"), lengths)
    changes = {"steps": 4, "schedule": "constant", "batch_tokens": 20, "heldout_tokens": 20}
    values: dict[str, Any] = tiny_run.settings(str(tmp_path / "target"), features, tmp_path / "alone", **changes)
    tiny_run.train_here("eagle", values)
    line = tiny_run.command("eagle", tmp_path, {**values, "out": str(tmp_path / "tasks")})
    step = {**TASK, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ranks = [{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    logs = [tmp_path / f"rank{number}.log" for number in (0, 1)]
    tiny_run.wait_for([tiny_run.begin(line, log, **rank) for log, rank in zip(logs, ranks, strict=True)], tmp_path, 300)
    found, expected = read_metrics(tmp_path / "tasks"), read_metrics(tmp_path / "alone")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for ours, theirs in zip(found, expected, strict=True):
        name = "loss" if "loss" in theirs else "heldout_loss"
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5)
    assert json.loads((tmp_path / "tasks" / "run.json").read_text())["ranks"] == 2


ENDS = """
import atexit, ctypes, torch
from torch import distributed
from drafters.cli.program import leave

distributed.init_process_group("gloo")
group = distributed.new_group([0, 1])
ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # as DeepSpeed's globals, which outlive the interpreter
atexit.register(print, "atexit")
values = [torch.ones(10_000) for _ in range(3_000)]
for value in values:
    distributed.all_reduce(value, group=group, async_op=True)
del value, values
leave(0)
"""


def test_ending_while_gloo_lets_go_of_its_tensors(tmp_path: Path) -> None:
    """A run that went well, reported as failed: gloo's threads abort a process that is taking itself apart."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": tiny_run.free_port()}
    ranks = [{**shared, "RANK": str(rank)} for rank in range(2)]
    tiny_run.start_ranks([sys.executable, str(script)], ranks, tmp_path)
    assert [(tmp_path / f"rank{rank}.log").read_text() for rank in range(2)] == ["atexit\n"] * 2
