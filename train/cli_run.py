"""What the training scripts do with their config: train, check (--dry-run) or overfit."""

import argparse
import sys
from typing import Any

from data_prep.ranks import find_rank
from drafters.program import command
from train import engine, runtime
from train.config import TrainConfig
from train.inputs import open_inputs
from train.loop import TrainRun
from train.run.endings import farewell, finished_at, what_is_kept
from train.run.files import check_run_disk
from train.task import make_task


def train(config: TrainConfig, arguments: argparse.Namespace) -> int:
    """Train from the start or the last state to the limit; the exit status."""
    runtime.check_devices(config)
    inputs = open_inputs(config)
    if arguments.resume and (step := finished_at(config, inputs.train)) is not None:
        if find_rank(None, None).index == 0:
            print(farewell(config, step, inputs.heldout, inputs.ends, already=True))
        return 0
    task = make_task(config, inputs.ends)
    check_run_disk(config.out, task.module)
    ranks = engine.start(config)
    run = TrainRun(task, inputs, ranks, arguments.resume, sys.argv[1:])
    run.train()
    if ranks.is_first:
        print(farewell(config, run.progress.step, inputs.heldout, inputs.ends))
    engine.stop()
    return 0


def kept(config: TrainConfig, arguments: argparse.Namespace) -> str:
    """What an interruption leaves, and the command that goes on."""
    if arguments.dry_run or arguments.overfit:
        return f"to start again: {command()}"
    return what_is_kept(config.out, command(), command("--resume"))


def dry_run(config: TrainConfig, arguments: argparse.Namespace) -> int:
    """--dry-run; 1 if the run could not start."""
    from train.preflight.dry_run import Assumptions, dry_run

    names = Assumptions.__dataclass_fields__
    given: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name in names}
    report = dry_run(config, arguments.resume, Assumptions(**given))
    if find_rank(None, None).index == 0:
        print(report.text())
    return 1 if report.problems else 0


def overfit(config: TrainConfig, arguments: argparse.Namespace) -> int:
    """--overfit; 1 if the pipeline is not sound."""
    from train.preflight.overfit import overfit

    return overfit(config, arguments)
