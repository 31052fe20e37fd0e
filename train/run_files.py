"""The files of a run folder.

config.json, model.safetensors   the trained drafter (drafters.checkpoint)
run.json                         what it takes to run it again: config, arguments, commit, versions
metrics.jsonl, tensorboard/      figures by step
summary.json, summary.png        what came out of it (train/summary.py makes them again)
state/step-*/, state/latest      resumable states (train/state.py): the newest two, `latest` names the newest
"""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from data_prep.manifest import StoreManifest
from drafters.provenance import cpu_cores, cpu_name, git_commit, library_versions, replace_text, sync_folder
from train.config import FREE_ON_RESUME, TrainConfig

KEPT_STATES = 2
# What metrics.jsonl tells of the machine rather than of the training; no two runs agree in it.
TIMED = ("tokens_per_second", "seconds", "data_wait", "mfu", "peak_memory_gb", "tau_seconds")


class StateFolder:
    """``state/`` of a run: which states are whole, and room for the next.

    A state is written under a temporary name, renamed, and only then named in ``latest``: a kill or a power cut at any
    point leaves ``latest`` naming a whole one.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "state"
        self._latest = self.path / "latest"

    def latest(self) -> str | None:
        """The tag of the newest whole state, or None."""
        return self._latest.read_text().strip() if self._latest.is_file() else None

    @staticmethod
    def tag(step: int) -> str:
        """The state's folder name."""
        return f"step-{step:08d}"

    def begin(self, tag: str) -> Path:
        """An empty folder to write ``tag`` into; what killed runs left half-written goes."""
        latest = self.latest() or ""
        for leftover in self.path.glob(".step-*"):
            shutil.rmtree(leftover)
        for unnamed in self.path.glob("step-*"):
            if unnamed.name > latest:
                shutil.rmtree(unnamed)
        folder = self.path / f".{tag}"
        folder.mkdir(parents=True)
        return folder

    def publish(self, tag: str) -> None:
        """Give what ``begin`` made its name, name it as the newest, and delete all but the newest two."""
        folder = self.path / f".{tag}"
        sync_folder(folder)
        folder.rename(self.path / tag)
        replace_text(self._latest, tag + "\n")
        for old in sorted(self.path.glob("step-*"))[:-KEPT_STATES]:
            shutil.rmtree(old, ignore_errors=True)

    def abandon(self, tag: str) -> None:
        """Remove what was written of a state that cannot be finished."""
        shutil.rmtree(self.path / f".{tag}", ignore_errors=True)


def check_run_folder(config: TrainConfig, resume: bool) -> None:
    """Refuse to mix two runs.

    Raises:
        ValueError: the folder holds something and ``resume`` is False; or there is nothing to resume; or the config has
            changed since in a way that would make the rest another training.
    """
    run = config.out
    if not resume:
        if run.exists() and any(run.iterdir()):
            if StateFolder(run).latest() is None:
                raise ValueError(f"{run} is not empty and holds no state to resume: empty it, or give another out=")
            raise ValueError(f"{run} is not empty: pass --resume to continue the run in it, or another out=")
        return
    if not (run / "run.json").is_file() or StateFolder(run).latest() is None:
        raise ValueError(f"--resume: {run} holds no checkpoint; delete it if it exists, and start without --resume")
    before = json.loads((run / "run.json").read_text())["config"]
    now = config.model_dump(mode="json")
    changed = [f"{key} was {before.get(key)!r}, is {now[key]!r}" for key in now if before.get(key) != now[key]]
    changed = [line for line in changed if line.split()[0] not in FREE_ON_RESUME]
    if changed:
        raise ValueError(
            f"--resume: the config differs from the run in {run}: {'; '.join(changed)}; undo that or use another out="
        )


def describe_data(manifest: StoreManifest) -> dict[str, Any]:
    """What tells a run's dialogues from others: the data file's hash, and how many of it were taken."""
    return {"source": manifest.source_digest, "dialogues": manifest.dialogues, "tokens": manifest.tokens}


def check_same_data(run: Path, data: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError where the dialogues are no longer those that the run in the folder ``run`` began with.

    Its position in the data would point at others, some of which it has seen already.
    """
    before = json.loads((run / "run.json").read_text()).get("data", {})
    for split, now in data.items():
        if split in before and before[split] != now:
            raise ValueError(
                f"--resume: the {split} dialogues changed since the run in {run} began ({before[split]} then, {now} "
                "now); restore the data file or the features, or use another out="
            )


def describe_run(config: TrainConfig, arguments: list[str], ranks: int) -> dict[str, Any]:
    """What it takes to run it again."""
    return {
        "config": config.model_dump(mode="json"),
        "arguments": arguments,
        "ranks": ranks,
        "hardware": {
            "cpu": cpu_name(),
            "cpu_cores": cpu_cores(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "commit": git_commit(Path(__file__).resolve().parent),
        "versions": library_versions("torch", "transformers", "deepspeed", "safetensors"),
    }


class Metrics:
    """metrics.jsonl and TensorBoard. A resumed run first drops the lines after its checkpoint."""

    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = run / "metrics.jsonl"
        kept = [row for row in read_metrics(run) if row["step"] <= step]
        replace_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        self.board = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)

    def add(self, step: int, values: dict[str, float]) -> None:
        """Append one line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self.board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush TensorBoard's events."""
        self.board.close()


def read_metrics(run: Path) -> list[dict[str, float]]:
    """The lines of a run's metrics.jsonl; a line cut by a kill is left out."""
    path = run / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
