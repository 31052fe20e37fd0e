"""One training from its checked config to the exit status."""

import argparse
import sys

import torch

from data_prep.common.ranks import find_rank
from drafters.common.precision import warn_if_slow
from train.core import engine, runtime
from train.core.config import TrainConfig
from train.core.task import make_task
from train.run.endings import farewell, finished_at
from train.run.files import check_run_disk
from train.run.inputs import open_inputs
from train.run.loop import TrainRun

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "float16", torch.float32: "float32"}


def train(config: TrainConfig, arguments: argparse.Namespace) -> int:
    """Train from the start or the last state to the limit. Returns the exit status."""
    runtime.check_devices(config)
    inputs = open_inputs(config)
    if arguments.resume and (step := finished_at(config, inputs.train)) is not None:
        if find_rank(None, None).index == 0:
            print(farewell(config, step, inputs.heldout, inputs.ends, already=True))
        return 0
    task = make_task(config, inputs.ends)
    check_run_disk(config, task.module)
    ranks = engine.start(config)
    run = TrainRun(task, inputs, ranks, arguments.resume, sys.argv[1:])
    run.train()
    if ranks.is_first:
        print(farewell(config, run.progress.step, inputs.heldout, inputs.ends))
    engine.stop()
    return 0


def settle_precision(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with this device's precision instead of auto; the first rank prints it."""
    dtype = runtime.dtype_of(config)
    settled = config.model_copy(update={"precision": PRECISIONS[dtype]})
    if find_rank(None, None).index == 0 and config.precision == "auto":
        print(f"precision: {settled.precision} (auto)")
    warn_if_slow(dtype, runtime.rank_device())
    return settled
