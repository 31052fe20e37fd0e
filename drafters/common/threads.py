"""CPU threads by the load: the threads of an operation wait for each other, so one that is delayed delays all.

Beside one busy process on two cores, two threads decoded 40 tokens/s and one thread 540 (shipped target, 16 rows). A
program calls ``set_threads`` or ``fit_threads`` at its start, and ``fit_threads`` within its loop.
"""

import contextlib
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

EVERY = 2.0  # seconds from one look at the load to the next
FIRST_LOOK = 0.25  # seconds
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "200000 100000": 200 ms of CPU time each 100 ms; "max 100000": no limit

_log = logging.getLogger(__name__)


@dataclass
class Look:
    """CPU seconds used until ``time`` on the cores of this process: by all processes, and by it and its children."""

    time: float
    all: float
    ours: float

    @classmethod
    def now(cls) -> "Look":
        cores = psutil.cpu_times(percpu=True)
        if hasattr(os, "sched_getaffinity"):
            mine = os.sched_getaffinity(0)
            cores = [times for core, times in enumerate(cores) if core in mine] or cores
        none = "idle", "iowait", "guest", "guest_nice"  # a guest's time is in the user's already
        busy = sum(sum(times) - sum(getattr(times, name, 0.0) for name in none) for times in cores)
        process, ours = psutil.Process(), 0.0
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has ended
                ours += sum(member.cpu_times()[:4])  # children that have ended included
        return cls(time.monotonic(), busy, ours)


def own_cores() -> int:
    """Number of cores that this process may run on, by its affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_cores() -> int:
    """Number of cores that this process may keep busy: ``own_cores``, and its control group's quota."""
    cores = own_cores()
    with contextlib.suppress(OSError, ValueError):  # no such group, or no limit
        quota, period = map(float, QUOTA.read_text().split())
        cores = min(cores, max(1, math.ceil(quota / period)))
    return cores


def threads_for(before: Look, now: Look, cores: int, most: int) -> int:
    """Return the number of cores, at most ``most``, that other processes left free between two looks.

    Args:
        cores: all that the looks are about. most: the process's own limit, as of a quota.
    """
    others = max(0.0, (now.all - before.all) - (now.ours - before.ours)) / (now.time - before.time)
    return max(1, min(most, math.floor(cores - others + 0.5)))


_before: Look | None = None
_threads: int | None = None  # threads that the look before called for
_most: int | None = None  # threads on an idle machine; 0: the user has set them
_fewest: int | None = None  # threads at the time of the highest load


def idle_threads() -> int:
    """Number of CPU threads that this process uses on an idle machine, which does not depend on the load."""
    return _most or torch.get_num_threads()


def fewest_threads() -> int:
    """Number of CPU threads that this process used at the highest load so far."""
    return min(_fewest or idle_threads(), idle_threads())


def set_threads(threads: int | None) -> None:
    """Set the number of CPU threads as a config's ``threads`` says; None: by the load."""
    fit_threads() if threads is None else fix_threads(threads)


def fix_threads(threads: int) -> None:
    """Let torch use ``threads`` CPU threads and ignore the load."""
    global _most
    torch.set_num_threads(threads)
    _most = 0


def fit_threads(most: int | None = None) -> None:
    """Let torch use a thread for each core that other processes leave free; looks at the load every two seconds.

    The first look counts at once, later ones when two in a row agree: a burst of a second changes nothing.

    It does nothing if OMP_NUM_THREADS is set, or after ``fix_threads``.

    Args:
        most: threads on an idle machine; None: as torch chose, at most the cores that this process may use.
    """
    global _before, _threads, _most, _fewest
    if _most is None or most is not None:
        _most = most or (0 if "OMP_NUM_THREADS" in os.environ else min(torch.get_num_threads(), cpu_cores()))
    if _most <= 1 or (_before is not None and time.monotonic() - _before.time < EVERY):
        return
    if _before is None:
        _before = Look.now()
        time.sleep(FIRST_LOOK)
    now = Look.now()
    threads, last = threads_for(_before, now, own_cores(), _most), _threads
    _before, _threads = now, threads
    if last not in (None, threads):
        return
    _fewest = min(threads, _fewest or threads)
    if threads != torch.get_num_threads():
        _log.warning("%d CPU threads from here on, of %d: what other processes leave free", threads, _most)
        torch.set_num_threads(threads)
