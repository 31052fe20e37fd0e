"""True features of committed tokens that a head has not taken in yet: steps without a draft of its own add to them."""

import torch
from torch import Tensor

from drafters.loop.acceptance import Verdict
from drafters.loop.state import last_of, rows_of


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
