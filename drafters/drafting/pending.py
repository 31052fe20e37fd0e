"""What a head that reads the target's states keeps between steps: its cache, and features that it has not taken in yet.

Steps without a draft of its own add to those features.
"""

from typing import Any

import torch
from torch import Tensor, nn

from drafters.learned import LearnedDrafter
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState, last_of, rows_of
from drafters.model.cache import KVCache
from drafters.model.target import FeatureOutput, TargetModel


class PendingFeatures:
    """Features ``[B, R, H]`` of committed rows, right-padded, with the number of real ones in each batch row.

    Args:
        features: of the prefill. lengths: of the prompts. The last feature of each prompt is pending.
    """

    def __init__(self, features: Tensor, lengths: list[int]) -> None:
        self.features, self.counts = last_of(features, lengths)[:, None], [1] * len(lengths)

    def add(self, features: Tensor, verdict: Verdict) -> None:
        """Append, of the features ``[B, N + 1, H]`` of [root, nodes], those that a step committed.

        A finished batch row gets none.
        """
        rows = verdict.rows
        if any(self.counts):
            width = self.features.shape[1]
            features = torch.cat([self.features, features], dim=1)
            pairs = zip(self.counts, rows, strict=True)
            rows = [[*range(count), *(width + row for row in new)] for count, new in pairs]
        self.features, self.counts = rows_of(features, rows), list(map(len, rows))

    def take(self) -> tuple[Tensor, list[int]]:
        """All pending features, and how many each batch row has; none are left."""
        counts, self.counts = self.counts, [0] * len(self.counts)
        return self.features, counts

    def replace(self, rows: list[int], other: "PendingFeatures") -> None:
        """Give ``rows`` the pending features of another batch's rows 0, 1, ..., which have one each."""
        for number, row in enumerate(rows):
            self.features[row, 0], self.counts[row] = other.features[number, 0], 1
        self.features = self.features[:, : max(self.counts)]


class StateReader(LearnedDrafter):
    """A drafter whose head reads the target's states of committed tokens, and keeps them in a cache of its own."""

    def __init__(self, target: TargetModel, module: nn.Module, options: Any) -> None:
        super().__init__(target, module, options)
        self._cache = KVCache.nothing()
        self._pending: PendingFeatures

    def true_features(self, output: FeatureOutput) -> Tensor:
        """Return what the head reads of the target's rows: ``[B, R, taps * H]``; without taps the features."""
        return torch.cat([output.taps[tap] for tap in self.taps], dim=-1) if self.taps else output.features

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self._cache.release()  # so that its memory can be reused
        self._read_prompts(state, output)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        cache, pending = self._cache, self._pending
        self._read_prompts(part, output)
        for number, row in enumerate(rows):
            cache.copy_row(row, self._cache, number)
        pending.replace(rows, self._pending)
        self._cache.release()
        self._cache, self._pending = cache, pending

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        self._pending.add(self.true_features(output), verdict)

    def _read_prompts(self, state: DecodeState, output: FeatureOutput) -> None:
        """Put the prompts' rows into a new cache, all but the last of each, whose features are pending."""
        raise NotImplementedError
