"""A process that has imported everything and done nothing yet, and forks others in which tests train.

A training as a process of its own takes some seconds of imports and tenths of one of work. A test's process cannot be
forked for it: torch refuses gradients in the fork of a process that has computed some.
"""

import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
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


def run(function: str, argument: str, environment: dict[str, str], log: Path, seconds: float) -> int:
    """The status with which ``module.function(argument)`` ends in a process of its own, which writes to ``log``."""
    assert _here is not None
    job = {"function": function, "argument": argument, "environment": environment, "log": str(log)}
    _here.sendall(json.dumps(job).encode() + b"\n")
    with _here.makefile() as answers:
        process = int(answers.readline())
        _here.settimeout(seconds)
        try:
            return int(answers.readline())
        except TimeoutError:
            os.killpg(process, signal.SIGKILL)
            _here.settimeout(None)
            _here.recv(100)  # that it ended
            raise AssertionError(f"{function} took more than {seconds} s") from None
        finally:
            _here.settimeout(None)


def _serve(connection: socket.socket, prepare: Callable[[], None]) -> NoReturn:
    """Until the process at the other end is gone."""
    with connection.makefile() as jobs:
        for number, job in enumerate(jobs):
            if not number:
                prepare()
            child = os.fork()
            if not child:
                _be(**json.loads(job))
            connection.sendall(f"{child}\n".encode())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            connection.sendall(f"{status}\n".encode())
    os._exit(0)


def _be(function: str, argument: str, environment: dict[str, Any], log: str) -> NoReturn:
    """The process of its own."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    module, name = function.split(".")
    try:
        os._exit(getattr(importlib.import_module(module), name)(argument))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
