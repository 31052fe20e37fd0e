"""A tiny feature store and run config for the tests of train/; a training run here or as its own process."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import nursery
import tiny
import torch
import yaml

from data_prep.store.reader import StoreManifest
from data_prep.store.writer import Shard, StoreWriter
from drafters import TargetModel, generate, load_drafter
from drafters.cli.program import leave
from drafters.config import validate
from train.configs import schema_of
from train.core import engine
from train.core.config import TrainConfig
from train.core.runtime import free_port
from train.core.task import Task, make_task
from train.core.weights import draft_with
from train.data.packing import Batch, collate
from train.preflight import command as command_line
from train.run import picture
from train.run.files import check_run_folder, read_metrics
from train.run.inputs import open_inputs
from train.run.loop import TrainRun

ROOT = Path(__file__).resolve().parents[1]
# Figures in metrics.jsonl of the machine and not of the training, which differ between equal runs.
TIMED = ("tokens_per_second", "seconds", "data_wait", "mfu", "peak_memory_gb", "tau_seconds", "joules")
TAP = 2
draw = picture.draw  # which without_pictures takes away
LENGTHS = {"train": [9, 17, 5, 23, 12, 30, 7, 14, 21, 11, 26, 8, 16, 19], "heldout": [15, 10, 22]}


def save_target(path: Path, family: str = "llama") -> TargetModel:
    """A tiny target, saved in the folder ``path``, which is its name."""
    model = tiny.build(family)
    model.save_pretrained(path)
    return TargetModel(model, name=str(path))


def write_stores(folder: Path, target: TargetModel, lengths: dict[str, list[int]] | None = None) -> Path:
    """Stores ``train`` and ``heldout`` of random token dialogues of two turns, with ``target``'s own features."""
    for split, each in (lengths or LENGTHS).items():
        generator = torch.Generator().manual_seed(len(each))
        tokens = [torch.randint(3, tiny.VOCAB_SIZE, (length,), generator=generator) for length in each]
        masks = [(torch.arange(length) % (length // 2 + 1)) >= 2 for length in each]
        write_store(folder / split, target, tokens, masks)
    return folder


def write_texts(folder: Path, target: TargetModel, tokens: list[torch.Tensor], masks: list[torch.Tensor]) -> Path:
    """Stores ``train`` and ``heldout`` that both hold these dialogues and their loss masks, ``[T]`` each."""
    for split in ("train", "heldout"):
        write_store(folder / split, target, tokens, masks)
    return folder


def write_store(path: Path, target: TargetModel, tokens: list[torch.Tensor], masks: list[torch.Tensor]) -> None:
    """A store of dialogues with ``target``'s own features."""
    each = [len(ids) for ids in tokens]
    outputs = [target.features(ids[None], taps=(TAP,)) for ids in tokens]
    shard = Shard(
        ids=[str(number) for number in range(len(each))],
        lengths=each,
        input_ids=torch.cat(tokens),
        loss_mask=torch.cat(masks),
        states={
            "features": torch.cat([output.features[0] for output in outputs]),
            f"tap_{TAP}": torch.cat([output.taps[TAP][0] for output in outputs]),
        },
    )
    with StoreWriter(path, header(target)) as writer:
        writer.write(shard)
        writer.finish({}, {})


def header(target: TargetModel) -> StoreManifest:
    """The manifest of a store that is about to be written."""
    return StoreManifest(
        target_name=target.name,
        target_fingerprint=target.fingerprint(),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        taps=[TAP],
        target_dtype="float32",
        dtype="float32",
        tokenizer_hash="tokenizer",
        template_hash="template",
        max_length=64,
        source="random tokens",
        source_digest="none",
    )


def settings(target: str, features: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """A run config of a few float32 steps; ``changes`` replace or add keys."""
    values = {
        "target": target,
        "features": str(features),
        "out": str(out),
        "steps": 6,
        "batch_tokens": 64,
        "learning_rate": 0.01,
        "warmup_steps": 2,
        "schedule": "cosine",
        "precision": "float32",
        "threads": 1,
        "loss_chunk_rows": 16,
        "log_every": 1,
        "eval_every": 100,
        "save_every": 100,
        "export_every": 100,
    }
    return {**values, **changes}


def command(script: str, folder: Path, values: dict[str, Any], *arguments: str) -> list[str]:
    """The command line of ``python train/<script>.py`` on ``values``, written into ``folder``."""
    config = folder / f"{Path(values['out']).name}.yaml"
    config.write_text(yaml.safe_dump(values))
    return [sys.executable, str(ROOT / "train" / f"{script}.py"), "--config", str(config), *arguments]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, without what tells it that it is rank 0 of 1."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {**{key: value for key, value in os.environ.items() if key not in ours}, **changes}


def run(line: list[str], **changes: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(line, env=environment(**changes), capture_output=True, text=True, timeout=300, check=False)


def begin(line: list[str], log: Path, **changes: str) -> nursery.Process:
    """Start a command, ``python script`` or ``python -m module`` with its arguments, in a process in which the imports
    are done: for tests of what it does, not of how it starts."""
    return nursery.begin("tiny_run.be_python", json.dumps(line), environment(**changes), log)


def be_python(given: str) -> int:
    """What python does with the command ``given``."""
    sys.orig_argv = line = json.loads(given)
    if line[1] == "-m":
        sys.argv = line[2:]
        runpy.run_module(line[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = line[1:]
        runpy.run_path(line[1], run_name="__main__")
    return 0


def be_pytest(given: str) -> int:
    """What ``python -m pytest`` does with the arguments ``given``, in the repository's folder."""
    import pytest

    os.chdir(ROOT)
    return int(pytest.main(json.loads(given)))


def launch(ranks: int, line: list[str], **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run the script of ``line`` (see ``command``) under DeepSpeed's launcher."""
    binaries = Path(sys.executable).parent
    launcher = [str(binaries / "deepspeed"), "--num_gpus", str(ranks), "--master_port", free_port()]
    path = os.pathsep.join([str(binaries), os.environ["PATH"]])
    return run([*launcher, *line[1:]], PATH=path, **variables)


def killed_and_resumed(jobs: list[dict[str, Any]], folder: Path) -> None:
    """Trainings that die and are resumed until they are whole; see killed_run.py."""
    log = folder / "killed.log"
    status = nursery.run("killed_run.kill_and_resume", json.dumps(jobs), environment(), log, 300)
    assert status == 0, log.read_text()[-3000:]


def train_on_ranks(count: int, folder: Path, jobs: list[dict[str, Any]], seconds: float = 300) -> None:
    """``count`` processes that train one run after the other; a job's keys are the arguments of ``train_here``.

    ``partition_all``: at ZeRO-3 the small weights are split, too, which DeepSpeed would leave whole.
    """
    status, said = run_ranks("fork_ranks", count, folder, jobs, seconds)
    assert status == 0, said[-6000:]


def run_ranks(
    function: str, count: int, folder: Path, jobs: list[dict[str, Any]], seconds: float = 300
) -> tuple[int, str]:
    """What ``function`` (below) makes of ``count`` ranks, and what they wrote."""
    shared = environment(WORLD_SIZE=str(count), LOCAL_SIZE=str(count), MASTER_ADDR="127.0.0.1")
    log = folder / "ranks.log"
    return nursery.run(f"tiny_run.{function}", json.dumps(jobs), shared, log, seconds), log.read_text()


def start_ranks(line: list[str], ranks: list[dict[str, str]], folder: Path, seconds: float = 300) -> None:
    """One process of the command ``line`` for each rank's variables, until all have ended well."""
    processes = []
    for number, variables in enumerate(ranks):
        with (folder / f"rank{number}.log").open("w") as log:
            own = environment(**variables, PYTHONPATH=str(ROOT))
            processes.append(subprocess.Popen(line, env=own, stdout=log, stderr=log))
    wait_for(processes, folder, seconds)


def wait_for(processes: Sequence[subprocess.Popen[Any] | nursery.Process], folder: Path, seconds: float) -> None:
    """Until all have ended well; kills the others when one fails."""
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            assert not any(process.poll() for process in processes), "a rank failed"
            assert time.monotonic() < deadline, "the ranks did not end"
            time.sleep(0.02)
        assert not any(process.returncode for process in processes), "a rank failed"
    except AssertionError as error:
        logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("rank*.log")))
        raise AssertionError(f"{error}\n{logs}") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()


def partition_small_weights() -> None:
    """Let ZeRO-3 split the tiny modules' weights as it splits real ones."""
    derived = engine.deepspeed_config

    def changed(config: TrainConfig) -> dict[str, Any]:
        values = derived(config)
        values["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return values

    engine.deepspeed_config = changed


def without_pictures() -> None:
    """Let no run of this process draw its summary, which takes ten times as long as training a tiny head does."""
    picture.draw = lambda *_: None


def arguments(**given: Any) -> Namespace:
    """A command line of train/<kind>.py, with ``given`` instead of defaults."""
    return Namespace(**vars(command_line.parse_arguments(None, ["--config", "none"])) | given)


def main(kind: str, argv: list[str]) -> int:
    """What the command ``train/<kind>.py`` does with its arguments, in this process; the exit status."""
    return command_line.main(schema_of(kind), None, argv)


def read(kind: str, values: dict[str, Any]) -> TrainConfig:
    """The config of a run of train/<kind>.py."""
    return validate(schema_of(kind), values, source="test")


def task_of(kind: str, values: dict[str, Any], *dialogues: int) -> tuple[Any, Any]:
    """An untrained task with draft tokens at random, and the batch of some training dialogues."""
    config = read(kind, values)
    inputs = open_inputs(config)
    task: Any = make_task(config, inputs.ends)
    if config.draft_vocab:
        draft_with(task, torch.randperm(tiny.VOCAB_SIZE)[: config.draft_vocab].int())
    return task, collate(inputs.train, list(dialogues), task.config.taps)


def train_here(kind: str, values: dict[str, Any], resume: bool = False) -> TrainRun:
    """What train/<kind>.py does, in this process; the process group stays for the next run."""
    config = check_run_folder(read(kind, values), resume)
    inputs = open_inputs(config)
    ranks = engine.start(config)
    made = TrainRun(make_task(config, inputs.ends), inputs, ranks, resume, [])
    made.train()
    return made


def learned(kind: str, values: dict[str, Any], target: TargetModel, below: float) -> tuple[Any, set[str], Any]:
    """Train: the loss falls below ``below`` times the first. Return the run, all names of its metrics, and the drafter
    that it leaves, which drafts."""
    run = train_here(kind, values)
    rows = read_metrics(run.config.out)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < below * losses[0], losses
    drafter = load_drafter(str(run.config.out), target)
    assert generate(target, drafter, torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6).tokens.shape == (1, 6)
    return run, {name for row in rows for name in row}, drafter


def losses_of(task: Task, batch: Batch, seed: int | None = None, module: Any = None) -> dict[str, torch.Tensor]:
    """The task's losses on the trained positions of ``batch``; ``seed`` as for ``Task.pairs``."""
    return task.losses(task.pairs(module or task.module, with_rows(task, batch), seed))


def with_rows(task: Task, batch: Batch) -> Batch:
    """``batch`` with the positions that ``task`` trains on."""
    return replace(batch, rows=task.rows(batch))


def train_as_rank(rank: int, jobs: list[dict[str, Any]]) -> NoReturn:
    """One rank of ``train_on_ranks``."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        for job in jobs:
            if job.pop("partition_all", False):
                partition_small_weights()
            train_here(**job)
        engine.stop()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    leave(0)


def import_deepspeed() -> None:
    """All of it, and what a training imports besides, before trainings are forked: it takes seconds."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401
    from torch.utils import tensorboard  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401


def fork_ranks(given: str) -> int:
    """Fork all ranks of the jobs ``given`` as JSON; 1, and none of them left, as soon as one fails."""
    ranks = _forked(json.loads(given))
    while ranks:
        ended, status = os.wait()
        ranks.discard(ended)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def failing_ranks(given: str) -> int:
    """How many ranks of the jobs ``given`` as JSON fail, each left to itself."""
    return sum(os.waitpid(rank, 0)[1] != 0 for rank in _forked(json.loads(given)))


def _forked(jobs: list[dict[str, Any]]) -> set[int]:
    os.environ["MASTER_PORT"] = free_port()
    ranks = set()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if not child:
            train_as_rank(rank, jobs)
        ranks.add(child)
    return ranks
