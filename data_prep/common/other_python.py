"""A program of this checkout, run by the Python of another environment: both sides write lines of JSON.

The program imports the standard library, this module, and what its environment has.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Say = Callable[[Any], None]  # sends a JSON value as a line


class OtherPython:
    """``python -m module`` in its own session, with stderr in the file ``log``; OSError if it cannot be started."""

    def __init__(self, python: Path, module: str, log: Path) -> None:
        self.log = log
        # The other environment's libraries and this checkout's modules, but not this environment's libraries.
        path = os.pathsep.join([str(python.absolute().parent), os.environ.get("PATH", "")])
        env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "PYTHONNOUSERSITE": "1"}
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
                env=env,
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def say(self, value: Any) -> None:
        """Send a value; if the process has ended, ``hear`` shows it."""
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps(value) + "\n")
            self._stdin.flush()

    def hear(self) -> str:
        """Return the next line; without a line end if the process has closed its output."""
        return self._stdout.readline()

    def status(self) -> int | None:
        """Return the exit status of a process that has closed its output; None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(10)
        return None

    def last_line(self) -> str:
        """Return the last line of the log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"the end of {self.log}: {lines[-1].strip()}" if lines else f"{self.log} is empty"

    def kill(self) -> None:
        """End the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close its input, which ends it; after ten seconds end it and its children."""
        with contextlib.suppress(OSError):  # the process is gone
            self._stdin.close()
        self.status()
        self.kill()
        self._process.wait()
        self._stdout.close()


@contextlib.contextmanager
def answering() -> Iterator[Say]:
    """Give the program's function that answers; its other output goes to stderr, and an error is answered, too."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        yield say
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise


def questions() -> Iterator[Any]:
    """Yield the values that the other side sends, until it closes."""
    return map(json.loads, sys.stdin)
