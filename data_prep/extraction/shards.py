"""Copy hidden states from the blocks of vLLM's cache to the shards of a feature store. Does not import vLLM."""

from dataclasses import dataclass
from typing import Any

import torch

from data_prep.extraction.dump import Background
from data_prep.extraction.job import FAILED, Job
from data_prep.store.quantise import SCALED, state_names, storage_dtype, to_storage
from data_prep.store.writer import StoreWriter


@dataclass
class Ended:
    """A request whose states can be read: dialogue ``row`` of the shard at ``place`` of the job in folder ``job``."""

    request: str
    job: str
    place: int
    row: int
    tokens: int
    blocks: list[int]


class _Open:
    """A shard that still lacks ``left`` dialogues."""

    def __init__(self, job: Job, place: int, pinned: bool) -> None:
        rows, offsets = job.rows(place), job.dialogues["offsets"]
        self.left = len(rows)
        self.offsets = (offsets[rows.start : rows.stop + 1] - offsets[rows.start]).tolist()
        tokens, header = self.offsets[-1], job.header
        names, shape = state_names(header.taps), (tokens, header.hidden_size)
        kind, scaled = storage_dtype(header.dtype), names if header.dtype in SCALED else []
        self.states = {name: torch.empty(shape, dtype=kind, pin_memory=pinned) for name in names}
        self.scales = {name: torch.empty(tokens, pin_memory=pinned) for name in scaled}


class Shards:
    """Collects dialogues, which end in any order, in the order of the data file, and writes complete shards.

    Args:
        cache: ``[blocks, states, tokens of a block, H]``; the last state is the last layer's. norm: the final norm.
    """

    def __init__(self, cache: torch.Tensor, norm: torch.nn.Module) -> None:
        self._cache, self._norm = cache, norm
        self._pinned = cache.device.type == "cuda"
        self._jobs: dict[str, tuple[Job, StoreWriter]] = {}
        self._open: dict[tuple[str, int], _Open] = {}
        self._background = Background()

    @torch.inference_mode()
    def take(self, ended: Ended) -> None:
        """Copy a dialogue's states to their place; raises the error of an earlier shard's write."""
        self._background.check()
        if ended.job not in self._jobs:
            job = Job.read(ended.job)
            self._jobs = {ended.job: (job, StoreWriter(job.store, job.header))}  # the lock is the dump's
        job, writer = self._jobs[ended.job]
        key = ended.job, ended.place
        if key not in self._open:
            self._open[key] = _Open(job, ended.place, self._pinned)
        shard, names = self._open[key], state_names(job.header.taps)
        place = slice(*shard.offsets[ended.row : ended.row + 2])
        blocks = torch.tensor(ended.blocks, device=self._cache.device)
        for name, number in zip(names, (-1, *range(len(names) - 1)), strict=True):
            states = self._cache[blocks, number].flatten(0, 1)[: ended.tokens]
            stored, scale = to_storage(self._norm(states) if number == -1 else states, job.header.dtype)
            shard.states[name][place].copy_(stored, non_blocking=self._pinned)
            if scale is not None:
                shard.scales[name][place].copy_(scale, non_blocking=self._pinned)
        shard.left -= 1
        if not shard.left:
            whole = self._open.pop(key)
            event = torch.cuda.Event(blocking=True) if self._pinned else None
            if event is not None:
                event.record()
            self._background.submit(lambda: _write(job, writer, ended.place, whole, event))


def _write(job: Job, writer: StoreWriter, place: int, whole: _Open, event: Any) -> None:
    """Write a shard, in the thread. An error also goes into a file, because nothing checks after the last shard."""
    try:
        if event is not None:
            event.synchronize()
        for lost in writer.write(job.shard(place, whole.states, whole.scales), job.spans[place][0]):
            print(f"left out, NaN or infinite: dialogue {lost}")
    except Exception as error:
        (job.folder / FAILED).write_text(f"{error}")
        raise
