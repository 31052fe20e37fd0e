"""Run the target on the shards of a split: batches by length, asynchronous copies to the host, writes in a thread.

The states of a dialogue depend only on its shard (a batch never has dialogues of two shards), so any number of
processes, and a resumed run, write the same bytes.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from data_prep.common.target import enough_memory
from data_prep.dialogues.encoding import EncodedSplit
from data_prep.store.manifest import StoreManifest
from data_prep.store.quantise import SCALED, state_names, storage_dtype, to_storage
from data_prep.store.writer import Shard
from drafters.common.threads import fit_threads
from drafters.model.target import FeatureOutput, TargetModel

IN_FLIGHT = 2  # shards that wait or are being written while the next one is computed
# Cost of one more forward, in tokens. More batches have less padding, fewer have larger products: with 128, padding is
# 4% for ShareGPT-like lengths in shards of 65,536 tokens, and an average batch still has thousands of tokens.
FORWARD_COST = 128


def plan_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Batches of dialogues of similar length, by index, longest first; at most ``batch_tokens`` padded tokens each.

    Dynamic programming over the dialogues sorted by length minimises the padded tokens plus ``FORWARD_COST`` per batch.
    A single longer dialogue is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    count = len(order)
    # Forward: the lowest cost of the n longest dialogues, and the start of its last batch.
    best: list[float] = [0.0] + [float("inf")] * count
    starts = [0] * (count + 1)
    for start in range(count):
        longest = lengths[order[start]]
        for rows in range(1, min(max(1, batch_tokens // longest), count - start) + 1):
            cost = best[start] + FORWARD_COST + rows * longest
            if cost < best[start + rows]:
                best[start + rows], starts[start + rows] = cost, start
    # Backward: the batches of the lowest cost.
    batches, end = [], count
    while end:
        batches.append(order[starts[end] : end])
        end = starts[end]
    return batches[::-1]


@dataclass
class Tokens:
    """Tokens on which the target ran, without and with padding."""

    real: int = 0
    padded: int = 0

    @property
    def padding(self) -> float:
        """Share of padding."""
        return 1 - self.real / self.padded if self.padded else 0.0


def empty_states(header: StoreManifest, tokens: int, pinned: bool) -> dict[str, torch.Tensor]:
    """Host memory for states ``[tokens, H]`` and scales ``[tokens]`` by name; page-locked (``pinned``) for a GPU."""
    shape, kind, names = (tokens, header.hidden_size), storage_dtype(header.dtype), state_names(header.taps)
    buffers = {name: torch.empty(shape, dtype=kind, pin_memory=pinned) for name in names}
    scaled = names if header.dtype in SCALED else []
    return buffers | {f"{name}_scale": torch.empty(tokens, pin_memory=pinned) for name in scaled}


@dataclass
class Computed:
    """A shard whose states are being copied to the host, as views of ``buffer``."""

    shard: Shard
    buffer: dict[str, torch.Tensor]
    events: list["torch.cuda.Event"]

    def wait(self) -> Shard:
        """The shard after the copies."""
        for event in self.events:
            event.synchronize()
        return self.shard


def without_states(split: EncodedSplit, first: int, last: int) -> Shard:
    """Ids, tokens and mask of the dialogues ``first..last``."""
    dialogues = split.dialogues[first:last]
    lengths = [len(dialogue.input_ids) for dialogue in dialogues]
    input_ids = torch.cat([torch.from_numpy(dialogue.input_ids) for dialogue in dialogues])
    loss_mask = torch.cat([torch.from_numpy(dialogue.loss_mask) for dialogue in dialogues])
    return Shard(split.ids[first:last], lengths, input_ids, loss_mask, {})


@torch.inference_mode()
def run_shard(
    target: TargetModel,
    header: StoreManifest,
    shard: Shard,
    batch_tokens: int,
    buffer: dict[str, torch.Tensor],
    after_batch: Callable[[int, int], None],
) -> Computed:
    """Compute the features and taps of ``shard`` into ``buffer``, in the order of the data file.

    ``after_batch`` gets each batch's tokens without and with padding, after its launch. Raises ValueError if the
    device's memory does not suffice.
    """
    lengths, starts = shard.lengths, [0, *itertools.accumulate(shard.lengths)]
    names, pinned = state_names(header.taps), target.device.type == "cuda"
    # Per batch: run the target, convert to the store's dtype, and copy each dialogue's states to its place.
    devices: set[torch.device] = set()
    for rows, ids in make_batches(shard, batch_tokens, pinned):
        fit_threads()
        output = forward(target, header, ids, [lengths[row] for row in rows], batch_tokens)
        for name, values in zip(names, (output.features, *(output.taps[layer] for layer in header.taps)), strict=True):
            devices.add(values.device)
            with explained(ids, batch_tokens):  # quantising makes float32 copies
                stored, scale = to_storage(values, header.dtype)
            for position, row in enumerate(rows):
                place, length = slice(starts[row], starts[row + 1]), lengths[row]
                buffer[name][place].copy_(stored[position, :length], non_blocking=pinned)
                if scale is not None:
                    buffer[f"{name}_scale"][place].copy_(scale[position, :length], non_blocking=pinned)
        after_batch(sum(lengths[row] for row in rows), ids.numel())
    # On a GPU, events mark the end of the last copy.
    events = []
    for device in devices if pinned else ():
        events.append(torch.cuda.Event(blocking=True))  # waiting threads sleep and leave the cores free
        events[-1].record(torch.cuda.current_stream(device))
    return Computed(shard.with_states(buffer), buffer, events)


def make_batches(shard: Shard, batch_tokens: int, pinned: bool) -> Iterator[tuple[list[int], torch.Tensor]]:
    """The batches of a shard: the sequences' indices among its dialogues, and their ids int64 ``[R, T]``."""
    lengths, dialogues = shard.lengths, shard.input_ids.split(shard.lengths)
    for rows in plan_batches(lengths, batch_tokens):
        ids = torch.zeros(len(rows), max(lengths[row] for row in rows), dtype=torch.int64, pin_memory=pinned)
        for position, row in enumerate(rows):
            ids[position, : lengths[row]] = dialogues[row]
        yield rows, ids


def forward(
    target: TargetModel, header: StoreManifest, ids: torch.Tensor, lengths: list[int], batch_tokens: int
) -> FeatureOutput:
    """The target's forward of one batch; raises ValueError if the device's memory does not suffice."""
    with explained(ids, batch_tokens):
        return target.features(ids.to(target.device, non_blocking=True), lengths, tuple(header.taps))


def explained(ids: torch.Tensor, batch_tokens: int) -> AbstractContextManager[None]:
    """Turn running out of the device's memory into a ValueError with a fix."""
    fix = f"lower batch_tokens (now {batch_tokens}) or max_length"
    return enough_memory(f"in a forward of {ids.numel()} tokens", fix)


class Background:
    """Runs jobs one after the other in a thread, with at most ``IN_FLIGHT`` of them waiting or running.

    On leaving the context it waits for all jobs, also after an error of the caller. A job's error is raised in the
    caller's thread at its next ``submit`` or ``check`` or on leaving.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writing shards")
        self._jobs: list[Future[None]] = []

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.check()

    def submit(self, job: Callable[[], None]) -> None:
        """Add a job; waits while ``IN_FLIGHT`` jobs are not done."""
        self.check()
        while len(self._jobs) >= IN_FLIGHT:
            self._jobs.pop(0).result()
        self._jobs.append(self._thread.submit(job))

    def check(self) -> None:
        """Raise the error of a failed job; does not wait."""
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()
