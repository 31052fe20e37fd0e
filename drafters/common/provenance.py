"""Which code, libraries and processor made a result. Imports no torch: programs check their settings with it first."""

import contextlib
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

UNCOMMITTED = " with uncommitted changes"
CONFIGS = ("drafters", "data_prep", "train", "eval", "configs")  # folders where a new YAML file counts as a change


@cache
def code_state() -> tuple[str | None, bool | None]:
    """The commit, and True if the tree differs from it, new code and configs included; None outside of git.

    Asked once in a process, which runs the code that it imported at its start.
    """
    root = Path(__file__).resolve().parents[2]
    commit = git_commit(root)
    if commit is None:
        return None, None
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", *(f"{name}/*.yaml" for name in CONFIGS))
    return commit.removesuffix(UNCOMMITTED), commit.endswith(UNCOMMITTED) or bool(new)


def git_commit(root: Path) -> str | None:
    """The commit of the code in the folder ``root``; None if that is no checkout, or git is missing.

    ``UNCOMMITTED`` is appended if a tracked file differs from the commit, or if the checkout has a Python file that git
    neither tracks nor ignores, which could be imported. Other untracked files (data, notes) do not count.
    """
    try:
        if not _git(root, "ls-files"):  # installed inside another project's checkout, whose commit says nothing
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
    """Versions of the installed libraries ``names`` (torch's with its build, ``+cu130``), and of Python.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed.
    """
    # torch's package metadata may lack the build.
    versions = {
        name: str(import_module(name).__version__) if name == "torch" else metadata.version(name) for name in names
    }
    return {"python": platform.python_version(), **versions}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences of two mappings, as ``["seed was 0, is 1", ...]``, in the order of the keys of ``now``."""
    keys = [*now, *(key for key in before if key not in now)]
    return [f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)]


def load_average() -> float | None:
    """Processes that were ready to run, averaged over the last minute; None if the system does not tell."""
    with contextlib.suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


def cpu_name() -> str:
    """The processor's name, from the system."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
