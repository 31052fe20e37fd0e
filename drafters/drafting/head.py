"""A head as the decoding loop runs it: it reads what was committed, and answers with slots that a draft grows over."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drafters.drafting.grow import Slots
from drafters.drafting.tree_plan import TreePlan
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState, last_of, rows_of
from drafters.loop.tree import DraftTree
from drafters.model.cache import KVCache
from drafters.model.target import FeatureOutput, TargetModel

SPARE = 1024  # slots of a bounded cache beyond the tokens that it keeps: for a draft, and for tokens to come

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from drafters.model.draft_head import DraftHead


class Head:
    """What a learned drafter holds. A method derives its own.

    Attributes:
        lm_heads: the LM heads that score its slots; all draft with the same tokens.
        taps: hidden states that it reads of every target forward, by the number of layers before them.
    """

    lm_heads: "list[DraftHead]"
    taps: tuple[int, ...] = ()

    def __init__(self, target: TargetModel, module: nn.Module) -> None:
        self.target = target
        self.module: Any = module

    @property
    def lm_head(self) -> "DraftHead":
        """The first LM head, which names the tokens."""
        return self.lm_heads[0]

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        """Read the prompts; ``output`` has their features."""
        raise NotImplementedError

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        """Read the prompts of ``part``, which replace the sequences ``rows`` of a running batch."""
        raise NotImplementedError

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        """Read what is pending, and return the slots of a new draft; ``plan``: its nodes, if they are fixed."""
        raise NotImplementedError

    def grown(self, state: DecodeState, plan: TreePlan | None) -> DraftTree | None:
        """Return a whole draft where the head has a faster way than ``slots``; else None."""
        return None

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        """Take in a committed step, whoever drafted it."""
        raise NotImplementedError


class PendingFeatures:
    """Features ``[B, R, H]`` of committed tokens, right-padded, with the number of real ones in each sequence.

    Args:
        features: the prefill's features. lengths: tokens of the prompts. The last feature of each prompt is pending.
    """

    def __init__(self, features: Tensor, lengths: list[int]) -> None:
        self.features, self.counts = last_of(features, lengths)[:, None], [1] * len(lengths)

    def add(self, features: Tensor, verdict: Verdict) -> None:
        """Append, of the features ``[B, N + 1, H]`` of [root, nodes], those that a step committed.

        A finished sequence gets none.
        """
        rows = verdict.rows
        if any(self.counts):
            width = self.features.shape[1]
            features = torch.cat([self.features, features], dim=1)
            pairs = zip(self.counts, rows, strict=True)
            rows = [[*range(count), *(width + row for row in new)] for count, new in pairs]
        self.features, self.counts = rows_of(features, rows), list(map(len, rows))

    def take(self, finished: list[bool], cache: KVCache) -> list[tuple[Tensor, list[int]]]:
        """Return and clear the pending features of the unfinished sequences, in parts that fit into ``cache``.

        A part is features ``[B, R, H]``, and their number in each sequence. The last part ends every sequence.
        """
        counts = [0 if done else count for count, done in zip(self.counts, finished, strict=True)]
        self.counts = [0] * len(counts)
        parts = in_parts(counts, cache)
        if len(parts) == 1:
            return [(self.features[:, : max(counts)], counts)]
        pending, begins = [], [0] * len(counts)
        for part in parts:
            ends = [begin + count for begin, count in zip(begins, part, strict=True)]
            rows = [list(range(*pair)) for pair in zip(begins, ends, strict=True)]
            pending.append((rows_of(self.features, rows), part))
            begins = ends
        return pending

    def keep_last(self, cache: KVCache, count: int) -> None:
        """Forget all but the last ``count`` features of each sequence, and what ``cache`` has of one that lost some."""
        for b, known in enumerate(self.counts):
            if known > count:
                cache.dropped[b] += cache.lengths[b] + known - count
                cache.lengths[b] = 0
        kept = [list(range(max(known - count, 0), known)) for known in self.counts]
        self.features, self.counts = rows_of(self.features, kept), list(map(len, kept))

    def replace(self, rows: list[int], other: "PendingFeatures") -> None:
        """Give the sequences ``rows`` the pending features of another batch's sequences 0, 1, ..., one each."""
        for number, row in enumerate(rows):
            self.features[row, 0], self.counts[row] = other.features[number, 0], 1
        self.features = self.features[:, : max(self.counts)]


def in_parts(counts: list[int], cache: KVCache) -> list[list[int]]:
    """Split the ``counts`` of new tokens of each sequence into parts that fit into ``cache``, one after the other.

    A forward has as many slots in every sequence as in the longest one. So a sequence near the end of the cache has no
    room beside one with many new tokens (hybrid). The last part holds the last tokens of every sequence.
    """
    most = max(counts)
    if max(cache.lengths) + most <= cache.capacity:
        return [counts]
    most = cache.capacity - max(known + count for known, count in zip(cache.lengths, counts, strict=True))
    later = range(0, max(counts), most)  # tokens of the longest sequence after each part, the last part first
    return [[min(max(count - after, 0), most) for count in counts] for after in reversed(later)]


class StateHead(Head):
    """A head that reads the target's states of committed tokens into a cache of its own.

    States of the latest tokens are pending until the next draft: a step without one adds to them.

    Args:
        layers: number of its layers. layer: their configuration.
        reach: tokens before a draft that it attends to; None: all. Its cache has room for no more than it needs.
    """

    def __init__(
        self, target: TargetModel, module: nn.Module, layers: int, layer: "PretrainedConfig", reach: int | None = None
    ) -> None:
        super().__init__(target, module)
        self.taps, self.reach = self.module.shape.reads, reach
        self._layers, self.layer = layers, layer
        self.cache = KVCache.nothing()
        self.pending: PendingFeatures

    def read(self, features: Tensor, counts: list[int], state: DecodeState) -> Any:
        """Put the first ``counts`` of the true features ``[B, R, taps * H]`` into the cache."""
        raise NotImplementedError

    def catch_up(self, state: DecodeState) -> Any:
        """Read what is pending; return what ``read`` returns of the last tokens."""
        latest = None
        state.empty_finished(self.cache)
        if self.reach is not None:
            self._make_room(self.reach, max(self.pending.counts))
        for features, counts in self.pending.take(state.finished, self.cache):
            latest = self.read(features, counts, state)
        return latest

    def true_features(self, output: FeatureOutput) -> Tensor:
        """Return what the head reads of the target's output: ``[B, R, taps * H]``; without taps the features."""
        return torch.cat([output.taps[tap] for tap in self.taps], dim=-1) if self.taps else output.features

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self.cache.release()  # so that its memory can be reused
        self._read_prompts(state, output)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        cache, pending = self.cache, self.pending
        self._read_prompts(part, output)
        for number, row in enumerate(rows):
            cache.copy_row(row, self.cache, number)
        pending.replace(rows, self.pending)
        self.cache.release()
        self.cache, self.pending = cache, pending

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        self.pending.add(self.true_features(output), verdict)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of the head's layers, for ``capacity`` tokens of each sequence."""
        return self.target.new_cache(batch, capacity, self._layers, self.layer)

    def _read_prompts(self, state: DecodeState, output: FeatureOutput) -> None:
        """Put the prompts' tokens into a new cache, all but the last of each, whose features are pending."""
        features = self.true_features(output)
        self.pending = PendingFeatures(features, state.prompt_lengths)
        counts = [length - 1 for length in state.prompt_lengths]
        capacity, first = state.cache.capacity, [0] * state.batch
        if self.reach is not None:
            capacity = min(capacity, 2 * self.reach + SPARE)
            first = [max(count - self.reach, 0) for count in counts]
        self.cache = self.new_cache(state.batch, capacity)
        self.cache.dropped, self.cache.positions = first, max(state.cache.capacity, self.cache.capacity)
        if any(first):
            features = rows_of(features, [list(range(*ends)) for ends in zip(first, counts, strict=True)])
        if any(counts):
            read = [count - start for count, start in zip(counts, first, strict=True)]
            self.read(features[:, : max(read)], read, state)

    def _make_room(self, reach: int, pending: int) -> None:
        """Give up tokens that no draft attends to any more, if the pending ones and a draft would not fit."""
        if pending > reach:  # of these, too, the last are enough
            self.pending.keep_last(self.cache, reach)
        if max(self.cache.lengths) + pending + SPARE > self.cache.capacity:
            self.cache.keep_last(reach)
