"""Where and from what a figure was measured, so that anyone can measure it again."""

import contextlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .model.target import TargetModel
from .provenance import UNCOMMITTED, cpu_cores, cpu_name, git_commit, library_versions

LIBRARIES = ("torch", "transformers", "numpy")
CONFIGS = ("drafters", "data_prep", "train", "eval", "configs")  # folders where a new YAML file counts as a change


def environment(target: TargetModel) -> dict[str, Any]:
    """Target, machine, libraries, commit and date. ``load_average`` tells whether other work disturbed the timing."""
    return {
        "target": {
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint(),
            "parameters": target.parameters,
        },
        "dtype": str(target.dtype).removeprefix("torch."),
        "engine": target.engine,
        "quantize": target.quantize,
        "device": str(target.device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": load_average(),
    } | machine(target.device)


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, threads, libraries and commit."""
    commit, dirty = _commit()
    return {
        "cpu": cpu_name(),
        "cpu_cores": cpu_cores(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "versions": library_versions(*LIBRARIES),
        "commit": commit,
        "dirty": dirty,
    }


def load_average() -> float | None:
    """Processes that wanted to run, averaged over the last minute; None where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


def _commit() -> tuple[str | None, bool | None]:
    """The code's commit and whether the tree differs from it, new code and configs included; None outside of git."""
    root = Path(__file__).resolve().parents[1]
    commit = git_commit(root)
    if commit is None:
        return None, None
    clean = commit.removesuffix(UNCOMMITTED)
    command = ["git", "ls-files", "--others", "--exclude-standard", "--", *CONFIGS]
    new = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return clean, clean != commit or any(name.endswith(".yaml") for name in new)
