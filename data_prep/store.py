"""The feature store: one split's tokens, loss masks, features and exit-layer states, in safetensors shards.

A store is a folder: ``manifest.json`` and ``shard-00000.safetensors``, ... Each shard holds whole dialogues, laid end
to end: ``input_ids`` [tokens] int32, ``loss_mask`` [tokens] bool, ``features`` [tokens, H], ``tap_<l>`` [tokens, H] for
each tap, and ``offsets`` [dialogues + 1] int64. Readers memory-map; `store_writer.py` writes.
"""

import bisect
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

MANIFEST = "manifest.json"
FORMAT_VERSION = 1

# What two runs must share to write into one store, and what may be said when they do not.
SAME = (
    "target_name",
    "target_revision",
    "target_fingerprint",
    "hidden_size",
    "vocab_size",
    "taps",
    "target_dtype",
    "dtype",
    "tokenizer_hash",
    "template_hash",
    "max_length",
    "limit",
    "source_digest",
)
# The same target under another path or name is the same target: its fingerprint tells.
NOT_COMPARED_IF_SAME_FINGERPRINT = ("target_name", "target_revision")


class ShardEntry(BaseModel):
    """One finished shard; ``bytes`` is the file's size."""

    file: str
    dialogues: int
    tokens: int
    bytes: int
    sha256: str


class StoreManifest(BaseModel):
    """What the features were made from and what is there.

    ``dtype`` is that of features and taps on disk, ``target_dtype`` the one that the target ran in.
    ``chat_template`` is the file whose template took the place of the tokenizer's, if any; ``template_hash`` is of the
    template used. ``dropped`` counts the records that were left out, by reason; ``changed`` those kept in another form
    (``truncated``: cut at ``max_length`` tokens). ``consumed`` counts the encoded dialogues that the target has run on:
    ``dialogues`` and those dropped as ``non_finite``. ``complete`` is False while dialogues are still missing.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    format_version: int = FORMAT_VERSION
    target_name: str
    target_revision: str | None = None
    target_fingerprint: str
    hidden_size: int
    vocab_size: int
    target_dtype: str
    taps: list[int]
    dtype: str
    tokenizer_hash: str
    template_hash: str
    chat_template: str | None = None
    max_length: int
    limit: int | None = None
    source: str
    source_digest: str
    consumed: int = 0
    dialogues: int = 0
    tokens: int = 0
    response_tokens: int = 0
    dropped: dict[str, int] = {}
    changed: dict[str, int] = {}
    shards: list[ShardEntry] = []
    versions: dict[str, str] = {}
    commit: str | None = None
    complete: bool = False


@dataclass(frozen=True)
class StoredDialogue:
    """``input_ids`` [T] int64, ``loss_mask`` [T] bool, ``features`` [T, H] and ``taps`` {layer: [T, H]}.

    ``loss_mask[t]`` is True iff token t belongs to an assistant answer, end-of-turn token included. Features and taps
    are views of the file on disk: pages are read when touched.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    taps: dict[int, torch.Tensor]


def read_manifest(folder: Path) -> StoreManifest:
    """The store's manifest.

    Raises:
        ValueError: there is none, or it is not one that this version reads.
    """
    file = folder / MANIFEST
    if not file.is_file():
        what = "does not exist" if not folder.exists() else f"holds no {MANIFEST}"
        splits = sorted(child.parent.name for child in folder.glob(f"*/{MANIFEST}"))
        hint = "make one with python -m data_prep.features --config F"
        if splits:
            hint = f"its sub-folders {', '.join(splits)} are stores: give one of them"
        raise ValueError(f"no feature store at {folder}: it {what}; {hint}")
    try:
        data = json.loads(file.read_bytes())
        version = data.get("format_version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{file} has format version {version}, this code reads version {FORMAT_VERSION}; remake the store"
            )
        data.setdefault("consumed", data.get("dialogues", 0))  # stores from before dialogues could be dropped
        return StoreManifest(**data)
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
        raise ValueError(f"{file} is damaged ({error}); delete {folder} and make the features again") from error


def differences(manifest: StoreManifest, wanted: StoreManifest) -> list[str]:
    """``["max_length 2048 there, 1024 here", ...]``: settings in which a store differs from what is to be written."""
    skipped = NOT_COMPARED_IF_SAME_FINGERPRINT if manifest.target_fingerprint == wanted.target_fingerprint else ()
    pairs = [(key, getattr(manifest, key), getattr(wanted, key)) for key in SAME if key not in skipped]
    return [f"{key} {there!r} there, {here!r} here" for key, there, here in pairs if there != here]


def check_same(folder: Path, manifest: StoreManifest, wanted: StoreManifest) -> None:
    """Raise ValueError unless ``manifest``, found in ``folder``, was made with the settings of ``wanted``.

    A store that holds no features yet may be started anew with any settings.
    """
    if not manifest.shards and not manifest.complete:
        return
    if found := differences(manifest, wanted):
        raise ValueError(
            f"{folder} holds features made otherwise: {'; '.join(found)}. Give another `out`, or delete {folder} first"
        )


class FeatureStore:
    """A finished store, read by index: ``store[i]`` is a StoredDialogue, in the order of the data file.

    It can be given to DataLoader workers: files are mapped when first read, in each process.
    """

    def __init__(self, path: Path, manifest: StoreManifest) -> None:
        self.path = path
        self.manifest = manifest
        self._shards: dict[int, dict[str, torch.Tensor]] = {}
        self._offsets = [self._read_offsets(entry) for entry in manifest.shards]
        self._first = [0]  # index of the first dialogue of each shard, and one past the last
        for entry in manifest.shards:
            self._first.append(self._first[-1] + entry.dialogues)

    @classmethod
    def open(cls, path: str | Path) -> "FeatureStore":
        """Open the store of one split, for example ``runs/stdlib-features/train``.

        Raises:
            ValueError: no store there, a run that has not finished, or a shard that is missing, cut short or does not
                hold what the manifest says. Flipped bytes are found by `verify`.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        if not manifest.complete:
            raise ValueError(
                f"the feature store {folder} is half written ({manifest.dialogues:,} dialogues in "
                f"{len(manifest.shards)} "
                "shards so far); run the same data_prep.features command again to finish it"
            )
        for entry in manifest.shards:
            file = folder / entry.file
            size = file.stat().st_size if file.is_file() else None
            if size != entry.bytes:
                state = "is missing" if size is None else f"has {size:,} bytes"
                raise ValueError(
                    f"{file} {state}, the manifest says {entry.bytes:,} bytes; copy it again, or delete "
                    f"{folder} and make "
                    "the features again"
                )
        return cls(folder, manifest)

    def __len__(self) -> int:
        """Dialogues."""
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
        shard = bisect.bisect_right(self._first, index) - 1
        tensors = self._tensors(shard)
        start, end = self._offsets[shard][index - self._first[shard] :][:2].tolist()
        return StoredDialogue(
            input_ids=tensors["input_ids"][start:end].long(),
            loss_mask=tensors["loss_mask"][start:end],
            features=tensors["features"][start:end],
            taps={layer: tensors[f"tap_{layer}"][start:end] for layer in self.manifest.taps},
        )

    def __iter__(self) -> Iterator[StoredDialogue]:
        return (self[index] for index in range(len(self)))

    def verify(self) -> None:
        """Read every byte and compare the checksums.

        Raises:
            ValueError: naming every shard whose content is not what was written.
        """
        broken = [entry.file for entry in self.manifest.shards if file_sha256(self.path / entry.file) != entry.sha256]
        if broken:
            raise ValueError(
                f"{self.path}: the content of {', '.join(broken)} is not what was written (SHA-256 differs); "
                f"copy it again, "
                f"or delete {self.path} and make the features again"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}  # a worker process maps the files itself

    def _read_offsets(self, entry: ShardEntry) -> torch.Tensor:
        """Offsets of a shard, after checking its header (not its content) against the manifest."""
        file = self.path / entry.file
        hidden = self.manifest.hidden_size
        states = ["features", *(f"tap_{layer}" for layer in self.manifest.taps)]
        expected = {"input_ids": [entry.tokens], "loss_mask": [entry.tokens], "offsets": [entry.dialogues + 1]}
        expected |= {name: [entry.tokens, hidden] for name in states}
        try:
            with safe_open(file, framework="pt") as opened:
                found = {name: list(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
                if found != expected:
                    raise ValueError(f"{file} holds {found}, the manifest says {expected}; make the features again")
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


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
