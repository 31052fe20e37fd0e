"""Run a program from standard input that a model wrote, with limits, in a process without our code.

The argument is a number of seconds. The first line of input is a word, which is written to standard output if the
program reaches its end. It is no sandbox against malice: the file system is open, except for the size of writes.
"""

import contextlib
import io
import os
import resource
import sys
from pathlib import Path

SECONDS, MEMORY, WRITTEN = 5, 1 << 30, 1 << 20  # of CPU time; bytes; bytes


def limit(seconds: int) -> None:
    """Limit CPU time, memory and writes; forbid core dumps and child processes."""
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, WRITTEN),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # the machine has a lower limit
            resource.setrlimit(what, (most, most))


def refuse(*_: object, **__: object) -> None:
    """Replace functions that a solution does not need."""
    raise PermissionError("not for a program that is judged")


def disarm() -> None:
    """Disable functions that could do harm by accident: processes, deletion, sockets (if no namespace does)."""
    import builtins
    import shutil
    import socket
    import subprocess

    names = (
        "chmod chown fork forkpty kill killpg posix_spawn remove removedirs rename renames replace rmdir system "
        "truncate unlink execv execve spawnv spawnve"
    )
    for name in names.split():
        setattr(os, name, refuse)
    for module, names in ((shutil, "rmtree move chown"), (subprocess, "Popen"), (socket, "socket create_connection")):
        for name in names.split():
            setattr(module, name, refuse)
    builtins.input = refuse  # type: ignore[assignment]


def main() -> None:
    """Read the program, set limits, run it, and write the word at its end."""
    word, program = sys.stdin.readline(), sys.stdin.read()
    reached = os.dup(1)
    limit(int(sys.argv[1]))
    disarm()
    sys.stdin = io.StringIO()
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        exec(compile(program, "<answer>", "exec"), {"__name__": "__main__"})
    os.write(reached, word.encode())


if __name__ == "__main__":
    main()
