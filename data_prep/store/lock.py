"""Locks of a store's folder, for processes on any machine that shares it. The kernel frees those of the dead.

``.lock-00001`` is held by the process of that rank while it writes; ``.lock`` by whoever begins or merges, for an
instant. The files stay: removing one would race with a process that is about to lock it.
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
    """Be the only one to begin or merge the store in ``path``; waits for another one, which takes moments.

    Raises:
        ValueError: the file system knows no locks.
    """
    with (path / LOCK).open("a+") as file:
        lock_file(path, file, fcntl.LOCK_EX)
        yield


class RankLock:
    """A rank's lock, to be taken under the ``folder_lock``. ``stale``: who held it and died without releasing it.

    Raises:
        ValueError: another process has the same rank, or one of another number of ranks writes there.
    """

    def __init__(self, path: Path, rank: Rank) -> None:
        mine = path / f"{LOCK}-{rank.index:05d}"
        self.others = 0  # that write now
        for file in sorted(path.glob(f"{LOCK}-*")):
            # Empty: its holder is just about to let it go.
            if file != mine and is_locked(file) and (holder := file.read_text().strip()):
                self.others += 1
                ranks = re.search(r"rank \d+ of (\d+)$", holder)
                count = int(ranks[1]) if ranks else 1
                if count != rank.count:
                    raise ValueError(
                        f"{path} is being written by {holder}, so by {count} processes, and this is one of "
                        f"{rank.count}; wait for them or stop them all, then go on with any number"
                    )
        self._file = mine.open("a+")
        try:
            lock_file(path, self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _read(self._file)
            self._file.close()
            raise ValueError(
                f"{path} is being written by {holder or 'another process'}; wait for it or stop it, or give this one "
                "its own --rank or another `out`"
            ) from None
        self.stale = _read(self._file) or None
        self._file.truncate(0)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        self._file.write(f"{who}, {rank.describe()}" if rank.count > 1 else who)
        self._file.flush()
        os.fsync(self._file.fileno())  # for those who read it on other machines

    def release(self) -> None:
        """Empty the file (a name in it means that its writer died) and let it go."""
        self._file.truncate(0)
        self._file.close()


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()


def is_locked(path: Path) -> bool:
    """Whether another process holds a file's lock.

    Raises:
        OSError: there is no such file.
        ValueError: the file system knows no locks.
    """
    with path.open("rb") as file:
        try:
            lock_file(path.parent, file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def lock_file(path: Path, file: IO[Any], how: int) -> None:
    """``fcntl.flock`` of a file in the folder ``path``.

    Raises:
        BlockingIOError: another process holds it, and ``how`` has LOCK_NB.
        ValueError: the file system knows no locks.
    """
    try:
        fcntl.flock(file, how)
    except BlockingIOError:
        raise
    except OSError as error:
        raise ValueError(
            f"the file system of {path} cannot lock files ({error}), so that two runs could write there at once; mount "
            "it with locks (Lustre: -o flock), or give an `out` elsewhere"
        ) from error
