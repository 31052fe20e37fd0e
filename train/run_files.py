"""The files of a run folder.

config.json, model.safetensors   the trained drafter (drafters.checkpoint)
run.json                         what it takes to run it again: config, arguments, commit, versions
metrics.jsonl, tensorboard/      figures by step
state/step-*/, state/latest      DeepSpeed's resumable state; the newest two, `latest` names the one that is whole
"""

import contextlib
import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from train.config import FREE_ON_RESUME, TrainConfig

KEPT_STATES = 2


class StateFolder:
    """``state/`` of a run: which checkpoint is whole, and room for the next."""

    def __init__(self, run: Path) -> None:
        self.path = run / "state"
        self._latest = self.path / "latest"

    def latest(self) -> str | None:
        """The tag of the newest whole checkpoint, or None."""
        return self._latest.read_text().strip() if self._latest.is_file() else None

    @staticmethod
    def tag(step: int) -> str:
        """The checkpoint's folder name."""
        return f"step-{step:08d}"

    def publish(self, tag: str) -> None:
        """Name ``tag`` as the newest whole one, atomically, and delete all but the newest two."""
        replace_text(self._latest, tag + "\n")
        tags = sorted(folder for folder in self.path.glob("step-*") if folder.name <= tag)
        for old in tags[:-KEPT_STATES]:
            shutil.rmtree(old, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` so that a kill leaves the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def check_run_folder(config: TrainConfig, resume: bool) -> None:
    """Refuse to mix two runs.

    Raises:
        ValueError: the folder holds something and ``resume`` is False; or there is nothing to resume; or the config has
            changed since in a way that would make the rest another training.
    """
    run = config.out
    if not resume:
        if run.exists() and any(run.iterdir()):
            raise ValueError(f"{run} is not empty: pass --resume to continue the run in it, or another out=")
        return
    if not (run / "run.json").is_file() or StateFolder(run).latest() is None:
        raise ValueError(
            f"--resume: {run} holds no checkpoint; start without --resume (and with another out= if it exists)"
        )
    before = json.loads((run / "run.json").read_text())["config"]
    now = config.model_dump(mode="json")
    changed = [f"{key} was {before.get(key)!r}, is {now[key]!r}" for key in now if before.get(key) != now[key]]
    changed = [line for line in changed if line.split()[0] not in FREE_ON_RESUME]
    if changed:
        raise ValueError(
            f"--resume: the config differs from the run in {run}: {'; '.join(changed)}; undo that or use another out="
        )


def describe_run(config: TrainConfig, arguments: list[str], ranks: int) -> dict[str, Any]:
    """What it takes to run it again."""
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "deepspeed", "safetensors")}
    return {
        "config": config.model_dump(mode="json"),
        "arguments": arguments,
        "ranks": ranks,
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **versions},
    }


def _commit() -> str | None:
    """The code's commit, with a + where the tree has changes; None outside of git."""
    here = Path(__file__).resolve().parent
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        ask = ["git", "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        return subprocess.run(ask, cwd=here, capture_output=True, text=True, check=True).stdout.strip()
    return None


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
