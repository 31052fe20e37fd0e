"""The draft: a tree of tokens that hangs from the last committed token (the root). A chain is a tree."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

ROOT = -1


@dataclass
class DraftTree:
    """What a drafter proposes for one step.

    Attributes:
        tokens: ``[B, N]`` draft tokens in topological order (a parent before its children).
        parents: ``[B, N]`` index of each node's parent in ``0..N-1``, or ``ROOT`` for the root's children.
        q: ``[B, R, V]`` float32 distributions that nodes were sampled from, or None when every node is deterministic.
        q_row: ``[B, N]`` which row of ``q`` a node was sampled from; -1 marks a deterministic node (top-k, an n-gram),
            which is verified as if its q were one-hot. Siblings of one row were drawn WITHOUT replacement, in order.
        valid: ``[B, N]`` False for padding nodes, which can never be accepted; None when all count.
        log_q: ``[B, N]`` the draft model's log-probability of each node given its ancestors (joint-likelihood rules).
        hidden: ``[B, N + 1, H]`` hidden states of [root, nodes] after ``resume_layer`` layers, where those layers
            already ran while drafting (Kangaroo): verification resumes there.
        resume_layer: see ``hidden``; 0 when verification runs the whole target.
        is_chain: every node is the child of the one before it.
        scratch: the last ``scratch`` nodes ride along in the target's forward and can never be accepted (the guesses of
            Lookahead). Acceptance rules do not see them.
        scratch_outputs: how many of them, the last ones, the drafter wants logits of (``FeatureOutput.scratch``).
        target_forwards: forwards of the target that the drafter itself spent on this draft (MJGD's beam search).
        see: ``[1 or B, N + 1, N + 1]`` the ancestor mask, where the shape of the tree was known beforehand.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    q: torch.Tensor | None = None
    q_row: torch.Tensor | None = None
    valid: torch.Tensor | None = None
    log_q: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    resume_layer: int = 0
    is_chain: bool = False
    scratch: int = 0
    scratch_outputs: int = 0
    target_forwards: int = 0
    see: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Number of nodes N, scratch included, the root not counted."""
        return self.tokens.shape[1]

    def proposed(self, see: torch.Tensor) -> tuple["DraftTree", torch.Tensor]:
        """The draft and its ancestor mask without the scratch nodes: what an acceptance rule judges."""
        if not self.scratch:
            return self, see
        n = self.size - self.scratch
        draft = replace(self, tokens=self.tokens[:, :n], parents=self.parents[:, :n], scratch=0, see=None)
        draft.q_row = self.q_row[:, :n] if self.q_row is not None else None
        draft.valid = self.valid[:, :n] if self.valid is not None else None
        return draft, see[:, : n + 1, : n + 1]

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> "DraftTree":
        """The draft of plain decoding."""
        none = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return cls(none, none, is_chain=True)

    @classmethod
    def chain(
        cls, tokens: torch.Tensor, q: torch.Tensor | None = None, valid: torch.Tensor | None = None
    ) -> "DraftTree":
        """A chain of ``tokens [B, N]``, sampled from ``q [B, N, V]`` or, without q, deterministic."""
        batch, n = tokens.shape
        order = torch.arange(n, device=tokens.device)
        q_row = order.expand(batch, n) if q is not None else None
        return cls(tokens, (order - 1).expand(batch, n), q=q, q_row=q_row, valid=valid, is_chain=True)

    def ancestors(self) -> torch.Tensor:
        """``[B, N+1, N+1]`` bool over rows [root, nodes]: row i may attend to row j (its ancestors and itself)."""
        batch, n = self.tokens.shape
        device = self.tokens.device
        if self.see is not None:
            return self.see.expand(batch, -1, -1)
        if self.is_chain:
            return chain_ancestors(n, device).expand(batch, -1, -1)
        # Squaring "itself or its parent" doubles the reach: after k squarings every ancestor up to 2^k is there.
        step = torch.eye(n + 1, device=device).repeat(batch, 1, 1)
        step[:, 1:].scatter_(2, (self.parents + 1)[..., None], 1.0)
        for _ in range(n.bit_length()):
            step = (step @ step).clamp_max_(1.0)
        return step > 0

    def depths(self, ancestors: torch.Tensor) -> torch.Tensor:
        """``[B, N+1]`` depth of each row, the root's being 0; RoPE position = position of the root + depth."""
        return ancestors.sum(-1) - 1


@lru_cache(maxsize=64)
def chain_ancestors(n: int, device: torch.device) -> torch.Tensor:
    """``[1, N+1, N+1]`` ancestor mask of a chain of N nodes."""
    return torch.ones(n + 1, n + 1, dtype=torch.bool, device=device).tril()[None]


def static_ancestors(parents: list[int]) -> torch.Tensor:
    """``[N+1, N+1]`` ancestor mask of a tree whose shape is known beforehand, computed on the host once."""
    n = len(parents)
    see = torch.eye(n + 1, dtype=torch.bool)
    see[:, 0] = True
    for node, parent in enumerate(parents):
        assert parent < node, f"node {node} stands before its parent {parent}"
        see[node + 1] |= see[parent + 1]
    return see
