"""True features of committed tokens that a head has not taken in yet: steps without a draft of its own add to them."""

import torch
from torch import Tensor

from drafters.loop.acceptance import Verdict
from drafters.loop.state import last_of, rows_of
from drafters.model.target import FeatureOutput


class PendingFeatures:
    """Features ``[B, R, H]`` of committed rows, right-padded, with the number of real ones in each batch row.

    Args:
        output: of the prefill. lengths: of the prompts. The last feature of each prompt is pending.
    """

    def __init__(self, output: FeatureOutput, lengths: list[int]) -> None:
        self._parts = [(last_of(output.features, lengths)[:, None], [1] * len(lengths))]

    def add(self, output: FeatureOutput, verdict: Verdict) -> None:
        """Append the features of the rows that a step committed; none for a finished batch row."""
        self._parts.append((rows_of(output.features, verdict.rows), [len(rows) for rows in verdict.rows]))

    def all(self) -> tuple[Tensor, list[int]]:
        """All pending features, and how many each batch row has."""
        if len(self._parts) > 1:
            rows: list[list[int]] = [[] for _ in self._parts[0][1]]
            start = 0
            for features, counts in self._parts:
                for row, count in zip(rows, counts, strict=True):
                    row.extend(range(start, start + count))
                start += features.shape[1]
            whole = torch.cat([features for features, _ in self._parts], dim=1)
            self._parts = [(rows_of(whole, rows), [len(row) for row in rows])]
        return self._parts[0]

    def clear(self) -> None:
        """The head has taken them in."""
        self._parts = []

    def replace(self, rows: list[int], other: "PendingFeatures") -> None:
        """Give ``rows`` the pending features of another batch's rows 0, 1, ..., which have one each."""
        (features, counts), (first, _) = self.all(), other.all()
        for number, row in enumerate(rows):
            features[row, 0], counts[row] = first[number, 0], 1
        self._parts = [(features[:, : max(counts)], counts)]
