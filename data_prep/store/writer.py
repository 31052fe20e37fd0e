"""Write a feature store so that a kill, a full disk or a second process never leaves a damaged one.

A shard is written under a temporary name, flushed to disk and renamed; then its record is written in the same way. A
shard without a record counts as missing and is written again. Shards are numbered over the whole split, so any number
of processes can share the work, and another number can continue it.
"""

import contextlib
import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from data_prep.common.disk import file_sha256, write_error
from data_prep.common.ranks import Rank
from data_prep.store import manifest as layout
from data_prep.store.lock import LOCK, RankLock, folder_lock
from data_prep.store.manifest import MANIFEST, NON_FINITE, ShardEntry, ShardRecord, StoreManifest
from data_prep.store.quantise import to_storage
from data_prep.store.reader import size_problem
from drafters.common.files import replace_text, replacing, save_tensors

# Single dialogues may overflow. Above this number and share, the dtype is too narrow or the target broken.
MOST_NON_FINITE, SHARE_NON_FINITE = 20, 0.05


@dataclass(frozen=True)
class Shard:
    """Whole dialogues end to end; ``states`` {"features", "tap_3", ...} are [tokens, H] in floating point.

    With ``scales`` {name: float32 [tokens]} they are quantised already.
    """

    ids: list[str]
    lengths: list[int]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor] = field(default_factory=dict)

    def with_states(self, buffer: dict[str, torch.Tensor]) -> "Shard":
        """This shard with views of the first tokens of ``buffer`` {name: [tokens, H], name_scale: [tokens]}."""
        parts = {name: values[: len(self.input_ids)] for name, values in buffer.items()}
        scales = {name.removesuffix("_scale"): part for name, part in parts.items() if name.endswith("_scale")}
        return replace(self, states={k: v for k, v in parts.items() if not k.endswith("_scale")}, scales=scales)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The shard's tensors by their names in the file."""
        offsets = torch.tensor([0, *self.lengths]).cumsum(0)
        named = {"input_ids": self.input_ids.int(), "loss_mask": self.loss_mask.bool(), "offsets": offsets}
        return {**named, **self.states, **{f"{name}_scale": scale for name, scale in self.scales.items()}}

    def stored_as(self, dtype: str) -> "Shard":
        """This shard with its states in the store's ``dtype``."""
        if self.scales:
            return self
        pairs = {name: to_storage(values, dtype) for name, values in self.states.items()}
        scales = {name: scale for name, (_, scale) in pairs.items() if scale is not None}
        return replace(self, states={name: stored for name, (stored, _) in pairs.items()}, scales=scales)

    def finite(self) -> tuple["Shard", list[str]]:
        """The dialogues without NaN or infinite values, and id and states of each other dialogue."""
        good = {}
        for name, values in self.states.items():  # 8-bit values are always finite; their scale shows it
            rows = torch.isfinite(self.scales[name]) if name in self.scales else torch.isfinite(values).all(-1)
            good[name] = torch.stack([part.all() for part in rows.split(self.lengths)])
        whole = torch.stack(list(good.values())).all(0)  # [dialogues]
        if whole.all():
            return self, []
        tokens = whole.repeat_interleave(torch.tensor(self.lengths))
        shard = Shard(
            ids=list(itertools.compress(self.ids, whole)),
            lengths=list(itertools.compress(self.lengths, whole)),
            input_ids=self.input_ids[tokens],
            loss_mask=self.loss_mask[tokens],
            states={name: values[tokens] for name, values in self.states.items()},
            scales={name: scale[tokens] for name, scale in self.scales.items()},
        )
        wrong = [
            f"{self.ids[row]} ({', '.join(name.replace('_', ' ') for name, rows in good.items() if not rows[row])})"
            for row in (~whole).nonzero()[:, 0].tolist()
        ]
        return shard, wrong


class StoreWriter:
    """Writes one process's shards of one store, as a context manager that holds its rank's lock of the folder.

    Args:
        path: the store's folder; it is made if missing. A half-written store in it is continued.
        header: the manifest's settings (and plan), with all counts zero.
        rank: this process among those that write the store.

    Attributes:
        damaged: problems of finished shards that were missing or cut short and are written again.

    Raises (on entering):
        ValueError: another process writes there as the same rank or with another number of ranks, or the folder has
            other files or a store with other settings.
    """

    def __init__(self, path: str | Path, header: StoreManifest, rank: Rank | None = None) -> None:
        self.path = Path(path)
        self.rank = rank or Rank()
        self.damaged: list[str] = []
        self._header = header.model_copy(deep=True)
        self._records: dict[int, ShardRecord] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "StoreWriter":
        self.path.mkdir(parents=True, exist_ok=True)
        with folder_lock(self.path), contextlib.ExitStack() as opened:
            lock = RankLock(self.path, self.rank)
            opened.callback(lock.release)
            self._continue_or_start(shared=lock.others > 0)
            self._open = opened.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    @property
    def manifest(self) -> StoreManifest:
        """The manifest with the shards found on entering and those written by this process."""
        return self._header if self._header.complete else self._header.with_records(self._records.values())

    def missing(self, lengths: list[int]) -> list[tuple[int, int, int]]:
        """``(number, first, last)`` of the shards of dialogues ``first..last`` that this rank has still to write.

        ``lengths``: tokens of all dialogues of the split; the plan of the process that began the store cuts them.
        """
        assert self._header.plan is not None
        if self._header.complete:
            return []
        plan = enumerate(layout.plan_shards(lengths, self._header.plan.shard_tokens))
        return [(number, *span) for number, span in plan if self.rank.takes(number) and number not in self._records]

    def write(self, shard: Shard, number: int | None = None) -> list[str]:
        """Write one shard, without dialogues with NaN or infinite values, and its record.

        Args:
            shard: its states are converted to the store's dtype.
            number: its place in the plan; default: the next one.

        Returns:
            id and non-finite states of each dialogue left out.

        Raises:
            ValueError: too many dialogues are not finite; the shard is not written.
            OSError: the disk is full or the file cannot be written; earlier shards stay.
        """
        if number is None:
            number = max(self._records, default=-1) + 1
        finite, wrong = shard.stored_as(self._header.dtype).finite()
        before, count, name = self.manifest, len(shard.lengths), layout.shard_file(number)
        self._check_finite(before.dropped.get(NON_FINITE, 0) + len(wrong), before.consumed + count, wrong)
        answers = int(finite.loss_mask.sum())
        record = ShardRecord(number=number, consumed=count, non_finite=len(wrong), response_tokens=answers)
        try:
            if finite.lengths:  # the file first, then its record
                with replacing(self.path / name) as temporary:
                    save_tensors(finite.tensors(), temporary)
                    record.entry = ShardEntry(
                        file=name,
                        dialogues=len(finite.lengths),
                        tokens=sum(finite.lengths),
                        bytes=temporary.stat().st_size,
                        sha256=file_sha256(temporary),
                    )
            replace_text(self._record_file(number), record.model_dump_json())
        except OSError as error:
            said = f"the {len(before.shards)} shards before it ({before.dialogues:,} dialogues) are kept"
            raise write_error(error, self.path / name, said) from error
        self._records[number] = record
        return wrong

    def finish(self, dropped: dict[str, int], changed: dict[str, int]) -> StoreManifest:
        """If all shards exist, merge all ranks' records into the manifest and mark the store complete.

        Otherwise another rank merges later; ``complete`` of the returned manifest tells. A kill at any moment loses
        nothing. ``dropped``: records left out before the target ran, by reason; ``changed``: kept in another form.
        Raises ValueError if too many dialogues are not finite.
        """
        with folder_lock(self.path):
            self._header = layout.read_header(self.path)
            if not self._header.complete:
                self._load_records()
                merged = self.manifest
                if merged.plan is not None and merged.consumed < merged.plan.dialogues:
                    return merged
                non_finite = merged.dropped.get(NON_FINITE, 0)
                self._check_finite(non_finite, merged.consumed, [], none_left=not merged.dialogues)
                dropped = {**dropped, NON_FINITE: non_finite} if non_finite else dropped
                merged.dropped, merged.changed = dict(sorted(dropped.items())), dict(sorted(changed.items()))
                merged.complete = True
                self._save_header(merged)
            self._remove_records()
            return self._header

    def _continue_or_start(self, shared: bool) -> None:
        wanted = self._header
        if not (self.path / MANIFEST).exists():
            foreign = sorted(item.name for item in self.path.iterdir() if not item.name.startswith((LOCK, ".manifest")))
            if foreign:
                raise ValueError(
                    f"{self.path} is no feature store, yet holds {', '.join(foreign[:3])}; give another `out`, or "
                    "empty the folder"
                )
            self._save_header(wanted)
            return
        header = layout.read_header(self.path)
        if not header.complete:
            self._load_records()
            for leftover in self.path.glob(".shard-*.tmp"):  # of a dead process, unless of another rank's shard
                number = leftover.name.removeprefix(".shard-").partition(".")[0]
                if number.isdigit() and self.rank.takes(int(number)):
                    leftover.unlink(missing_ok=True)
        layout.check_same(self.path, header.with_records(self._records.values()), wanted, shared)
        if header.complete or self._records or shared:
            self._header = header
        else:  # nothing was written yet: use the new settings
            self._save_header(wanted)

    def _load_records(self) -> None:
        """Load the records, and remove those whose shard is missing or cut, so that it is written again."""
        self._records = {}
        for record in layout.read_shard_records(self.path):
            if record.entry is not None and (problem := size_problem(self.path, record.entry)):
                self.damaged.append(problem)
                self._record_file(record.number).unlink(missing_ok=True)
            else:
                self._records[record.number] = record

    def _record_file(self, number: int) -> Path:
        return (self.path / layout.shard_file(number)).with_suffix(".json")

    def _remove_records(self) -> None:
        for file in self.path.glob(layout.RECORDS):
            file.unlink(missing_ok=True)
        self._records = {}

    def _save_header(self, header: StoreManifest) -> None:
        replace_text(self.path / MANIFEST, json.dumps(header.model_dump(), indent=1))
        self._header = header

    def _check_finite(self, non_finite: int, consumed: int, wrong: list[str], none_left: bool = False) -> None:
        """Raise ValueError if too many of the ``consumed`` dialogues are not finite, or if none is."""
        too_many = non_finite >= MOST_NON_FINITE and non_finite > SHARE_NON_FINITE * consumed
        if not (too_many or (non_finite and none_left)):
            return
        ran, stored = self._header.target_dtype, self._header.dtype
        if "float16" in (ran, stored):
            fix = "float16 ends at 65,504: set dtype (and store_dtype, if given) to bfloat16 or float32"
        else:
            fix = f"In {ran} a sound target does not overflow: check its weights, or try dtype float32"
        example = "".join(f"; for example {dialogue}" for dialogue in wrong[:1])
        hint = f", and give another `out` or delete {self.path} first" if self.manifest.shards else ""
        raise ValueError(
            f"{non_finite:,} of the first {consumed:,} dialogues have NaN or infinite features (target in {ran}, "
            f"stored as {stored}{example}). {fix}{hint}"
        )
