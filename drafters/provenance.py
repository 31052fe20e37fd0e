"""What a result was made with, and files that a kill leaves whole: shared by the library and its programs."""

import contextlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

UNCOMMITTED = " with uncommitted changes"


def git_commit(root: Path) -> str | None:
    """The commit of the code in the folder ``root``; None where that is no checkout, or git is missing.

    ``UNCOMMITTED`` is appended if a tracked file of the checkout differs from the commit, or if there is a Python file
    that git neither tracks nor ignores, which could be imported. Other untracked files (data, notes) do not count.
    """

    def git(*arguments: str) -> str:
        ask = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return ask.stdout.strip()

    try:
        if not git("ls-files"):  # installed inside somebody else's checkout, whose commit says nothing about this code
            return None
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
        changed = changed or git("ls-files", "--others", "--exclude-standard", "--", ":/*.py")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + UNCOMMITTED if changed else commit


def library_versions(*names: str) -> dict[str, str]:
    """Versions of the installed libraries ``names`` (torch's with its build, ``+cu130``), and Python's: ``python``.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed.
    """
    import torch  # here, for what needs no more of this module than to write files

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


def cpu_cores() -> int | None:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 so that a kill or a power cut leaves the old file or the new one, never a part.

    Raises:
        OSError: it cannot be written, and the error names ``path``; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path), temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with naming(path):
            temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of writing ``path`` name it: that of a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_folder(path: Path) -> None:
    """Make the renames in a folder survive a power cut; some file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
