"""Copy hidden states from the blocks of vLLM's cache to the shards of a feature store. Does not import vLLM."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from data_prep.extraction.dump import Background, empty_states
from data_prep.extraction.job import FAILED, Job
from data_prep.store.quantise import state_names, to_storage
from data_prep.store.writer import Shard, StoreWriter


@dataclass
class Ended:
    """A request whose states can be read: dialogue ``row`` of the shard ``number`` of the job in the folder ``job``."""

    request: str
    job: str
    number: int
    row: int
    tokens: int
    blocks: list[int]


class Shards:
    """Collects dialogues, which end in any order, in the order of the data file, and writes complete shards.

    Args:
        cache: ``[blocks, states, tokens of a block, H]``; the last state is the last layer's. norm: the final norm.
    """

    def __init__(self, cache: torch.Tensor, norm: torch.nn.Module) -> None:
        self._cache, self._norm = cache, norm
        self._pinned = cache.device.type == "cuda"
        self._jobs: dict[str, tuple[Job, StoreWriter]] = {}
        self._open: dict[tuple[str, int], tuple[Shard, set[int]]] = {}  # with the rows that are missing
        self._background = Background()

    @torch.inference_mode()
    def take(self, ended: Ended) -> None:
        """Copy a dialogue's states to their place; raises the error of an earlier shard's write."""
        self._background.check()
        if ended.job not in self._jobs:
            job = Job.read(ended.job)
            self._jobs = {ended.job: (job, StoreWriter(job.store, job.header))}  # the dump has the lock
        job, writer = self._jobs[ended.job]
        key = ended.job, ended.number
        if key not in self._open:
            bare = job.shards[ended.number]
            room = empty_states(job.header, sum(bare.lengths), self._pinned)
            self._open[key] = bare.with_states(room), set(range(len(bare.ids)))
        (shard, missing), names = self._open[key], state_names(job.header.taps)
        place = slice(*[0, *itertools.accumulate(shard.lengths)][ended.row : ended.row + 2])
        blocks = torch.tensor(ended.blocks, device=self._cache.device)
        for name, number in zip(names, (-1, *range(len(names) - 1)), strict=True):
            states = self._cache[blocks, number].flatten(0, 1)[: ended.tokens]
            stored, scale = to_storage(self._norm(states) if number == -1 else states, job.header.dtype)
            shard.states[name][place].copy_(stored, non_blocking=self._pinned)
            if scale is not None:
                shard.scales[name][place].copy_(scale, non_blocking=self._pinned)
        missing.remove(ended.row)
        if not missing:
            del self._open[key]
            event = torch.cuda.Event(blocking=True) if self._pinned else None
            if event is not None:
                event.record()
            self._background.submit(lambda: _write(job, writer, ended.number, shard, event))


def _write(job: Job, writer: StoreWriter, number: int, shard: Shard, event: Any) -> None:
    """Write a shard, in the thread. An error also goes into a file, because nothing checks after the last shard."""
    try:
        if event is not None:
            event.synchronize()
        for lost in writer.write(shard, number):
            print(f"left out, NaN or infinite: dialogue {lost}")
    except Exception as error:
        (job.folder / FAILED).write_text(f"{error}")
        raise
