"""A run's last lines: the drafter's folder, the command that measures it, and how to continue after a kill."""

import json
import shlex
from pathlib import Path
from typing import Any

from drafters.model.ends import FrozenEnds
from train.core.config import TrainConfig
from train.data.packing import Source, TrainData
from train.run.answers import shipped
from train.run.files import StateFolder, read_object
from train.run.state import PROGRESS

UNTRAINED = ("prompt_lookup", "lookahead")  # baselines that need neither training nor a model
EXPORTED = ("config.json", "adapter_config.json")  # one of them is in every export
ANSWER = 96  # most new tokens; for a target with a short context, a quarter of it


def finished_at(config: TrainConfig, train: Source) -> int | None:
    """The last step of the run in ``out``, if it is finished and all files are written; else None."""
    state = StateFolder(config.out).newest()
    progress = read_object(state / PROGRESS) if state else {}
    step, seconds = progress.get("step"), progress.get("seconds")
    if not isinstance(step, int) or not isinstance(seconds, int | float):
        return None
    last = config.last_step(TrainData(train, config).steps_in)
    by_step, by_clock = last is not None and step >= last, config.minutes and seconds >= 60 * config.minutes
    if not by_step and not by_clock:
        return None
    exported = read_object(config.out / config.provenance_file).get("training", {}).get("steps")
    summary = read_object(config.out / "summary.json")
    whole = exported == step and (config.out / config.weights_file).is_file()
    return step if whole and summary.get("ended") == "finished" and summary.get("steps") == step else None


def farewell(config: TrainConfig, step: int, heldout: Source, ends: FrozenEnds, already: bool = False) -> str:
    """The last lines of a run that finished after ``step`` steps; ``already``: before this start, so nothing changed.

    The command's prompts are the held-out dialogues, or FILE if they are not in a local file.
    """
    done = "is already finished" if already else "finished"
    more = "; nothing was changed. A higher limit (steps, epochs, minutes) continues it" if already else ""
    line, file = measure_command(config, heldout.manifest.source, ends)
    what = "Measure it:" if file else "Measure it on a file of held-out ShareGPT dialogues or Spec-Bench questions:"
    return f"{config.out} {done} at step {step:,}{more}\nThe drafter: {config.out}\n{what}\n  {line}"


def measure_command(config: TrainConfig, source: str, ends: FrozenEnds) -> tuple[str, bool]:
    """The command that measures the drafter in ``out``, and whether its prompts are a local file."""
    here = Path(source).is_file()
    context = getattr(ends.config, "max_position_embeddings", None) or 2048
    answer = min(ANSWER, max(1, context // 4))
    drafters: list[dict[str, Any]] = [{"drafter": name} for name in UNTRAINED]
    drafters.append(config.measured_by)
    overrides: dict[str, Any] = {
        **{f"target.{key}": value for key, value in config.measured_target.items()},
        "prompts.file": source if here else "FILE",
        "prompts.max_prompt_tokens": min(512, context - answer),
        "max_new_tokens": answer,
        "drafters": json.dumps(drafters),
        "out": config.out.with_name(f"{config.out.name}-speed"),
    }
    words = ["python", "-m", "eval.speed", "--config", shipped("quickstart/speed.yaml")]
    return shlex.join([*words, *(f"{key}={value}" for key, value in overrides.items())]), here


def what_is_kept(run: Path, again: str, resumed: str) -> str:
    """What an interrupted run in the folder ``run`` has saved, and how to continue.

    ``again``: the command that started it; ``resumed``: that command with --resume.
    """
    latest = StateFolder(run).latest()
    if latest:
        step = int(latest.removeprefix("step-"))
        return f"the state after step {step:,} is kept in {run}; to go on from there: {resumed}"
    if any((run / name).is_file() for name in EXPORTED):
        return f"no state was saved yet, only the drafter as it was, in {run}; delete that and start again: {again}"
    return f"no state was saved yet, so nothing is kept; to start again: {again}"
