"""The draft: a tree of tokens below the last committed token (the root). A chain is a tree."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

ROOT = -1


@dataclass
class Extra:
    """Fields of a draft that only some methods use.

    Attributes:
        hidden: ``[B, N + 1, H]`` hidden states of [root, nodes] after ``resume_layer`` layers, which ran while drafting
            (Kangaroo). Verification resumes there.
        resume_layer: number of layers that already ran; 0 runs the whole target.
        scratch: number of nodes, the last ones, that join the target's forward and can never be accepted (Lookahead's
            window). Acceptance rules do not see them.
        scratch_outputs: number of scratch nodes, the last ones, whose logits ``FeatureOutput.scratch`` holds.
        target_forwards: forwards of the target that the drafter spent on this draft (MJGD's beam search).
        log_q: ``[B, N]`` the draft model's log-probability of each node given its ancestors (joint-likelihood rules).
        source: name of the inner drafter that made the draft (hybrids); for reports.
    """

    hidden: Tensor | None = None
    resume_layer: int = 0
    scratch: int = 0
    scratch_outputs: int = 0
    target_forwards: int = 0
    log_q: Tensor | None = None
    source: str = ""


@dataclass
class DraftTree:
    """What a drafter proposes for one step.

    Attributes:
        tokens: ``[B, N]`` draft tokens in topological order (a parent before its children).
        parents: ``[B, N]`` index of each node's parent in ``0..N-1``, or ``ROOT`` for the root's children.
        q: ``[B, R, V]`` float32 distributions that nodes were sampled from, or None when every node is deterministic.
        q_row: ``[B, N]`` the row of ``q`` that a node was sampled from; -1 marks a deterministic node (top-k, an
            n-gram), which is verified as if its q were one-hot. Siblings of one row were drawn WITHOUT replacement, in
            order.
        valid: ``[B, N]`` False for padding nodes, which can never be accepted; None if there is no padding.
        is_chain: True if every node is the child of the one before it.
        see: ``[1 or B, N + 1, N + 1]`` the ancestor mask, if it is already known.
        draws: per level from the root, the most children of one row that were sampled from ``q``. Verification
            walks these levels. None is the largest value that N nodes allow.
        extra: fields that only some methods use.
    """

    tokens: Tensor
    parents: Tensor
    q: Tensor | None = None
    q_row: Tensor | None = None
    valid: Tensor | None = None
    is_chain: bool = False
    see: Tensor | None = None
    draws: tuple[int, ...] | None = None
    extra: Extra = field(default_factory=Extra)

    @property
    def size(self) -> int:
        """Number of nodes N, scratch included, the root not counted."""
        return self.tokens.shape[1]

    @property
    def levels(self) -> tuple[int, ...]:
        """``draws``, or their largest possible values."""
        return self.draws if self.draws is not None else (0 if self.q is None else self.size,) * self.size

    def proposed(self, see: Tensor) -> tuple["DraftTree", Tensor]:
        """The draft and its ancestor mask without the scratch nodes, for the acceptance rule."""
        if not self.extra.scratch:
            return self, see
        n = self.size - self.extra.scratch
        extra = replace(self.extra, scratch=0)
        draft = replace(self, tokens=self.tokens[:, :n], parents=self.parents[:, :n], see=None, extra=extra)
        draft.q_row = self.q_row[:, :n] if self.q_row is not None else None
        draft.valid = self.valid[:, :n] if self.valid is not None else None
        return draft, see[:, : n + 1, : n + 1]

    def of(self, some: Tensor) -> "DraftTree":
        """The draft of some sequences."""
        q, q_row, valid = (part if part is None else part[some] for part in (self.q, self.q_row, self.valid))
        tokens, parents = self.tokens[some], self.parents[some]
        return replace(self, tokens=tokens, parents=parents, q=q, q_row=q_row, valid=valid, see=None)

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> "DraftTree":
        """The draft of plain decoding."""
        return cls.chain(torch.zeros(batch, 0, dtype=torch.long, device=device))

    @classmethod
    def chain(cls, tokens: Tensor, q: Tensor | None = None, valid: Tensor | None = None) -> Self:
        """A chain of ``tokens [B, N]``, sampled from ``q [B, N, V]`` or, without q, deterministic."""
        n = tokens.shape[1]
        return cls.from_parents(tokens, range(ROOT, n - 1), q=q, q_row=range(n), valid=valid)

    @classmethod
    def from_parents(
        cls,
        tokens: Tensor,
        parents: Sequence[int],
        q: Tensor | None = None,
        q_row: Sequence[int] | None = None,
        extra: Extra | None = None,
        **more: Any,
    ) -> Self:
        """A tree of ``tokens [B, N]`` with the same shape in every sequence.

        Args:
            parents: parent of each node, in topological order.
            q_row: row of ``q`` of each node.
            more: other attributes of the class.
        """
        extra = Extra() if extra is None else extra
        drawn = tuple(q_row) if q is not None and q_row is not None else None
        shape = _shape(tuple(parents), drawn, len(parents) - extra.scratch, tokens.device)
        draft = cls(tokens, shape.parents.expand_as(tokens), q, is_chain=shape.is_chain, extra=extra, **more)
        draft.q_row = shape.q_row.expand_as(tokens) if shape.q_row is not None else None
        draft.see, draft.draws = shape.see, shape.draws
        return draft

    @classmethod
    def of_rows(cls, tokens: Sequence[list[int]], parents: Sequence[list[int]], device: torch.device) -> Self:
        """Deterministic trees of a different shape in each sequence; smaller ones are padded.

        Args:
            tokens: tokens of each sequence's nodes, in topological order.
            parents: parents of each sequence's nodes; ROOT for the root's children.
        """
        sizes = [len(row) for row in tokens]
        width = max(sizes)
        nodes = torch.tensor([row + [0] * (width - len(row)) for row in tokens], dtype=torch.long, device=device)
        valid = None
        if min(sizes) < width:
            counts = torch.tensor(sizes, device=device)[:, None]
            valid = torch.arange(width, device=device) < counts
        if all(row == list(range(ROOT, len(row) - 1)) for row in parents):
            return cls.chain(nodes, valid=valid)
        if len(sizes) == 1:
            return cls.from_parents(nodes, parents[0])
        filled = [row + [ROOT] * (width - len(row)) for row in parents]
        see = np.stack([see_ancestors(np.eye(width + 1, dtype=np.bool_), row, 0) for row in filled])
        draft = cls(nodes, torch.tensor(filled, device=device), valid=valid)
        draft.see, draft.draws = torch.from_numpy(see).to(device), (0,) * int(see.sum(2).max() - 1)
        return draft

    def ancestors(self) -> Tensor:
        """``[B, N+1, N+1]`` bool over rows [root, nodes]: row i may attend to row j (its ancestors and itself)."""
        batch, n = self.tokens.shape
        device = self.tokens.device
        if self.see is not None:
            return self.see.expand(batch, -1, -1)
        if self.is_chain:
            return tree_mask(tuple(range(ROOT, n - 1)), device)[0].expand(batch, -1, -1)
        # Squaring the matrix "itself or its parent" doubles the reach: after k squarings it has ancestors up to 2^k.
        step = torch.eye(n + 1, device=device).repeat(batch, 1, 1)
        step[:, 1:].scatter_(2, (self.parents + 1)[..., None], 1.0)
        for _ in range(n.bit_length()):
            step = (step @ step).clamp_max_(1.0)
        return step > 0

    def depths(self, ancestors: Tensor) -> Tensor:
        """``[B, N+1]`` depth of each row, 0 for the root. RoPE position = position of the root + depth."""
        return ancestors.sum(-1) - 1


def to_device(device: torch.device, *lists: list[int]) -> list[Tensor]:
    """Each list as a one-dimensional tensor, with one copy for all of them."""
    packed = torch.tensor([value for values in lists for value in values], dtype=torch.long, device=device)
    return list(packed.split([len(values) for values in lists]))


class _Shape(NamedTuple):
    """Tensors of a tree's shape, cached: ``parents [1, N]``, ``q_row [1, N]``, and as in ``DraftTree``."""

    parents: Tensor
    q_row: Tensor | None
    see: Tensor
    draws: tuple[int, ...]
    is_chain: bool


@lru_cache(maxsize=1024)
def _shape(parents: tuple[int, ...], q_row: tuple[int, ...] | None, proposed: int, device: torch.device) -> _Shape:
    """Shape of a tree; ``proposed``: number of nodes without the scratch nodes."""
    depths, drawn = [0], [0] * (proposed + 1)  # of each row: its depth, and how many of its children were sampled
    for node, parent in enumerate(parents[:proposed]):
        depths.append(depths[parent + 1] + 1)
        drawn[parent + 1] += q_row is not None and q_row[node] >= 0
    draws = [0] * max(depths)
    for depth, count in zip(depths, drawn, strict=True):
        if count:
            draws[depth] = max(draws[depth], count)
    rows = torch.tensor([q_row], device=device) if q_row is not None else None
    is_chain = parents == tuple(range(ROOT, len(parents) - 1))
    nodes = torch.tensor([parents], dtype=torch.long, device=device)
    return _Shape(nodes, rows, tree_mask(parents, device)[0], tuple(draws), is_chain)


@lru_cache(maxsize=1024)
def tree_mask(parents: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ancestor mask ``[1, N+1, N+1]`` and depths ``[1, N+1]`` of [root, nodes], from the nodes' parents."""
    see = see_ancestors(np.eye(len(parents) + 1, dtype=np.bool_), parents, 0)
    depths = see.sum(1) - 1
    return torch.from_numpy(see).to(device)[None], torch.from_numpy(depths).to(device)[None]


def see_ancestors(see: np.ndarray, parents: Sequence[int], first: int) -> np.ndarray:
    """Add the ancestors of the nodes from ``first`` on to ``see``, a mask over [root, nodes] with a True diagonal."""
    for node in range(first, len(parents)):
        assert parents[node] < node, f"node {node} comes before its parent {parents[node]}"
        see[node + 1] |= see[parents[node] + 1]
    return see
