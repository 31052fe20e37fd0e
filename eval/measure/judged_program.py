"""Run a program that a model wrote, from standard input, within limits. It is a process of its own, without our code.

Its argument is a number of seconds. The first line is a word, which is written to standard output if the program comes
to its end. It is no sandbox against malice: the file system is as it is, but for the size of what is written.
"""

import contextlib
import io
import os
import resource
import sys
from pathlib import Path

SECONDS, MEMORY, WRITTEN = 5, 1 << 30, 1 << 20  # of the CPU; bytes


def limit(seconds: int) -> None:
    """What the process may use: so much of the CPU, no core dump, no child processes, little of everything else."""
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, WRITTEN),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # the machine allows less
            resource.setrlimit(what, (most, most))


def refuse(*_: object, **__: object) -> None:
    """In the place of what a solution has no use for."""
    raise PermissionError("not for a program that is judged")


def disarm() -> None:
    """Take from the program what could do harm by a slip: processes, deletion, sockets (where no namespace does)."""
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
    """Read, limit, run, and say that the end was reached."""
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
