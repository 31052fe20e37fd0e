"""State of one batched generation, and helpers for sequences of unequal length."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from drafters.loop.acceptance import Control
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.model.cache import KVCache
from drafters.model.target import TargetModel


@dataclass
class DecodeState:
    """State of one batched generation.

    The last committed token of a sequence is the root of the next draft. It has no cache slot yet, so a sequence uses
    one slot less than it has tokens.

    Attributes:
        tokens: prompt and new token ids of each sequence, on the host; at first the prompts.
        capacity: slots per sequence of the cache, which is empty at first.
        prompt_lengths: tokens of each sequence's prompt.
        finished: True for each sequence after EOS, the limit, or a stop by ``control``.
        control: logits processors and stopping criteria, or None.
        reach: most tokens of sequences that may join later; 0: none joins.
    """

    target: TargetModel
    tokens: list[list[int]]
    capacity: InitVar[int]
    max_new_tokens: int
    sampling: Sampling
    generator: torch.Generator
    eos: frozenset[int]
    control: Control | None = None
    reach: int = 0
    _roots: Tensor | None = None
    _nothing: DraftTree | None = None

    def __post_init__(self, capacity: int) -> None:
        self.cache = self.target.new_cache(self.batch, capacity)
        self.prompt_lengths = [len(prompt) for prompt in self.tokens]
        self.finished = [False] * self.batch

    @property
    def batch(self) -> int:
        """Number of sequences B."""
        return len(self.tokens)

    @property
    def roots(self) -> Tensor:
        """``[B, 1]`` last committed token of each sequence; copied to the device once a step."""
        if self._roots is None:
            self._roots = torch.tensor([row[-1:] for row in self.tokens], device=self.target.device)
        return self._roots

    @property
    def nothing(self) -> DraftTree:
        """The empty draft."""
        if self._nothing is None:
            self._nothing = DraftTree.empty(self.batch, self.target.device)
        return self._nothing

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""
        return max(map(len, self.tokens))

    @property
    def longest(self) -> int:
        """Most tokens that a sequence can reach, also one that joins later."""
        return self.reach or min(max(self.prompt_lengths) + self.max_new_tokens, self.cache.capacity)

    def room(self, row: int = 0) -> int:
        """Tokens that a sequence may still commit. Draft tokens beyond ``room - 1`` cannot be accepted."""
        return self.max_new_tokens - (len(self.tokens[row]) - self.prompt_lengths[row])

    def longest_draft(self, wanted: int) -> int:
        """Return ``wanted``, at most the draft tokens that fit into an unfinished sequence beside a bonus token."""
        rooms = [self.room(row) for row in range(self.batch) if not self.finished[row]]
        return max(min(wanted, max(rooms, default=1) - 1), 0)

    def append(self, row: int, tokens: list[int]) -> int:
        """Commit tokens to a sequence, cut at its limit and at its end; return the number committed."""
        room = self.room(row)
        committed = until(tokens[:room], self.eos)
        ended = bool(committed) and committed[-1] in self.eos
        if self.control is not None:
            before = self.tokens[row][self.prompt_lengths[row] :]
            for count in range(1, len(committed) + 1):
                if self.control.ends(row, [*before, *committed[:count]]):
                    committed, ended = committed[:count], True
                    break
        self.tokens[row].extend(committed)
        self._roots = None
        self.finished[row] = ended or len(committed) == room
        return len(committed)

    def empty_finished(self, cache: KVCache) -> None:
        """Drop finished sequences from a drafter's cache, so that it has room for what the others read at once."""
        if any(self.finished):
            cache.crop([0 if done else rows for rows, done in zip(cache.lengths, self.finished, strict=True)])

    def replace(self, row: int, tokens: list[int]) -> None:
        """Replace the tokens of a sequence. The caller adjusts the cache."""
        self.tokens[row], self._roots = tokens, None


def until(tokens: Sequence[int], stop: frozenset[int]) -> Sequence[int]:
    """Return the tokens up to and including the first one in ``stop`` (EOS)."""
    for index, token in enumerate(tokens):
        if token in stop:
            return tokens[: index + 1]
    return tokens


def padded(rows: list[list[int]], device: torch.device, fill: int = 0) -> Tensor:
    """``[B, T]`` token ids of sequences of unequal length, filled on the right."""
    width = max(map(len, rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], device=device)


def last_of(values: Tensor, counts: list[int]) -> Tensor:
    """Return ``values[b, counts[b] - 1]`` of each sequence: ``[B, R, H]`` -> ``[B, H]``."""
    if counts.count(values.shape[1]) == len(counts):
        return values[:, -1]
    last = torch.tensor(counts, device=values.device) - 1
    return values[torch.arange(len(counts), device=values.device), last]


def rows_of(features: Tensor, rows: list[list[int]]) -> Tensor:
    """Copy rows ``rows[b]`` of each ``features[b]``: ``[B, R, H]`` -> ``[B, most, H]``, padded on the right."""
    if len(rows) == 1 and rows[0] == [*range(len(rows[0]))]:  # first rows of a batch of one: a slice is 3 times faster
        return features[:, : len(rows[0])].clone()
    places = padded(rows, features.device)[..., None]
    return features.gather(1, places.expand(-1, -1, features.shape[2]))
