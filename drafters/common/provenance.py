"""Where, when and with what a result was made, so that anyone can make it again."""

import contextlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafters.common.wording import dtype_name

if TYPE_CHECKING:
    import torch

    from drafters.model.target import TargetModel

UNCOMMITTED = " with uncommitted changes"
MEASURED_WITH = ("torch", "transformers", "numpy")
CONFIGS = ("drafters", "data_prep", "train", "eval", "configs")  # folders where a new YAML file counts as a change


def environment(target: "TargetModel") -> dict[str, Any]:
    """What a figure of ``target`` was measured with, and what ``measured_on`` says.

    Of a target that was tuned with its drafter (``joint:`` of train/medusa.py): which one it was.
    """
    tuned_from = getattr(target.config, "tuned_from", None)
    return {
        "target": {
            "name": target.name,
            "revision": target.revision,
            "fingerprint": target.fingerprint(),
            "parameters": target.parameters,
            **({"tuned_from": tuned_from} if tuned_from else {}),
        },
        "dtype": dtype_name(target.dtype),
        "engine": target.engine,
        "quantize": target.quantize,
    } | measured_on(target.device)


def measured_on(device: "torch.device") -> dict[str, Any]:
    """Device, date and load beside ``machine``; ``load_average`` tells whether other work disturbed the timing."""
    return {
        "device": str(device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": load_average(),
    } | machine(device)


def machine(device: "torch.device") -> dict[str, Any]:
    """Processor, threads, libraries and commit."""
    from drafters.common.threads import idle_threads  # late: it imports torch, and a program's first seconds do without

    commit, dirty = code_state()
    return {
        **hardware(device),
        "threads": idle_threads(),
        "platform": platform.platform(),
        "versions": library_versions(*MEASURED_WITH),
        "commit": commit,
        "dirty": dirty,
    }


def code_state() -> tuple[str | None, bool | None]:
    """The commit, and whether the tree differs from it, new code and configs included; None outside of git."""
    root = Path(__file__).resolve().parents[2]
    commit = git_commit(root)
    if commit is None:
        return None, None
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *(f"{name}/*.yaml" for name in CONFIGS))
    return commit.removesuffix(UNCOMMITTED), commit.endswith(UNCOMMITTED) or bool(new)


def hardware(device: "torch.device") -> dict[str, Any]:
    """Processor with its vector instructions, its cores for this process, and GPU."""
    import torch

    from drafters.common.precision import cpu_instructions
    from drafters.common.threads import cpu_cores

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": cpu_name(), "cpu_instructions": cpu_instructions(), "cpu_cores": cpu_cores(), "gpu": gpu}


def load_average() -> float | None:
    """Processes that wanted to run, averaged over the last minute; None where the system does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


def git_commit(root: Path) -> str | None:
    """The commit of the code in the folder ``root``; None where that is no checkout, or git is missing.

    ``UNCOMMITTED`` is appended if a tracked file of the checkout differs from the commit, or if there is a Python file
    that git neither tracks nor ignores, which could be imported. Other untracked files (data, notes) do not count.
    """
    try:
        if not _git(root, "ls-files"):  # installed inside somebody else's checkout, whose commit says nothing
            return None
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
        changed = changed or _git(root, "ls-files", "--others", "--exclude-standard", "--", ":/*.py")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + UNCOMMITTED if changed else commit


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def library_versions(*names: str) -> dict[str, str]:
    """Versions of the installed libraries ``names`` (torch's with its build, ``+cu130``), and Python's: ``python``.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed.
    """
    import torch

    # A package's metadata may leave torch's build out.
    found = {name: str(torch.__version__) if name == "torch" else metadata.version(name) for name in names}
    return {"python": platform.python_version(), **found}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """``["seed was 0, is 1", ...]``: in what two mappings differ, by the order of their keys in ``now``."""
    keys = [*now, *(key for key in before if key not in now)]
    return [f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)]


def peak_memory_bytes(device: "torch.device") -> dict[str, int | None]:
    """The most memory this process held so far, on the host and on the device (None: the device is the host)."""
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "device": on_device}


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
