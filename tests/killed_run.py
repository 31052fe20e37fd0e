"""Runs that kill themselves, each in a forked process.

A job is {"kind", "values", "point"}: train, die by SIGKILL at ``point``, and resume until the run is whole. Forking
from one process that has imported everything makes a life cost a second instead of ten.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_run

from train.run import files as run_files
from train.run import keep, state
from train.run.loop import TrainRun


def die(*_: Any, **__: Any) -> None:
    """As a kill -9 or a power cut: nothing is flushed, no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str) -> None:
    """Let this process die at ``point``."""
    name, _, value = point.partition(":")
    if name == "file":  # in the middle of the n-th file of states
        save, left = state.save_tensors, [int(value)]

        def dying(tensors: Any, path: Path) -> None:
            left[0] -= 1
            if left[0] == 0:
                path.write_bytes(b"\0" * 1000)
                die()
            save(tensors, path)

        state.save_tensors = dying  # type: ignore[attr-defined]
    elif name in ("unnamed", "named"):  # just before, or just after, `latest` names the n-th state
        replace: Callable[[Path, str], None] = run_files.replace_text
        left = [int(value)]

        def replacing(path: Path, text: str) -> None:
            left[0] -= path.name == "latest"
            here = path.name == "latest" and left[0] == 0
            if here and name == "unnamed":
                die()
            replace(path, text)
            if here:
                die()

        run_files.replace_text = replacing  # type: ignore[attr-defined]
    elif name == "keeping":  # in the middle of the n-th best weights
        written, left = keep.save_tensors, [int(value)]

        def breaking(tensors: Any, path: Path, metadata: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                path.write_bytes(b"\0" * 1000)
                die()
            written(tensors, path, metadata)

        keep.save_tensors = breaking  # type: ignore[attr-defined]
    elif name == "kept":  # when they are whole, and no state knows of them
        finish, left = keep.Keeper.save, [int(value)]

        def finishing(*arguments: Any) -> None:
            finish(*arguments)
            left[0] -= 1
            if left[0] == 0:
                die()

        keep.Keeper.save = finishing  # type: ignore[method-assign]
    else:
        assert name == "unexported"  # the state is published, its drafter is not
        TrainRun._export = die  # type: ignore[method-assign, assignment]


def live(job: dict[str, Any], resume: bool, point: str | None) -> int:
    """Train in a forked process; its exit status, negative if it was killed."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        if point:
            arm(point)
        tiny_run.train_here(job["kind"], job["values"], resume)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def kill_and_resume(jobs: str) -> int:
    """Every job, as JSON, to its end."""
    for job in json.loads(jobs):
        out = Path(job["values"]["out"])
        status = live(job, False, job["point"])
        if status != -signal.SIGKILL:
            sys.exit(f"{job['point']}: the run ended with {status} instead of a kill")
        resume = run_files.StateFolder(out).latest() is not None
        if not resume:
            shutil.rmtree(out, ignore_errors=True)  # killed before its first state
        if live(job, resume, None):
            sys.exit(f"{job['point']}: the run does not go on")
    return 0
