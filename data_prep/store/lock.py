"""Locks of a store's folder, for processes on all machines that share it. The kernel frees the locks of dead processes.

A process holds ``.lock-00001`` of its rank while it writes, and ``.lock`` for a moment while it begins or merges a
store. The files are never removed, because another process may be about to lock them.
"""

import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from data_prep.common.ranks import Rank

LOCK = ".lock"


@contextlib.contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Hold the folder's lock, after waiting for it; raises ValueError as ``lock_file``."""
    with (path / LOCK).open("a+") as file:
        lock_file(path, file, fcntl.LOCK_EX)
        yield


class RankLock:
    """A rank's lock, taken under the ``folder_lock``.

    Raises ValueError if another process has this rank, or a process of another number of ranks is writing.
    """

    def __init__(self, path: Path, rank: Rank) -> None:
        mine = path / f"{LOCK}-{rank.index:05d}"
        self.others = 0  # ranks that are writing now
        for file in sorted(path.glob(f"{LOCK}-*")):
            # An empty file is about to be released.
            if file != mine and is_locked(file) and (holder := file.read_text().strip()):
                self.others += 1
                ranks = re.search(r"rank \d+ of (\d+)$", holder)
                count = int(ranks[1]) if ranks else 1
                if count != rank.count:
                    raise ValueError(
                        f"{path} is being written by {holder}, so by {count} processes, and this is one of "
                        f"{rank.count}; wait for them or stop them all, then continue with any number"
                    )
        self._file = mine.open("a+")
        try:
            lock_file(path, self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = self._holder()
            self._file.close()
            raise ValueError(
                f"{path} is being written by {holder or 'another process'}; wait for it or stop it, or give this one "
                "its own --rank or another `out`"
            ) from None
        self._file.truncate(0)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        self._file.write(f"{who}, {rank.describe()}" if rank.count > 1 else who)
        self._file.flush()
        os.fsync(self._file.fileno())  # so that other machines can read it

    def release(self) -> None:
        """Empty the file and free the lock."""
        self._file.truncate(0)
        self._file.close()

    def _holder(self) -> str:
        self._file.seek(0)
        return self._file.read().strip()


def is_locked(path: Path) -> bool:
    """Whether another process holds a file's lock; raises OSError if there is no such file."""
    with path.open("rb") as file:
        try:
            lock_file(path.parent, file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def lock_file(path: Path, file: IO[Any], how: int) -> None:
    """``fcntl.flock`` of a file in the folder ``path``; raises ValueError if the file system has no locks."""
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ValueError(
            f"the file system of {path} cannot lock files ({error}), so two runs could write there at once; mount it "
            "with locks (Lustre: -o flock), or give an `out` elsewhere"
        ) from error
