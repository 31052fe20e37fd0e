"""The draft: a tree of tokens that hangs from the last committed token (the root). A chain is a tree."""

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
    """What a few methods need beyond a tree.

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
        valid: ``[B, N]`` False for padding nodes, which can never be accepted; None when all count.
        is_chain: True if every node is the child of the one before it.
        see: ``[1 or B, N + 1, N + 1]`` the ancestor mask, where the host knows the shape of the tree.
        draws: per level from the root, the most children of one row that were sampled from ``q``. Verification
            walks these levels; None stands for a tree as deep and as wide as N nodes can be.
        extra: fields of single methods.
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
        """``draws``, or what they are at most."""
        return self.draws if self.draws is not None else (0 if self.q is None else self.size,) * self.size

    def proposed(self, see: Tensor) -> tuple["DraftTree", Tensor]:
        """The draft and its ancestor mask without the scratch nodes: what an acceptance rule judges."""
        if not self.extra.scratch:
            return self, see
        n = self.size - self.extra.scratch
        extra = replace(self.extra, scratch=0)
        draft = replace(self, tokens=self.tokens[:, :n], parents=self.parents[:, :n], see=None, extra=extra)
        draft.q_row = self.q_row[:, :n] if self.q_row is not None else None
        draft.valid = self.valid[:, :n] if self.valid is not None else None
        return draft, see[:, : n + 1, : n + 1]

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> "DraftTree":
        """The draft of plain decoding."""
        none = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return cls(none, none, is_chain=True, see=tree_mask((), device)[0], draws=())

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
        """A tree of ``tokens [B, N]`` whose shape, the same in every row, the host knows.

        Args:
            parents: of each node, in topological order. q, q_row, valid, extra: see the class; ``q_row`` per node.
            more: any other attribute.
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
        """Deterministic trees, each batch row's of its own shape; smaller ones are filled with padding nodes.

        Args:
            tokens: of each row's nodes, in topological order.
            parents: likewise; ROOT of the root's children.
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
        # Squaring "itself or its parent" doubles the reach: after k squarings every ancestor up to 2^k is there.
        step = torch.eye(n + 1, device=device).repeat(batch, 1, 1)
        step[:, 1:].scatter_(2, (self.parents + 1)[..., None], 1.0)
        for _ in range(n.bit_length()):
            step = (step @ step).clamp_max_(1.0)
        return step > 0

    def depths(self, ancestors: Tensor) -> Tensor:
        """``[B, N+1]`` depth of each row, the root's being 0; RoPE position = position of the root + depth."""
        return ancestors.sum(-1) - 1


def to_device(device: torch.device, *lists: list[int]) -> list[Tensor]:
    """Each list as a one-dimensional tensor: one copy for all of them."""
    packed = torch.tensor([value for values in lists for value in values], dtype=torch.long, device=device)
    return list(packed.split([len(values) for values in lists]))


class _Shape(NamedTuple):
    """What the host knows of a tree: ``parents [1, N]``, ``q_row [1, N]`` and, as in ``DraftTree``, the others."""

    parents: Tensor
    q_row: Tensor | None
    see: Tensor
    draws: tuple[int, ...]
    is_chain: bool


@lru_cache(maxsize=1024)
def _shape(parents: tuple[int, ...], q_row: tuple[int, ...] | None, judged: int, device: torch.device) -> _Shape:
    """Of a tree whose first ``judged`` nodes can be accepted."""
    depths, drawn = [0], [0] * (judged + 1)  # of each row
    for node, parent in enumerate(parents[:judged]):
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
    """Fill the rows of the nodes ``parents[first:]`` in a mask over [root, nodes] where each sees but itself so far."""
    for node in range(first, len(parents)):
        assert parents[node] < node, f"node {node} stands before its parent {parents[node]}"
        see[node + 1] |= see[parents[node] + 1]
    return see
