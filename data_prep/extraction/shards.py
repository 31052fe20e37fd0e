"""Jobs of vLLM's process, and the copies of hidden states from its cache to the shards of a store; without vLLM.

A job is a folder with the store's header, and tokens and masks of the shards to write.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from data_prep.dialogues.encoding import EncodedSplit
from data_prep.extraction.dump import Background, empty_states, without_states
from data_prep.store.manifest import StoreManifest, shard_file
from data_prep.store.quantise import state_names, to_storage
from data_prep.store.writer import Shard, StoreWriter
from drafters.common.files import save_tensors

JOB, FAILED = "job.json", "failed"


@dataclass(frozen=True)
class Job:
    """Shards of one split by their numbers, without states. The dump holds the lock of the folder ``store``."""

    folder: Path
    store: Path
    header: StoreManifest  # without counts
    shards: dict[int, Shard]

    @classmethod
    def write(
        cls, folder: Path, store: Path, header: StoreManifest, spans: list[tuple[int, int, int]], split: EncodedSplit
    ) -> None:
        """Make the folder for the shards ``(number, first, last)`` of dialogues ``first..last``."""
        folder.mkdir(parents=True, exist_ok=True)
        shards = []
        for number, first, last in spans:
            shard = without_states(split, first, last)
            save_tensors({"input_ids": shard.input_ids, "loss_mask": shard.loss_mask}, folder / shard_file(number))
            shards.append({"number": number, "ids": shard.ids, "lengths": shard.lengths})
        facts = {"store": str(store.absolute()), "header": header.model_dump(), "shards": shards}
        (folder / JOB).write_text(json.dumps(facts))

    @classmethod
    def read(cls, folder: str) -> "Job":
        """Read a folder that ``write`` made."""
        facts: dict[str, Any] = json.loads((Path(folder) / JOB).read_text())
        shards = {}
        for one in facts["shards"]:
            tensors = load_file(Path(folder) / shard_file(one["number"]))
            shards[one["number"]] = Shard(one["ids"], one["lengths"], tensors["input_ids"], tensors["loss_mask"], {})
        return cls(Path(folder), Path(facts["store"]), StoreManifest(**facts["header"]), shards)


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
