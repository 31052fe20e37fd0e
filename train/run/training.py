"""One training from its checked config to the exit status and its last lines: how to measure it, or continue."""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from data_prep.common.ranks import find_rank
from drafters.cli.program import command
from drafters.common.precision import warn_if_slow
from drafters.model.ends import FrozenEnds
from drafters.model.files import load_config_only
from train.core import engine, runtime
from train.core.config import TrainConfig
from train.core.task import make_task
from train.data.packing import Source, TrainData
from train.run.files import StateFolder, check_run_disk, read_object
from train.run.inputs import open_inputs
from train.run.keep import out_of_patience, read_best
from train.run.loop import TrainRun
from train.run.state import PROGRESS

UNTRAINED = ("prompt_lookup", "lookahead")  # baselines that need neither training nor a model
EXPORTED = ("config.json", "adapter_config.json")  # one of them is in every export
ANSWER = 96  # most new tokens; for a target with a short context, a quarter of it
SPEED = Path(__file__).resolve().parents[2] / "configs" / "quickstart" / "speed.yaml"
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


def settle(config: TrainConfig) -> TrainConfig:
    """Return ``config`` with this device's precision instead of auto, and with what the target's depth decides.

    The first rank prints the precision.
    """
    config = config.settled(lambda: load_config_only(config.target, config.revision).num_hidden_layers)
    dtype = runtime.dtype_of(config)
    settled = config.model_copy(update={"precision": PRECISIONS[dtype]})
    if find_rank(None, None).index == 0 and config.precision == "auto":
        print(f"precision: {settled.precision} (auto)")
    warn_if_slow(dtype, runtime.rank_device())
    return settled


def finished_at(config: TrainConfig, train: Source) -> int | None:
    """The last step of the run in ``out``, if it is finished and all files are written; else None."""
    state = StateFolder(config.out).newest()
    progress = read_object(state / PROGRESS) if state else {}
    step, seconds = int(progress.get("step", -1)), float(progress.get("seconds", -1))
    last = config.last_step(TrainData(train, config).steps_in)
    by_step, by_clock = last is not None and step >= last, config.minutes and seconds >= 60 * config.minutes
    best = read_best(config)
    kept = best["steps"] if best else None
    if not by_step and not by_clock and not out_of_patience(config, progress.get("taus", []), kept):
        return None
    exported = read_object(config.out / config.provenance_file).get("training", {}).get("steps")
    summary = read_object(config.out / "summary.json")
    whole = exported == (step if kept is None else kept) and (config.out / config.weights_file).is_file()
    return step if whole and summary.get("ended") == "finished" and summary.get("steps") == step else None


def farewell(config: TrainConfig, step: int, heldout: Source, ends: FrozenEnds, already: bool = False) -> str:
    """The last lines of a run that finished after ``step`` steps; ``already``: whether it had ended before this start.

    The prompts of the measuring command are the held-out dialogues, or FILE if they are not in a local file.
    """
    done = "is already finished" if already else "finished"
    more = "; nothing was changed. A higher limit (steps, epochs, minutes) continues it" if already else ""
    source, context = heldout.manifest.source, getattr(ends.config, "max_position_embeddings", None) or 2048
    here, answer = Path(source).is_file(), min(ANSWER, max(1, context // 4))
    overrides: dict[str, Any] = {
        **{f"target.{key}": value for key, value in config.measured_target.items()},
        "prompts.file": source if here else "FILE",
        "prompts.max_prompt_tokens": min(512, context - answer),
        "max_new_tokens": answer,
        "drafters": json.dumps([*({"drafter": name} for name in UNTRAINED), config.measured_by]),
        "out": config.out.with_name(f"{config.out.name}-speed"),
    }
    words = ["python", "-m", "eval.speed", "--config", os.path.relpath(SPEED)]
    line = shlex.join([*words, *(f"{key}={value}" for key, value in overrides.items())])
    what = "Measure it:" if here else "Measure it on a file of held-out ShareGPT dialogues or Spec-Bench questions:"
    best = read_best(config)
    which = f", of step {best['steps']:,} with tau {best['best']['tau']:.3f} (keep: best)" if best else ""
    which += f"; no step was better than {config.init_from}" if best and not best["steps"] else ""
    return f"{config.out} {done} at step {step:,}{more}\nThe drafter: {config.out}{which}\n{what}\n  {line}"


def what_is_kept(run: Path) -> str:
    """What an interrupted run in the folder ``run`` has saved, and the command that continues it."""
    if latest := StateFolder(run).latest():
        step = int(latest.removeprefix("step-"))
        return f"the state after step {step:,} is kept in {run}; to go on from there: {command('--resume')}"
    if any((run / name).is_file() for name in EXPORTED):
        return f"no state was saved yet, only the drafter as it was, in {run}; delete that and start again: {command()}"
    return f"no state was saved yet, so nothing is kept; to start again: {command()}"
