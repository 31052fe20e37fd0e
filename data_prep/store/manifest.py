"""Description of a feature store: its manifest, the plan of its shards, and one record per finished shard.

While a store is being written, ``manifest.json`` has the settings and the plan, and each finished shard has a record in
a file of its own (``shard-00007.json``), so that several processes need no common file. The last process to finish
merges the records into the manifest and removes them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from drafters.common.fingerprints import same_weights
from drafters.common.paths import readable
from drafters.common.wording import shortened

MANIFEST = "manifest.json"
RECORDS = "shard-*.json"
FORMAT_VERSION = 2
NON_FINITE = "non_finite"
STORED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8": 1}  # of one value
ID_AND_MASK_BYTES, SCALE_BYTES = 5, 4  # of one token: int32 and bool; float32

# Settings that two runs must share to write into one store.
SAME = (
    "target_name", "target_revision", "target_fingerprint", "hidden_size", "vocab_size", "taps", "target_dtype",
    "dtype", "tokenizer_hash", "template_hash", "template_date", "max_length", "limit", "answers", "source_digest",
)  # fmt: skip
NOT_COMPARED_IF_NONE = ("answers", "template_date")  # older stores do not record them
OF_THE_TARGET = ("target_name", "target_revision", "target_fingerprint")  # compared unless the weights are the same

Count = Annotated[int, Field(ge=0)]
Answers = Literal["own", "sampled", "given"]
ANSWERS: dict[Answers | None, str] = {  # in words
    "own": "the target's own, greedy",
    "sampled": "the target's own, sampled",
    "given": "as the data file gives them",
    None: "not recorded",
}


class ShardEntry(BaseModel):
    """One finished shard; ``bytes`` is the file's size.

    ``file`` must be a plain name: a manifest may come from anywhere and must not point outside of the store. The file
    itself may be a link, which only the folder's owner can have made.
    """

    file: str = Field(pattern=r"^shard-[0-9]{5,}\.safetensors$")
    dialogues: int = Field(ge=1)
    tokens: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ShardRecord(BaseModel):
    """Outcome of the ``consumed`` dialogues of the shard ``number``; no ``entry`` if none of them is finite."""

    number: Count
    consumed: Count
    non_finite: Count = 0
    response_tokens: Count = 0
    entry: ShardEntry | None = None


class ShardPlan(BaseModel):
    """How a split is cut into shards: each ends with the dialogue that reaches ``shard_tokens`` tokens.

    ``digest`` is a hash of all dialogues' lengths in order: processes that tokenize differently must not share a store.
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
    """Settings and content of a store."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    format_version: int = FORMAT_VERSION
    target_name: str
    target_revision: str | None = None
    target_fingerprint: str
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    target_dtype: str  # in which the target ran
    taps: list[Count]
    states: dict[str, str] = {}  # what each stored state is, by the name of its tensors; older stores have none
    dtype: str  # of features and taps on disk (int8 and float8: with a scale per token)
    tokenizer_hash: str
    template_hash: str  # of the template used
    # The day on which the store was begun, which the template prints as today's date; None: it prints no date.
    template_date: str | None = Field(None, pattern=r"^\d{4}-\d{2}-\d{2}$")
    chat_template: str | None = None  # the file whose template was used instead of the tokenizer's
    max_length: int
    limit: int | None = None
    source: str
    source_digest: str
    hub_names: list[str] | None = None  # which of target_name and source are the Hub's; None: not recorded
    answers: Answers | None = None  # the target's own greedy ones, sampled by it, or given; None: not recorded
    plan: ShardPlan | None = None  # set when the store is begun
    consumed: Count = 0  # encoded dialogues on which the target has run: ``dialogues`` and the non-finite ones
    dialogues: Count = 0
    tokens: Count = 0
    response_tokens: Count = 0
    dropped: dict[str, Count] = {}  # records left out, by reason
    changed: dict[str, Count] = {}  # records kept in another form (``truncated``: cut at ``max_length`` tokens)
    shards: list[ShardEntry] = []
    versions: dict[str, str] = {}
    commit: str | None = None
    complete: bool = False  # False while dialogues are missing

    @property
    def token_bytes(self) -> int:
        """Bytes on disk of one token: id, mask, feature and taps."""
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


def state_bytes(hidden_size: int, dtype: str) -> int:
    """Bytes on disk of one state of a token, ``hidden_size`` wide."""
    return hidden_size * STORED_BYTES[dtype] + (SCALE_BYTES if STORED_BYTES[dtype] == 1 else 0)


def token_bytes(hidden_size: int, taps: int, dtype: str) -> int:
    """Bytes on disk of one token with its feature and ``taps`` other states, each ``hidden_size`` wide."""
    return ID_AND_MASK_BYTES + (1 + taps) * state_bytes(hidden_size, dtype)


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
    """The store's manifest, for a half-written store with its finished shards; raises ValueError as ``read_header``."""
    header = read_header(folder)
    if header.complete:
        return header
    records = read_shard_records(folder)
    header = read_header(folder)  # again: its writers may have merged it, and removed records before they were read
    return header if header.complete else header.with_records(records)


def read_header(folder: Path) -> StoreManifest:
    """The content of ``manifest.json``, for a half-written store settings and plan; ValueError if it is unusable."""
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
        return StoreManifest(**data)
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError) as error:
        wrong = _first_problem(error) if isinstance(error, ValidationError) else error
        raise ValueError(f"{file} is damaged ({wrong}); delete {folder} and make the features again") from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))} is {shortened(problem['input'])}: {problem['msg']}"


def read_shard_records(folder: Path) -> list[ShardRecord]:
    """The records of a half-written store, by number; raises ValueError if one is damaged."""
    records = []
    for file in sorted(folder.glob(RECORDS)):
        try:
            records.append(ShardRecord.model_validate_json(file.read_bytes()))
        except FileNotFoundError:  # merged meanwhile
            continue
        except ValidationError as error:
            raise ValueError(
                f"{file} is damaged ({_first_problem(error)}); delete it, and its shard is made again"
            ) from error
    return sorted(records, key=lambda record: record.number)


def check_same(folder: Path, manifest: StoreManifest, wanted: StoreManifest, shared: bool = False) -> None:
    """Raise ValueError unless ``manifest``, found in ``folder``, has the settings of ``wanted``.

    A store without features may be begun again with any settings, unless it is ``shared``: other processes are
    computing for it.
    """
    if not (manifest.consumed or manifest.complete or shared):
        return
    same_target = same_weights(manifest.target_fingerprint, wanted.target_fingerprint, str(folder))
    keys = [key for key in SAME if not (same_target and key in OF_THE_TARGET)]
    pairs = [(key, getattr(manifest, key), getattr(wanted, key)) for key in keys]
    pairs = [pair for pair in pairs if not (pair[0] in NOT_COMPARED_IF_NONE and None in pair)]
    if differences := [f"{key} {there!r} there, {here!r} here" for key, there, here in pairs if there != here]:
        raise ValueError(
            f"{folder} holds features with other settings: {'; '.join(differences)}. Give another `out`, or delete "
            f"{folder} first"
        )
    there, here = manifest.plan, wanted.plan
    if there and here and (there.dialogues, there.tokens, there.digest) != (here.dialogues, here.tokens, here.digest):
        raise ValueError(
            f"{folder} was begun for {there.dialogues:,} dialogues of {there.tokens:,} tokens; here the same data "
            f"gives {here.dialogues:,} of {here.tokens:,} (or others). Use the same library versions for all processes "
            f"(begun with {manifest.versions or 'unknown ones'}), or delete {folder} first"
        )
