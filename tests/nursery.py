"""A process that has imported everything and done nothing yet, and forks others in which tests train.

A training as a process of its own takes some seconds of imports and tenths of one of work. A test's process cannot be
forked for it: torch refuses gradients in the fork of a process that has computed some.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_here: socket.socket | None = None


def start(prepare: Callable[[], None]) -> None:
    """Fork it from this process, which has imported torch and not used it; it calls ``prepare`` when first asked."""
    global _here
    _here, there = socket.socketpair()
    if os.fork() == 0:
        _here.close()
        _serve(there, prepare)
    there.close()


class Process:
    """One that was forked; as much of ``subprocess.Popen`` as tests need. What it writes is in ``log``."""

    def __init__(self, log: Path) -> None:
        self.log, self.returncode = log, None
        self._told = _told(log)
        deadline = time.monotonic() + 300  # the first one waits for the imports
        while not self._lines():
            assert time.monotonic() < deadline, f"nothing was forked; see {log}"
            time.sleep(0.001)
        self.pid = self._lines()[0]

    def _lines(self) -> list[int]:
        """Its id, and how it ended, as soon as these are known."""
        return [int(line) for line in self._told.read_text().split("\n")[:-1]] if self._told.exists() else []

    def poll(self) -> int | None:
        """Its status once it has ended: negative for a signal."""
        if self.returncode is None:
            self.returncode = (*self._lines(), None)[1]
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        """Until it has ended; it is killed, and an AssertionError raised, where that takes more seconds."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"process {self.pid} took more than {timeout} s: {self.log.read_text()[-3000:]}")
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """It and what it has started."""
        with suppress(ProcessLookupError):  # it may have ended, and that not been written down yet
            if self.poll() is None:
                os.killpg(self.pid, signal.SIGKILL)


def begin(function: str, argument: str, environment: dict[str, str], log: Path) -> Process:
    """Start ``module.function(argument)``, whose value is the status, in a process and session of its own."""
    assert _here is not None
    _told(log).unlink(missing_ok=True)
    job = {"function": function, "argument": argument, "environment": environment, "log": str(log)}
    _here.sendall(json.dumps(job).encode() + b"\n")
    return Process(log)


def run(function: str, argument: str, environment: dict[str, str], log: Path, seconds: float) -> int:
    """The status with which ``module.function(argument)`` ends."""
    return begin(function, argument, environment, log).wait(seconds)


def _told(log: Path) -> Path:
    return log.with_name(f"{log.name}.process")


def _serve(connection: socket.socket, prepare: Callable[[], None]) -> NoReturn:
    """Until the process at the other end is gone."""
    with connection.makefile() as jobs:
        for number, job in enumerate(jobs):
            if not number:
                prepare()
                gc.collect()
                gc.freeze()  # no child needs to walk through what was imported
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not os.fork():
                _watch(json.loads(job))
    os._exit(0)


def _watch(job: dict[str, Any]) -> NoReturn:
    """Fork the process of its own, and write down how it ends."""
    child = os.fork()
    if not child:
        _be(**job)
    with _told(Path(job["log"])).open("w", buffering=1) as told:
        told.write(f"{child}\n")
        told.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
    os._exit(0)


def _be(function: str, argument: str, environment: dict[str, Any], log: str) -> NoReturn:
    """The process of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    module, name = function.split(".")
    try:
        os._exit(getattr(importlib.import_module(module), name)(argument))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
