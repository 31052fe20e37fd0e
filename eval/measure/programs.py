"""Programs that a model wrote, run one by one in processes of their own: do they pass their tests?"""

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
# Without root's rights, a network and sight of other processes; what it started ends with it.
NAMESPACES = ("unshare", "--user", "--net", "--pid", "--fork", "--kill-child")


@functools.cache
def namespaces() -> tuple[str, ...]:
    """What starts a process without a network here; nothing where the system does not let us."""
    if shutil.which(NAMESPACES[0]) is None:
        return ()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if subprocess.run([*NAMESPACES, "true"], capture_output=True, timeout=10).returncode == 0:
            return NAMESPACES
    return ()


def confinement() -> str:
    """How programs are held, for the report."""
    network = "without a network" if namespaces() else "sockets refused in Python alone, for want of namespaces"
    return f"in a process each, {network}, {SECONDS} s of CPU and {MEMORY >> 30} GiB of memory"


@functools.lru_cache(maxsize=4096)
def passes(program: str, seconds: int = SECONDS) -> bool:
    """Whether the program, its tests included, runs to its end. Lossless methods write the same: each is run once.

    Args:
        seconds: of the CPU; twice as many by the clock.
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
