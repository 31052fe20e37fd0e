"""Read a feature store: one split's tokens, loss masks, features and exit-layer states, in safetensors shards.

A store is a folder: ``manifest.json`` and ``shard-00000.safetensors``, ... A shard has whole dialogues end to end:
``input_ids`` [tokens] int32, ``loss_mask`` [tokens] bool, ``features`` [tokens, H], ``tap_<l>`` [tokens, H] for each
tap, and ``offsets`` [dialogues + 1] int64. int8 and float8 states also have ``features_scale`` and ``tap_<l>_scale``
[tokens] float32. Files are memory-mapped. ``writer.py`` writes them.
"""

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from data_prep.common.disk import file_sha256
from data_prep.store.manifest import ShardEntry, StoreManifest, read_manifest
from data_prep.store.quantise import SCALED, from_storage, state_names, storage_dtype
from drafters.common.paths import readable

DTYPES_IN_FILE = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3"
}  # fmt: skip

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # {name of a state: stored values [T, H], scales [T]}


@dataclass(frozen=True)
class StoredDialogue:
    """``input_ids`` [T] int64, ``loss_mask`` [T] bool, ``features`` [T, H] and ``taps`` {layer: [T, H]}.

    ``loss_mask[t]`` is True if token t belongs to an answer, end-of-turn token included. Features and taps are views of
    the mapped file. For an int8 or float8 store they are computed at the first access, in the store's ``read_dtype``.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    taps: dict[int, torch.Tensor]


class _ScaledDialogue(StoredDialogue):
    """A dialogue of an int8 or float8 store."""

    _states: Pairs
    _dtype: torch.dtype

    def __init__(self, input_ids: torch.Tensor, loss_mask: torch.Tensor, states: Pairs, dtype: torch.dtype) -> None:
        self.__dict__.update(input_ids=input_ids, loss_mask=loss_mask, _states=states, _dtype=dtype)

    @cached_property
    def features(self) -> torch.Tensor:  # type: ignore[override]
        return from_storage(*self._states["features"], self._dtype)

    @cached_property
    def taps(self) -> dict[int, torch.Tensor]:  # type: ignore[override]
        taps = {name: pair for name, pair in self._states.items() if name != "features"}
        return {int(name.removeprefix("tap_")): from_storage(*pair, self._dtype) for name, pair in taps.items()}


class FeatureStore:
    """A finished store: ``store[i]`` is a StoredDialogue, in the order of the data file.

    DataLoader workers can share it: each process maps the files at the first read. ``read_dtype``, which may be set, is
    the dtype of features and taps: the stored one, or bfloat16 for int8 and float8.
    """

    def __init__(self, path: Path, manifest: StoreManifest) -> None:
        self.path = path
        self.manifest = manifest
        self.read_dtype = torch.bfloat16 if manifest.dtype in SCALED else storage_dtype(manifest.dtype)
        self._states = state_names(manifest.taps)
        self._shards: dict[int, dict[str, torch.Tensor]] = {}
        self._offsets = [self._read_offsets(entry) for entry in manifest.shards]
        # Index of the first dialogue of each shard, and one past the last dialogue.
        self._first = [0, *itertools.accumulate(entry.dialogues for entry in manifest.shards)]

    @classmethod
    def open(cls, path: str | Path) -> "FeatureStore":
        """Open the store of one split, for example ``runs/stdlib-features/train``.

        Raises:
            ValueError: no store, a half-written one, or a shard that is missing, cut short or does not match the
                manifest. ``verify`` also finds changed bytes.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        if not manifest.complete:
            raise ValueError(
                f"the feature store {folder} is half written ({manifest.dialogues:,} dialogues in "
                f"{len(manifest.shards)} shards so far); run the same data_prep.features command again to finish it"
            )
        for entry in manifest.shards:
            if problem := size_problem(folder, entry):
                raise ValueError(f"{problem}; copy it again, or delete {folder} and make the features again")
        return cls(folder, manifest)

    def __len__(self) -> int:
        """Number of dialogues."""
        return self._first[-1]

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each dialogue, int64 [dialogues]."""
        return torch.cat([torch.zeros(0, dtype=torch.int64), *(offsets.diff() for offsets in self._offsets)])

    def __getitem__(self, index: int) -> StoredDialogue:
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"dialogue {index} of a store of {count}")
        index %= count
        (shard,) = self.shards_of([index])
        tensors = self._tensors(shard)
        start, end = self._offsets[shard][index - self._first[shard] :][:2].tolist()
        ids, mask = tensors["input_ids"][start:end].long(), tensors["loss_mask"][start:end]
        rows = {name: tensors[name][start:end] for name in self._states}
        if self.manifest.dtype in SCALED:
            pairs = {name: (values, tensors[f"{name}_scale"][start:end]) for name, values in rows.items()}
            return _ScaledDialogue(ids, mask, pairs, self.read_dtype)
        taps = {layer: rows[f"tap_{layer}"] for layer in self.manifest.taps}
        return StoredDialogue(ids, mask, rows["features"], taps)

    def shards_of(self, dialogues: Iterable[int]) -> set[int]:
        """Places in the manifest of the shards with these ``dialogues``."""
        return {bisect.bisect_right(self._first, index) - 1 for index in dialogues}

    def __iter__(self) -> Iterator[StoredDialogue]:
        return (self[index] for index in range(len(self)))

    def verify(self) -> None:
        """Read every byte and compare the checksums; raises ValueError with the name of every damaged shard."""
        if broken := broken_shards(self.path, self.manifest):
            raise ValueError(
                f"{self.path}: {'; '.join(broken)}; copy it again, or delete {self.path} and make the features again"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}  # a worker process maps the files itself

    def _read_offsets(self, entry: ShardEntry) -> torch.Tensor:
        """Offsets of a shard, after a check of its header against the manifest."""
        file = self.path / entry.file
        hidden, kind = self.manifest.hidden_size, DTYPES_IN_FILE[storage_dtype(self.manifest.dtype)]
        expected = {"input_ids": ["I32", entry.tokens], "loss_mask": ["BOOL", entry.tokens]}
        expected |= {name: [kind, entry.tokens, hidden] for name in self._states}
        expected |= {"offsets": ["I64", entry.dialogues + 1]}
        if self.manifest.dtype in SCALED:
            expected |= {f"{name}_scale": ["F32", entry.tokens] for name in self._states}
        try:
            with safe_open(readable(file), framework="pt") as opened:
                slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                stored = {name: [part.get_dtype(), *part.get_shape()] for name, part in slices.items()}
                if stored != expected:
                    raise ValueError(f"{file} holds {stored}, the manifest says {expected}; make the features again")
                offsets = opened.get_tensor("offsets").clone()
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable shard ({error}); make the features again") from error
        if offsets[0] != 0 or offsets[-1] != entry.tokens or (offsets.diff() <= 0).any():
            raise ValueError(f"{file}: its dialogue offsets are damaged; make the features again")
        return offsets

    def _tensors(self, shard: int) -> dict[str, torch.Tensor]:
        if shard not in self._shards:
            with safe_open(self.path / self.manifest.shards[shard].file, framework="pt") as opened:
                self._shards[shard] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        return self._shards[shard]


def size_problem(folder: Path, entry: ShardEntry) -> str | None:
    """A problem with the existence or size of the shard's file; None if there is none."""
    file = folder / entry.file
    size = file.stat().st_size if file.is_file() else None
    if size == entry.bytes:
        return None
    state = "is missing" if size is None else f"has {size:,} bytes"
    return f"{file} {state}, the manifest says {entry.bytes:,} bytes"


def broken_shards(folder: Path, manifest: StoreManifest, progress: Callable[[int], object] | None = None) -> list[str]:
    """Read every shard of ``manifest`` and return a description of each problem."""
    broken, differing = [], []
    for entry in manifest.shards:
        problem = size_problem(folder, entry)
        if problem:
            broken.append(problem)
        elif file_sha256(folder / entry.file) != entry.sha256:
            differing.append(entry.file)
        if progress is not None:
            progress(entry.bytes)
    if differing:
        broken.append(f"the content of {', '.join(differing)} is not what was written (SHA-256 differs)")
    return broken


def is_whole(folder: Path, entry: ShardEntry) -> bool:
    """Whether a shard's bytes are the ones that were written."""
    try:
        return size_problem(folder, entry) is None and file_sha256(folder / entry.file) == entry.sha256
    except OSError:
        return False
