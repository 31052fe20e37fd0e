"""Run programs that a model wrote, each in a process of its own, to see whether they pass their tests."""

import contextlib
import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from eval.measure.judged_program import MEMORY, SECONDS

CHILD = Path(__file__).with_name("judged_program.py")
# No root rights, no network, no view of other processes; children end with it.
NAMESPACES = ("unshare", "--user", "--net", "--pid", "--fork", "--kill-child")


@functools.cache
def namespaces() -> tuple[str, ...]:
    """Return the command that starts a process without a network; empty if the system does not allow it."""
    if shutil.which(NAMESPACES[0]) is None:
        return ()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=10).returncode == 0:
            return NAMESPACES
    return ()


def confinement() -> str:
    """Return how programs are confined, for the report."""
    network = (
        "without a network" if namespaces() else "sockets refused only in Python, because namespaces are not available"
    )
    return f"in a process each, {network}, {SECONDS} s of CPU and {MEMORY >> 30} GiB of memory"


@functools.lru_cache(maxsize=4096)
def passes(program: str, seconds: int = SECONDS) -> bool:
    """Return whether the program, with its tests, runs to its end; equal programs are run once.

    Args:
        seconds: limit of CPU time; the limit of wall-clock time is two times this.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="judged-") as folder:
        child = subprocess.Popen(
            [*namespaces(), sys.executable, "-I", "-B", "-X", "utf8", str(CHILD), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(f"{word}\n{program}".encode("utf-8", "replace"), 2.0 * seconds)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
    return said.decode("utf-8", "replace").strip() == word
