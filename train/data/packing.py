"""Dialogues -> packed micro-batches, in a seeded order that any number of ranks shares and any step can be resumed.

A global batch is a sample of the epoch's dialogues that nearly fills ``batch_tokens``. It is split over
``ranks x gradient_accumulation`` micro-batches of nearly equal token counts, so the batches do not depend on the number
of ranks. A micro-batch is one row without padding, in which each dialogue attends only to itself
(train/core/attention.py) and counts its positions from 0.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from data_prep.store.reader import FeatureStore
from train.core.attention import Dialogues
from train.core.config import TrainConfig
from train.core.runtime import ALONE, Ranks
from train.data.shard_check import ShardCheck

if TYPE_CHECKING:
    from train.data.online import OnlineFeatures

Source: TypeAlias = "FeatureStore | OnlineFeatures"

# For a GPU a step's features (64 MB at 8,192 tokens of 4,096 values) are copied twice: out of the file, then into
# page-locked memory. One thread may be slower at that than the GPU at training.
READERS = 4
OPEN_BATCHES = 32  # batches that still take dialogues; more of them are hardly filled better


NONE = torch.empty(0, dtype=torch.int64)


class Span(NamedTuple):
    """The place of a store's dialogue in a packed batch."""

    row: int
    start: int
    length: int
    dialogue: int

    def of(self, values: Tensor) -> Tensor:
        """A view of the dialogue's part ``[T, ...]`` of ``[R, L, ...]``."""
        return values[self.row, self.start : self.start + self.length]


@dataclass
class Batch:
    """A packed micro-batch of R rows of L tokens.

    Attributes:
        input_ids: int64 ``[R, L]``; 0 in the padding.
        loss_mask: bool ``[R, L]``, True for tokens of assistant answers.
        features: ``[R, L, H]``; zeros in the padding.
        taps: ``{layer: [R, L, H]}``.
        position_ids: int64 ``[R, L]``, from 0 in each dialogue.
        segments: int64 ``[R, L]``, which dialogue of the row a token belongs to; -1 for padding.
        spans: the place of each dialogue.
        rows: int64 ``[n]``, flat indices into ``[R * L]`` of the trained positions, once a task has chosen them.
        anchors: positions of the anchors of a block drafter's blocks by dialogue, ascending.
        places: int64 ``[n]``, the place of each of ``rows`` among the slots of all blocks: block * slots + slot.
    """

    input_ids: Tensor
    loss_mask: Tensor
    features: Tensor
    taps: dict[int, Tensor]
    position_ids: Tensor
    segments: Tensor
    spans: list[Span]
    rows: Tensor = NONE
    anchors: list[list[int]] = field(default_factory=list)
    places: Tensor = NONE

    @property
    def tokens(self) -> int:
        """Tokens without the padding."""
        return sum(span.length for span in self.spans)

    def shifted(self, values: Tensor, by: int) -> Tensor:
        """``values[i + by]`` at index i ``[R, L]``; 0 or False if i + by is in another dialogue or outside."""
        shifted = torch.roll(values, -by, dims=1)
        inside = torch.roll(self.segments, -by, dims=1) == self.segments
        inside[:, max(0, inside.shape[1] - by) :] = False
        return torch.where(inside & (self.segments >= 0), shifted, torch.zeros_like(shifted))

    def attention(self) -> Dialogues | None:
        """The mask, for a head with ``use_dialogue_attention``; None if each row is one dialogue."""
        return Dialogues(self.dialogue_lengths()) if self.spans else None

    def dialogue_lengths(self) -> list[int]:
        """Lengths of the dialogues in a single row; without spans it is one dialogue."""
        return [span.length for span in self.spans] or [self.segments.shape[1]]

    def pin_memory(self) -> Batch:
        """A copy in page-locked memory (torch pins no expanded tensor)."""
        return self._each(lambda tensor: tensor.contiguous().pin_memory() if tensor.numel() else tensor)

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """A copy on ``device``, its floating point tensors in ``dtype``."""

        def moved(tensor: Tensor) -> Tensor:
            there = tensor.to(device, non_blocking=True)
            return there.to(dtype) if there.is_floating_point() else there

        return self._each(moved)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """A copy with ``change`` applied to each tensor."""
        tensors: dict[str, Any] = {name: change(value) for name, value in vars(self).items() if torch.is_tensor(value)}
        return replace(self, **tensors, taps={layer: change(tap) for layer, tap in self.taps.items()})


def complete(store: Source, batch: Batch, taps: tuple[int, ...]) -> Batch:
    """``batch`` with its features, which an online run's target computes now."""
    return batch if isinstance(store, FeatureStore) else store.complete(batch, taps)


def collate(store: Source, dialogues: list[int], taps: tuple[int, ...] = ()) -> Batch:
    """Read dialogues and the states after the layers ``taps`` into one row; ``complete`` may add the features."""
    items = [store[index] for index in dialogues]
    lengths = [len(item.input_ids) for item in items]
    starts = itertools.accumulate(lengths, initial=0)
    return Batch(
        input_ids=torch.cat([item.input_ids for item in items])[None],
        loss_mask=torch.cat([item.loss_mask for item in items])[None],
        features=torch.cat([item.features for item in items])[None],
        taps={layer: torch.cat([item.taps[layer] for item in items])[None] for layer in taps},
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        segments=torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None],
        spans=[Span(0, *place) for place in zip(starts, lengths, dialogues, strict=False)],
    )


def collate_or_stand_in(store: Source, share: list[int], dialogues: list[int], taps: tuple[int, ...] = ()) -> Batch:
    """``collate``; an empty share becomes the shortest of ``dialogues`` with an empty loss mask.

    A rank without work must still take part in the collectives, and add nothing to the sums.
    """
    if share:
        return collate(store, share, taps)
    batch = collate(store, [min(dialogues, key=lambda i: len(store[i].input_ids))], taps)
    return replace(batch, loss_mask=torch.zeros_like(batch.loss_mask), spans=[])


@dataclass(frozen=True)
class Position:
    """The next global batch to train on."""

    epoch: int = 0
    batch: int = 0


def epoch_batches(lengths: list[int], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The global batches of one epoch: every dialogue once, at most ``batch_tokens`` tokens a batch.

    The dialogues are shuffled, and each goes into the fullest open batch that it fits, so a batch is a random sample
    and still nearly full. A dialogue longer than ``batch_tokens`` is a batch of its own. A saved position counts these
    batches: a change of them must raise ``PACKING`` in train/run/files.py.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    batches: list[list[int]] = []
    free: list[tuple[int, int]] = []  # of the open batches, sorted: tokens that still fit, place in ``batches``
    for index in torch.randperm(len(lengths), generator=generator).tolist():
        at = bisect.bisect_left(free, (lengths[index], 0))
        if at < len(free):
            space, place = free.pop(at)
            batches[place].append(index)
        else:
            space, place = max(batch_tokens, lengths[index]), len(batches)
            batches.append([index])
        if space > lengths[index]:
            bisect.insort(free, (space - lengths[index], place))
        if len(free) > OPEN_BATCHES:
            free.pop(0)
    fill_emptiest(batches, lengths)
    # Shuffled again, because a batch that was hard to fill was opened early.
    return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def fill_emptiest(batches: list[list[int]], lengths: list[int]) -> None:
    """Move dialogues from the fullest batches to the emptiest one until it has nine tenths of their tokens.

    Otherwise an epoch's last batch could be a step on few tokens, and each would count as much as dozens of others.
    """
    tokens = [sum(lengths[index] for index in batch) for batch in batches]
    while several := [place for place, batch in enumerate(batches) if len(batch) > 1]:
        empty = min(range(len(batches)), key=tokens.__getitem__)
        full = max(several, key=tokens.__getitem__)
        gap = tokens[full] - tokens[empty]
        fitting = [index for index in batches[full] if lengths[index] < gap]
        if gap <= 0.1 * tokens[full] or not fitting:
            return
        moved = min(fitting, key=lambda index: abs(gap - 2 * lengths[index]))
        batches[full].remove(moved)
        batches[empty].append(moved)
        tokens[full] -= lengths[moved]
        tokens[empty] += lengths[moved]


def split_evenly(dialogues: list[int], lengths: list[int], parts: int) -> list[list[int]]:
    """Split a global batch into ``parts`` of nearly equal token counts (longest first, to the emptiest part).

    With fewer dialogues than parts, some parts are empty.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for index in sorted(dialogues, key=lambda i: (-lengths[i], i)):
        part = tokens.index(min(tokens))
        shares[part].append(index)
        tokens[part] += lengths[index]
    return shares


@dataclass
class StepData:
    """One optimiser step's micro-batches of this rank, the epoch they belong to, and the position after them."""

    batches: list[Batch]
    epoch: int
    following: Position


Rewrite: TypeAlias = Callable[[Position, StepData], list[Batch]]


class TrainData:
    """Endless optimiser steps over a store.

    Args:
        store: the training features, or dialogues whose features are computed.
        config: the run's.
        ranks: this process among its peers.
        pin: copy into page-locked memory, from which a GPU reads while the host continues.

    Attributes:
        check: gets the dialogues that any rank reads.
        rewrite: replaces texts of a step, before their features are computed.
    """

    check: ShardCheck | None = None
    rewrite: Rewrite | None = None

    def __init__(self, store: Source, config: TrainConfig, ranks: Ranks = ALONE, pin: bool = False) -> None:
        self.store, self.config, self.ranks, self.pin = store, config, ranks, pin
        self.lengths: list[int] = store.lengths.tolist()

    def epoch(self, number: int) -> list[list[int]]:
        """The global batches of an epoch, as store indices."""
        return epoch_batches(self.lengths, self.config.batch_tokens, self.config.seed, number)

    def steps_in(self, epochs: int) -> int:
        """Optimiser steps in the first ``epochs`` epochs (each shuffle fills its batches a little differently)."""
        return sum(len(self.epoch(number)) for number in range(epochs))

    def steps(self, position: Position) -> Generator[StepData, None, None]:
        """Steps from ``position`` on; threads read the next ones during the current one.

        An online run's target computes its features here, in the caller's thread: target and head share the device, so
        running them in parallel would save no time and need the memory of two steps.
        """
        ahead = READERS if self.pin else 1
        with ThreadPoolExecutor(ahead) as readers:
            plan = self.plan(position)
            waiting = deque(readers.submit(self._read, *next(plan)) for _ in range(ahead))
            while True:
                current = waiting.popleft()
                waiting.append(readers.submit(self._read, *next(plan)))
                data = current.result()
                if self.rewrite is not None:
                    data.batches = self.rewrite(position, data)
                    position = data.following
                data.batches = [complete(self.store, batch, self.config.taps) for batch in data.batches]
                yield data

    def shares(self, dialogues: list[int]) -> list[list[int]]:
        """This rank's micro-batches of a global batch."""
        count = self.config.gradient_accumulation
        shares = split_evenly(dialogues, self.lengths, self.ranks.count * count)
        return shares[self.ranks.rank * count : (self.ranks.rank + 1) * count]

    def plan(self, position: Position) -> Iterator[tuple[list[int], int, Position]]:
        """The global batches from ``position`` on, each with its epoch and the position after it; without end."""
        epoch, start = position.epoch, position.batch
        while True:
            batches = self.epoch(epoch)
            for number in range(start, len(batches)):
                last = number + 1 == len(batches)
                yield batches[number], epoch, Position(epoch + 1, 0) if last else Position(epoch, number + 1)
            epoch, start = epoch + 1, 0

    def _read(self, dialogues: list[int], epoch: int, following: Position) -> StepData:
        if self.check is not None:
            self.check.first_read(self.store, dialogues)
        taps, shares = self.config.taps, self.shares(dialogues)
        batches = [collate_or_stand_in(self.store, share, dialogues, taps) for share in shares]
        return StepData([batch.pin_memory() for batch in batches] if self.pin else batches, epoch, following)
