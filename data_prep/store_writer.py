"""Writing a feature store so that a kill, a full disk or a second process never leaves a wrong one behind.

A shard is written under a temporary name, flushed to disk and renamed; then the manifest is replaced in the same way.
What the manifest does not list does not exist: a run that died between the two writes that shard again.
"""

import bisect
import contextlib
import errno
import fcntl
import itertools
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from .store import MANIFEST, ShardEntry, StoreManifest, check_same, file_sha256, read_manifest

LOCK = ".lock"
TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Shard:
    """Whole dialogues laid end to end; ``features`` and each tap are [tokens, H] in the dtype to be stored."""

    ids: list[str]
    lengths: list[int]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    taps: dict[int, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The shard's tensors by the names of the store's format."""
        offsets = torch.tensor([0, *self.lengths]).cumsum(0)
        named = {"input_ids": self.input_ids.int(), "loss_mask": self.loss_mask.bool(), "offsets": offsets}
        return {**named, "features": self.features, **{f"tap_{layer}": tap for layer, tap in self.taps.items()}}


class StoreWriter:
    """Writes one split's store, as a context manager that holds the folder's lock.

    Args:
        path: the store's folder; it is made if missing. A half-written store in it is continued.
        header: the manifest's settings, with all counts zero.

    Raises (on entering):
        ValueError: another process writes there, the folder holds something else, or a store made with other settings.
    """

    def __init__(self, path: str | Path, header: StoreManifest) -> None:
        self.path = Path(path)
        self.manifest = header.model_copy(deep=True)
        self.stale_writer: str | None = None  # who held the lock and died without releasing it
        self._lock: IO[str] | None = None

    def __enter__(self) -> "StoreWriter":
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._take_lock()
        try:
            self._continue_or_start()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def write(self, shard: Shard) -> None:
        """Check, write and list one shard.

        Raises:
            ValueError: NaN or infinite values; the message names the dialogue.
            OSError: the disk is full or the file cannot be written; the shards before it stay.
        """
        self._check_finite(shard)
        name = f"shard-{len(self.manifest.shards):05d}.safetensors"
        temporary = self.path / (name + TEMPORARY)
        try:
            _save(shard.tensors(), temporary)
            digest, size = file_sha256(temporary), temporary.stat().st_size
            temporary.rename(self.path / name)
            entry = ShardEntry(
                file=name, dialogues=len(shard.lengths), tokens=sum(shard.lengths), bytes=size, sha256=digest
            )
            self._update_manifest(
                shards=[*self.manifest.shards, entry],
                dialogues=self.manifest.dialogues + entry.dialogues,
                tokens=self.manifest.tokens + entry.tokens,
                response_tokens=self.manifest.response_tokens + int(shard.loss_mask.sum()),
            )
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._explain(error, name) from error

    def finish(self, dropped: dict[str, int], changed: dict[str, int]) -> StoreManifest:
        """Mark the store complete."""
        self._update_manifest(
            dropped=dict(sorted(dropped.items())), changed=dict(sorted(changed.items())), complete=True
        )
        return self.manifest

    def _continue_or_start(self) -> None:
        for leftover in self.path.glob("*" + TEMPORARY):
            leftover.unlink()
        if (self.path / MANIFEST).exists():
            found = read_manifest(self.path)
            check_same(self.path, found, self.manifest)
            self.manifest = found
            return
        foreign = sorted(item.name for item in self.path.iterdir() if item.name != LOCK)
        if foreign:
            raise ValueError(
                f"{self.path} is no feature store, yet holds {', '.join(foreign[:3])}; give another `out`, or "
                f"empty the folder"
            )
        self._update_manifest()

    def _update_manifest(self, **changes: object) -> None:
        updated = self.manifest.model_copy(update=changes)
        temporary = self.path / (MANIFEST + TEMPORARY)
        with temporary.open("w") as file:
            json.dump(updated.model_dump(), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path / MANIFEST)
        _sync_folder(self.path)
        self.manifest = updated

    def _check_finite(self, shard: Shard) -> None:
        for name, values in {"features": shard.features, **{f"tap {k}": v for k, v in shard.taps.items()}}.items():
            finite = torch.isfinite(values).all(-1)
            if finite.all():
                continue
            token = int((~finite).nonzero()[0])
            starts = list(itertools.accumulate(shard.lengths, initial=0))
            index = bisect.bisect_right(starts, token) - 1
            raise ValueError(
                f"dialogue {shard.ids[index]}: {name} at token {token - starts[index]} are NaN or infinite in "
                f"{self.manifest.dtype}; "
                f"float16 ends at 65,504: use dtype bfloat16, or look at that dialogue. Shards before it are "
                f"kept in {self.path}"
            )

    def _explain(self, error: OSError, name: str) -> OSError:
        done = f"the {len(self.manifest.shards)} shards before it ({self.manifest.dialogues:,} dialogues) are kept"
        what = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        return OSError(
            error.errno or errno.EIO,
            f"could not write {self.path / name}: {what}; {done}. Free some space and run the same command "
            f"again to continue",
        )

    def _take_lock(self) -> IO[str]:
        """The kernel frees the lock of a process that died, so that a stale one stops nobody."""
        file = (self.path / LOCK).open("a+")
        file.seek(0)
        holder = file.read().strip()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(
                f"{self.path} is being written by {holder or 'another process'}; wait for it or stop it, or "
                f"give another `out`"
            ) from None
        file.seek(0)
        self.stale_writer = file.read().strip() or None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        return file

    def _release(self) -> None:
        """Empty the lock file (a name in it means that its writer died) but leave it: removing it would race."""
        if self._lock is not None:
            self._lock.truncate(0)
            self._lock.close()
            self._lock = None


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # it wraps the system's error in text
        full = "No space left" in str(error) or f"os error {errno.ENOSPC}" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make the renames in a folder survive a power cut; some file systems cannot, and need not."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
