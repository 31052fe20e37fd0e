"""The target over the shards of a split: batches by length, copies to the host without waiting, writing in a thread.

What is computed for a dialogue depends on its shard alone (batches never reach over the end of one), so that any number
of processes, and a run that was interrupted, write the same bytes.
"""

import contextlib
import itertools
import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from data_prep.dialogues.encoding import EncodedSplit
from data_prep.store.manifest import StoreManifest
from data_prep.store.quantise import SCALED, state_names, storage_dtype, to_storage
from data_prep.store.writer import Shard
from drafters.common.threads import fit_threads
from drafters.model.target import FeatureOutput, TargetModel

IN_FLIGHT = 2  # shards that wait to be written or are being written while the next one is computed
# What one more forward costs, in tokens. More batches mean less padding, fewer mean larger products: with 128 the
# padding is 4% of ShareGPT-like lengths in shards of 65,536 tokens, and an average batch still has thousands of tokens.
FORWARD_COST = 128


def plan_batches(lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Indices of dialogues of similar length, longest first; padded, a batch has at most ``batch_tokens`` tokens.

    Of all ways to cut the dialogues, sorted by length, into batches, the one with the least padded tokens, where each
    batch counts ``FORWARD_COST`` more. A single longer dialogue is a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    count = len(order)
    # Forward over the cuts: batch after batch, the cheapest way to have run the n longest dialogues.
    best: list[float] = [0.0] + [float("inf")] * count  # cost of the first n dialogues
    starts = [0] * (count + 1)  # where the last batch of that cheapest cut begins
    for start in range(count):
        longest = lengths[order[start]]
        for rows in range(1, min(max(1, batch_tokens // longest), count - start) + 1):
            cost = best[start] + FORWARD_COST + rows * longest
            if cost < best[start + rows]:
                best[start + rows], starts[start + rows] = cost, start
    # Backward along the cheapest one.
    batches, end = [], count
    while end:
        batches.append(order[starts[end] : end])
        end = starts[end]
    return batches[::-1]


@dataclass
class Tokens:
    """What the target was given: tokens of dialogues, and the padded size of their batches."""

    real: int = 0
    padded: int = 0

    @property
    def padding(self) -> float:
        """The share of what was computed that was padding."""
        return 1 - self.real / self.padded if self.padded else 0.0


class Buffers:
    """Host memory for ``IN_FLIGHT`` + 1 shards, taken in turns; page-locked (``pinned``) where a GPU copies into it.

    Args:
        target: whose states they take.
        header: dtype and taps of the store.
        tokens: of the longest shard.
    """

    def __init__(self, target: TargetModel, header: StoreManifest, tokens: int) -> None:
        self._free: queue.SimpleQueue[dict[str, torch.Tensor]] = queue.SimpleQueue()
        self._unmade = IN_FLIGHT + 1
        self.pinned = target.device.type == "cuda"
        shape, kind = (tokens, target.hidden_size), storage_dtype(header.dtype)
        self._kinds: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name in state_names(header.taps):
            self._kinds[name] = shape, kind
            if header.dtype in SCALED:
                self._kinds[f"{name}_scale"] = shape[:1], torch.float32

    def take(self) -> dict[str, torch.Tensor]:
        """Tensors ``[tokens, H]`` and scales ``[tokens]`` by name; waits until one is given back if all are in use."""
        if self._unmade and self._free.empty():
            self._unmade -= 1
            return {
                name: torch.empty(shape, dtype=kind, pin_memory=self.pinned)
                for name, (shape, kind) in self._kinds.items()
            }
        return self._free.get()

    def give_back(self, buffer: dict[str, torch.Tensor]) -> None:
        """Take a buffer back whose contents are on disk."""
        self._free.put(buffer)


@dataclass
class Computed:
    """A shard whose states are on their way to the host."""

    shard: Shard
    buffer: dict[str, torch.Tensor]
    events: list["torch.cuda.Event"]

    def wait(self) -> Shard:
        """The shard, once all of it has arrived."""
        for event in self.events:
            event.synchronize()
        return self.shard


@torch.inference_mode()
def run_shard(
    target: TargetModel,
    header: StoreManifest,
    split: EncodedSplit,
    span: tuple[int, int],
    batch_tokens: int,
    buffers: Buffers,
    after_batch: Callable[[int, int], None],
) -> Computed:
    """Features and taps of the dialogues of ``span``: run by length, laid down in the order of the data file.

    Args:
        after_batch: called with each batch's tokens, without and with its padding, when it was handed to the device.

    Raises:
        ValueError: the device's memory does not suffice for a batch.
    """
    dialogues = split.dialogues[slice(*span)]
    lengths = [len(dialogue.input_ids) for dialogue in dialogues]
    starts = [0, *itertools.accumulate(lengths)]
    buffer, names = buffers.take(), state_names(header.taps)
    # Batch by batch: the target, the store's dtype, and each dialogue's states to its place in the shard's order.
    devices: set[torch.device] = set()
    for rows, ids in make_batches(split, span, batch_tokens, pinned=buffers.pinned):
        fit_threads()
        output = forward(target, header, ids, [lengths[row] for row in rows], batch_tokens)
        for name, values in zip(names, (output.features, *(output.taps[layer] for layer in header.taps)), strict=True):
            devices.add(values.device)
            with explained(ids, batch_tokens):  # quantising makes float32 copies
                stored, scale = to_storage(values, header.dtype)
            for position, row in enumerate(rows):
                place, length = slice(starts[row], starts[row + 1]), lengths[row]
                buffer[name][place].copy_(stored[position, :length], non_blocking=buffers.pinned)
                if scale is not None:
                    scales = buffer[f"{name}_scale"][place]
                    scales.copy_(scale[position, :length], non_blocking=buffers.pinned)
        after_batch(sum(lengths[row] for row in rows), ids.numel())
    # The shard is views of the buffer, which the copies may still be filling.
    parts = {name: values[: starts[-1]] for name, values in buffer.items()}
    shard = Shard(
        ids=split.ids[slice(*span)],
        lengths=lengths,
        input_ids=torch.cat([torch.from_numpy(dialogue.input_ids) for dialogue in dialogues]),
        loss_mask=torch.cat([torch.from_numpy(dialogue.loss_mask) for dialogue in dialogues]),
        states={name: parts[name] for name in names},
        scales={name: parts[f"{name}_scale"] for name in names if header.dtype in SCALED},
    )
    # On a GPU, events tell when the last copy has arrived.
    events = []
    for device in devices if buffers.pinned else ():
        events.append(torch.cuda.Event(blocking=True))  # whoever waits for it sleeps: the cores are wanted
        events[-1].record(torch.cuda.current_stream(device))
    return Computed(shard, buffer, events)


def make_batches(
    split: EncodedSplit, span: tuple[int, int], batch_tokens: int, pinned: bool
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """The batches of a shard: the rows' places among the dialogues of ``span``, and their ids int64 ``[R, T]``."""
    dialogues = split.dialogues[slice(*span)]
    lengths = [len(dialogue.input_ids) for dialogue in dialogues]
    for rows in plan_batches(lengths, batch_tokens):
        ids = torch.zeros(len(rows), max(lengths[row] for row in rows), dtype=torch.int64, pin_memory=pinned)
        for position, row in enumerate(rows):
            ids[position, : lengths[row]] = torch.from_numpy(dialogues[row].input_ids)
        yield rows, ids


def forward(
    target: TargetModel, header: StoreManifest, ids: torch.Tensor, lengths: list[int], batch_tokens: int
) -> FeatureOutput:
    """The target's forward of one batch.

    Raises:
        ValueError: the device's memory does not suffice.
    """
    with explained(ids, batch_tokens):
        return target.features(ids.to(target.device, non_blocking=True), lengths, tuple(header.taps))


@contextlib.contextmanager
def explained(ids: torch.Tensor, batch_tokens: int) -> Iterator[None]:
    """Turn running out of the device's memory in a batch into a ValueError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"out of memory in a forward of {ids.numel()} tokens; lower batch_tokens (now {batch_tokens}) or "
            "max_length and run again: finished shards are kept"
        ) from error


class Background:
    """Runs jobs one after the other in a thread, at most ``IN_FLIGHT`` of them waiting or running.

    As a context manager: on leaving it waits for all jobs, also when the caller failed. A job's error is raised in the
    caller's thread, at its next ``submit`` or ``check`` or on leaving; no job is begun after one that failed.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writing shards")
        self._jobs: list[Future[None]] = []
        self._last: Future[None] | None = None

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._thread.shutdown(wait=True)
        if error is None:
            self.check()

    def submit(self, job: Callable[[], None]) -> None:
        """Hand over a job; waits while ``IN_FLIGHT`` are not done."""
        self.check()
        while len(self._jobs) >= IN_FLIGHT:
            self._jobs.pop(0).result()
        self._last = self._thread.submit(_after, self._last, job)
        self._jobs.append(self._last)

    def check(self) -> None:
        """Raise the error of a job that failed; costs nothing, so ask often."""
        while self._jobs and self._jobs[0].done():
            self._jobs.pop(0).result()


def _after(before: "Future[None] | None", job: Callable[[], None]) -> None:
    if before is not None:
        before.result()  # raises its error in place of beginning the job
    job()
