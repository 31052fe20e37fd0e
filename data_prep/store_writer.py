"""Writing a feature store so that a kill, a full disk or a second process never leaves a wrong one behind.

A shard is written under a temporary name, flushed to disk and renamed; then the manifest is replaced in the same way.
What the manifest does not list does not exist: a run that died between the two writes that shard again.
"""

import errno
import fcntl
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

from drafters.provenance import replace_text, sync_folder

from .store import MANIFEST, ShardEntry, StoreManifest, check_same, file_sha256, read_manifest

LOCK = ".lock"
TEMPORARY = ".tmp"
NON_FINITE = "non_finite"
# Odd dialogues overflow one by one; so many mean that the dtype is too narrow, or the target broken.
MOST_NON_FINITE, SHARE_NON_FINITE = 20, 0.05


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

    def finite(self) -> tuple["Shard", list[str]]:
        """The dialogues without NaN or infinite values; of each other one, its id and what is not finite."""
        states = {"features": self.features, **{f"tap {layer}": tap for layer, tap in self.taps.items()}}
        bad = {name: ~torch.isfinite(values).all(-1) for name, values in states.items()}
        if not any(tokens.any() for tokens in bad.values()):
            return self, []
        of_dialogue = {
            name: torch.stack([part.any() for part in tokens.split(self.lengths)]) for name, tokens in bad.items()
        }
        whole = ~torch.stack(list(of_dialogue.values())).any(0)
        tokens = whole.repeat_interleave(torch.tensor(self.lengths))
        kept = Shard(
            ids=[name for name, good in zip(self.ids, whole, strict=True) if good],
            lengths=[length for length, good in zip(self.lengths, whole, strict=True) if good],
            input_ids=self.input_ids[tokens],
            loss_mask=self.loss_mask[tokens],
            features=self.features[tokens],
            taps={layer: tap[tokens] for layer, tap in self.taps.items()},
        )
        wrong = [
            f"{self.ids[row]} ({', '.join(name for name, rows in of_dialogue.items() if rows[row])})"
            for row in (~whole).nonzero()[:, 0].tolist()
        ]
        return kept, wrong


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

    def write(self, shard: Shard) -> list[str]:
        """Write and list one shard, without the dialogues that hold NaN or infinite values; counts them.

        Returns:
            of each dialogue left out, its id and what is not finite in it.

        Raises:
            ValueError: so many are not finite that the dtype or the target is to blame; the shard is not written.
            OSError: the disk is full or the file cannot be written; the shards before it stay.
        """
        kept, wrong = shard.finite()
        consumed = self.manifest.consumed + len(shard.lengths)
        non_finite = self.manifest.dropped.get(NON_FINITE, 0) + len(wrong)
        if non_finite >= MOST_NON_FINITE and non_finite > SHARE_NON_FINITE * consumed:
            raise ValueError(self._too_many(non_finite, consumed, wrong))
        changes: dict[str, object] = {"consumed": consumed}
        if wrong:
            changes["dropped"] = {**self.manifest.dropped, NON_FINITE: non_finite}
        self._write_shard(kept, changes)
        return wrong

    def _write_shard(self, shard: Shard, changes: dict[str, object]) -> None:
        """The file first, then the manifest with it and ``changes``; a shard of no dialogue has no file."""
        if not shard.lengths:
            self._update_manifest(**changes)
            return
        name = f"shard-{len(self.manifest.shards):05d}.safetensors"
        temporary = self.path / (name + TEMPORARY)
        try:
            _save(shard.tensors(), temporary)
            digest, size = file_sha256(temporary), temporary.stat().st_size
            temporary.rename(self.path / name)
            sync_folder(self.path)
            entry = ShardEntry(
                file=name, dialogues=len(shard.lengths), tokens=sum(shard.lengths), bytes=size, sha256=digest
            )
            self._update_manifest(
                shards=[*self.manifest.shards, entry],
                dialogues=self.manifest.dialogues + entry.dialogues,
                tokens=self.manifest.tokens + entry.tokens,
                response_tokens=self.manifest.response_tokens + int(shard.loss_mask.sum()),
                **changes,
            )
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._explain(error, name) from error

    def finish(self, dropped: dict[str, int], changed: dict[str, int]) -> StoreManifest:
        """Mark the store complete. ``dropped``: the records left out before the target ran, by reason.

        Raises:
            ValueError: it holds no dialogue, since none was finite.
        """
        non_finite = self.manifest.dropped.get(NON_FINITE, 0)
        if non_finite and not self.manifest.dialogues:
            raise ValueError(self._too_many(non_finite, self.manifest.consumed, []))
        dropped = {**dropped, NON_FINITE: non_finite} if non_finite else dropped
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
            if found.shards or found.complete:
                self.manifest = found
            else:  # nothing was written yet: with the settings of now
                self._update_manifest()
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
        replace_text(self.path / MANIFEST, json.dumps(updated.model_dump(), indent=1))
        self.manifest = updated

    def _too_many(self, non_finite: int, consumed: int, wrong: list[str]) -> str:
        ran, stored = self.manifest.target_dtype, self.manifest.dtype
        if "float16" in (ran, stored):
            fix = "float16 ends at 65,504: set dtype (and store_dtype, if given) to bfloat16 or float32"
        else:
            fix = f"In {ran} no sound target overflows: look at its weights, or try dtype float32"
        example = "".join(f"; for example {dialogue}" for dialogue in wrong[:1])
        kept = f", and give another `out` or delete {self.path} first" if self.manifest.shards else ""
        return (
            f"{non_finite:,} of the first {consumed:,} dialogues have NaN or infinite features (target in {ran}, "
            f"stored as {stored}{example}). {fix}{kept}"
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
