"""What a feature store says about itself: its manifest, the plan of its shards, and one record per finished shard.

While a store is being written, ``manifest.json`` holds the settings and the plan, and each finished shard has its
record in a file beside it (``shard-00007.json``), so that any number of processes can write without a common file.
The last one to finish merges the records into the manifest and removes them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafters.common.paths import readable
from drafters.common.wording import shortened

MANIFEST = "manifest.json"
RECORDS = "shard-*.json"
FORMAT_VERSION = 2
NON_FINITE = "non_finite"

# What two runs must share to write into one store, and what may be said when they do not.
SAME = (
    "target_name", "target_revision", "target_fingerprint", "hidden_size", "vocab_size", "taps", "target_dtype",
    "dtype", "tokenizer_hash", "template_hash", "template_date", "max_length", "limit", "answers", "source_digest",
)  # fmt: skip
NOT_COMPARED_IF_NONE = ("answers", "template_date")  # of stores made before it was written down
# The same target under another path or name is the same target: its fingerprint tells.
NOT_COMPARED_IF_SAME_FINGERPRINT = ("target_name", "target_revision")


Count = Annotated[int, Field(ge=0)]
Answers = Literal["own", "sampled", "given"]


class ShardEntry(BaseModel):
    """One finished shard; ``bytes`` is the file's size.

    ``file`` is a plain name, as ``shard_file`` makes it: a manifest may come from anywhere and must not point out of
    the store. The file itself may be a link to another disk, which only whoever owns the folder can have put there.
    """

    file: str = Field(pattern=r"^shard-[0-9]{5,}\.safetensors$")
    dialogues: int = Field(ge=1)
    tokens: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ShardRecord(BaseModel):
    """What became of the ``consumed`` dialogues of the shard ``number``; without one finite dialogue it has no file."""

    number: Count
    consumed: Count
    non_finite: Count = 0
    response_tokens: Count = 0
    entry: ShardEntry | None = None


class ShardPlan(BaseModel):
    """How a split is cut into shards, whoever writes them.

    ``digest`` is of the lengths of all ``dialogues``, in order: two processes that tokenize differently must not write
    one store. Each shard ends with the dialogue that reaches ``shard_tokens`` tokens.
    """

    shard_tokens: Count
    dialogues: Count
    tokens: Count
    digest: str

    @classmethod
    def of(cls, lengths: list[int], shard_tokens: int) -> "ShardPlan":
        """The plan for dialogues of ``lengths`` tokens."""
        digest = hashlib.sha256(json.dumps(lengths).encode()).hexdigest()[:16]
        return cls(shard_tokens=shard_tokens, dialogues=len(lengths), tokens=sum(lengths), digest=digest)


class StoreManifest(BaseModel):
    """What the features were made from and what is there.

    ``dtype`` is that of features and taps on disk (int8 and float8: with a scale per token), ``target_dtype`` the one
    that the target ran in. ``chat_template`` is the file whose template took the place of the tokenizer's, if any;
    ``template_hash`` is of the template used. ``template_date`` (YYYY-MM-DD), the day on which the store was begun, is
    what the template prints as today's date; None: it prints none. ``dropped`` counts the records that were left out,
    by reason; ``changed`` those kept in another form (``truncated``: cut at ``max_length`` tokens). ``answers`` are the
    target's ``own`` greedy ones, ``sampled`` by it, or ``given``; None: not recorded. ``consumed`` counts the encoded
    dialogues that the target has run on: ``dialogues`` and those dropped as ``non_finite``. ``plan`` is set when the
    store is begun. ``complete`` is False while dialogues are still missing.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    format_version: int = FORMAT_VERSION
    target_name: str
    target_revision: str | None = None
    target_fingerprint: str
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    target_dtype: str
    taps: list[Count]
    dtype: str
    tokenizer_hash: str
    template_hash: str
    template_date: str | None = Field(None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    chat_template: str | None = None
    max_length: int
    limit: int | None = None
    source: str
    source_digest: str
    answers: Answers | None = None
    plan: ShardPlan | None = None
    consumed: Count = 0
    dialogues: Count = 0
    tokens: Count = 0
    response_tokens: Count = 0
    dropped: dict[str, Count] = {}
    changed: dict[str, Count] = {}
    shards: list[ShardEntry] = []
    versions: dict[str, str] = {}
    commit: str | None = None
    complete: bool = False

    @property
    def token_bytes(self) -> int:
        """Bytes on disk of one token: its id, its place in the mask, its feature and its taps."""
        from data_prep.store.quantise import token_bytes

        return token_bytes(self.hidden_size, len(self.taps), self.dtype)

    @property
    def size(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def with_records(self, records: Iterable[ShardRecord]) -> "StoreManifest":
        """This manifest with the shards of ``records`` counted and listed, by their numbers."""
        ordered = sorted(records, key=lambda record: record.number)
        entries = [record.entry for record in ordered if record.entry is not None]
        non_finite = self.dropped.get(NON_FINITE, 0) + sum(record.non_finite for record in ordered)
        return self.model_copy(
            update={
                "consumed": self.consumed + sum(record.consumed for record in ordered),
                "dialogues": self.dialogues + sum(entry.dialogues for entry in entries),
                "tokens": self.tokens + sum(entry.tokens for entry in entries),
                "response_tokens": self.response_tokens + sum(record.response_tokens for record in ordered),
                "dropped": {**self.dropped, NON_FINITE: non_finite} if non_finite else dict(self.dropped),
                "shards": [*self.shards, *entries],
            }
        )


def shard_file(number: int) -> str:
    """The name of a shard; its record has the suffix ``.json``."""
    return f"shard-{number:05d}.safetensors"


def plan_shards(lengths: list[int], shard_tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of dialogues: each ends with the dialogue that reaches ``shard_tokens`` tokens."""
    first = tokens = 0
    for index, length in enumerate(lengths):
        tokens += length
        if tokens >= shard_tokens or index == len(lengths) - 1:
            yield first, index + 1
            first, tokens = index + 1, 0


def read_manifest(folder: Path) -> StoreManifest:
    """The store's manifest; of a half-written store, with the shards that are finished so far.

    Raises:
        ValueError: there is none, or it is not one that this version reads.
    """
    header = read_header(folder)
    if header.complete:
        return header
    records = read_shard_records(folder)
    header = read_header(folder)  # its writers may have merged it meanwhile, and removed records before they were read
    return header if header.complete else header.with_records(records)


def read_header(folder: Path) -> StoreManifest:
    """What ``manifest.json`` itself says: of a half-written store, the settings and plan.

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
        data = json.loads(readable(file).read_bytes())
        version = data.get("format_version") if isinstance(data, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{file} has format version {version}, this code reads version {FORMAT_VERSION}; remake the store"
            )
        manifest = StoreManifest(**data)
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
        problem = _first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise ValueError(f"{file} is damaged ({problem}); delete {folder} and make the features again") from error
    if wrong := _wrong_counts(manifest):
        raise ValueError(f"{file} is damaged ({wrong}); delete {folder} and make the features again")
    return manifest


def _first_problem(error: ValidationError) -> str:
    found = error.errors()[0]
    return f"{'.'.join(map(str, found['loc']))} is {shortened(found['input'])}: {found['msg']}"


def _wrong_counts(manifest: StoreManifest) -> str | None:
    """What does not add up within a manifest, if anything."""
    shards = manifest.shards
    if len({shard.file for shard in shards}) < len(shards):
        return "a shard is listed twice"
    if manifest.complete and not shards:
        return "it is complete and lists no shards"
    for what in ("dialogues", "tokens"):
        said, listed = getattr(manifest, what), sum(getattr(shard, what) for shard in shards)
        if said != listed:
            return f"it says {said:,} {what}, its shards hold {listed:,}"
    if manifest.response_tokens > manifest.tokens:
        return f"it says {manifest.response_tokens:,} tokens of answers, and {manifest.tokens:,} tokens in all"
    return None


def read_shard_records(folder: Path) -> list[ShardRecord]:
    """The records of a half-written store, by number. Those that vanish meanwhile were merged, and are left out.

    Raises:
        ValueError: one is damaged.
    """
    records = []
    for file in sorted(folder.glob(RECORDS)):
        try:
            records.append(ShardRecord.model_validate_json(file.read_bytes()))
        except FileNotFoundError:
            continue
        except ValidationError as error:
            problem = _first_problem(error)
            raise ValueError(f"{file} is damaged ({problem}); delete it, and its shard is made again") from error
    return sorted(records, key=lambda record: record.number)


def check_same(folder: Path, manifest: StoreManifest, wanted: StoreManifest, shared: bool = False) -> None:
    """Raise ValueError unless ``manifest``, found in ``folder``, was made with the settings of ``wanted``.

    A store that holds no features yet may be begun again with any settings, unless it is ``shared``: other processes
    are computing for it.
    """
    if not (manifest.consumed or manifest.complete or shared):
        return
    same_target = manifest.target_fingerprint == wanted.target_fingerprint
    keys = [key for key in SAME if not (same_target and key in NOT_COMPARED_IF_SAME_FINGERPRINT)]
    pairs = [(key, getattr(manifest, key), getattr(wanted, key)) for key in keys]
    pairs = [pair for pair in pairs if not (pair[0] in NOT_COMPARED_IF_NONE and None in pair)]
    if found := [f"{key} {there!r} there, {here!r} here" for key, there, here in pairs if there != here]:
        raise ValueError(
            f"{folder} holds features made otherwise: {'; '.join(found)}. Give another `out`, or delete {folder} first"
        )
    there, here = manifest.plan, wanted.plan
    if there and here and (there.dialogues, there.tokens, there.digest) != (here.dialogues, here.tokens, here.digest):
        raise ValueError(
            f"{folder} was begun for {there.dialogues:,} dialogues of {there.tokens:,} tokens; here the same data "
            f"gives {here.dialogues:,} of {here.tokens:,} (or others). Use the same library versions for all processes "
            f"(begun with {manifest.versions or 'unknown ones'}), or delete {folder} first"
        )
