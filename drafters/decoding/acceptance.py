"""Acceptance rules: from the target's logits over [root, nodes], the accepted path plus one bonus token.

A rule is a function ``(draft, logits, see, sampling, generator) -> Verdict``. The two here are lossless for every draft
tree; a method with a rule of its own (joint likelihood, thresholds) keeps it in its own file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .draft_tree import DraftTree
from .sampling import Sampling, draw, residual

Rule = Callable[[DraftTree, torch.Tensor, torch.Tensor, Sampling, torch.Generator | None], "Verdict"]


@dataclass
class Verdict:
    """The outcome of one verification, on the host (the step's one device-to-host copy).

    Attributes:
        rows: per batch row, the accepted rows of the forward in order: 0 (the root), then nodes + 1.
        tokens: per batch row, the accepted draft tokens and the bonus token, one for each entry of ``rows``.
        depths: per batch row, the depth of the draft's deepest node.
    """

    rows: list[list[int]]
    tokens: list[list[int]]
    depths: list[int]


def verify_greedy(
    draft: DraftTree,
    logits: torch.Tensor,
    see: torch.Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Accept the deepest path whose every token is the target's argmax after its parent; the bonus is the next argmax.

    Args:
        logits: ``[B, N+1, V]`` of [root, nodes].
        see: ``[B, N+1, N+1]`` ancestor mask.
    """
    choice = logits.argmax(-1)
    if draft.size == 0:
        best = torch.zeros_like(choice[:, 0])
        return collect(draft, see, best, choice[:, 0])
    matches = draft.tokens == choice.gather(1, draft.parents + 1)
    if draft.valid is not None:
        matches = matches & draft.valid
    root = torch.ones_like(matches[:, :1])
    wrong = ~torch.cat([root, matches], dim=1)
    accepted = ~(see & wrong[:, None]).any(-1)
    best = torch.where(accepted, see.sum(-1), 0).argmax(-1)
    return collect(draft, see, best, choice.gather(1, best[:, None])[:, 0])


def verify_sampled(
    draft: DraftTree,
    logits: torch.Tensor,
    see: torch.Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> Verdict:
    """Multi-round speculative sampling: the committed tokens are distributed as the target's own (EAGLE, Algorithm 1).

    At each accepted node its children are tried in order. A child x that was the j-th draw without replacement from q
    is accepted with probability min(1, p(x) / q_j(x)), where q_j is q without the earlier siblings, renormalised;
    else p becomes norm(max(0, p - q_j)). A deterministic child counts as drawn from a one-hot q. When no child is
    left, the bonus is drawn from what is left of p. With one sampled child a node this is Leviathan et al. (2023),
    Algorithm 1.

    Nodes stand in topological order with siblings in drawing order, so one pass over them visits every round in turn.
    """
    batch, n = draft.tokens.shape
    everyone = torch.arange(batch, device=logits.device)
    at = torch.zeros(batch, dtype=torch.long, device=logits.device)  # the deepest accepted row
    p = sampling.probabilities(logits[:, 0])
    q_left = torch.zeros_like(p)
    q_left_row = torch.full_like(at, -2)
    uniform = torch.rand(batch, n, device=logits.device, generator=generator)
    on_host = logits.device.type == "cpu"  # reading a value costs nothing there, and most nodes can be passed over
    parents, where = (draft.parents.tolist(), [0] * batch) if on_host else ([], [])
    # Elsewhere every node costs its launches whether it is visited or not: warp all rows at once and pick.
    warped = None if on_host else sampling.probabilities(logits)
    for node in range(n):
        if on_host and all(parents[b][node] + 1 != where[b] for b in range(batch)):
            continue
        turn = draft.parents[:, node] + 1 == at
        if draft.valid is not None:
            turn = turn & draft.valid[:, node]
        token = draft.tokens[:, node : node + 1]
        q, q_left, q_left_row = _proposal(draft, node, token, turn, q_left, q_left_row)
        p_x, q_x = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        accept = turn & (uniform[:, node] * q_x < p_x)
        reject = turn & ~accept
        p = torch.where(reject[:, None], residual(p, q), p)
        at = torch.where(accept, node + 1, at)
        q_left_row = torch.where(accept, -2, q_left_row)  # the next level draws anew, even from the same row of q
        if on_host:
            if not bool(accept.any()):
                continue
            where = at.tolist()
        p_at = sampling.probabilities(logits[everyone, at]) if warped is None else warped[everyone, at]
        p = torch.where(accept[:, None], p_at, p)
    return collect(draft, see, at, draw(p, generator))


def _proposal(
    draft: DraftTree,
    node: int,
    token: torch.Tensor,
    turn: torch.Tensor,
    q_left: torch.Tensor,
    q_left_row: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The distribution a node was drawn from, and what is left of its row of q for the siblings drawn after it.

    Only rows whose ``turn`` it is take note of the draw: between two siblings there may stand other nodes' children.
    """
    one_hot = torch.zeros_like(q_left).scatter_(1, token, 1.0)
    if draft.q is None or draft.q_row is None:
        return one_hot, q_left, q_left_row
    row = draft.q_row[:, node]
    sampled = row >= 0
    fresh = turn & sampled & (row != q_left_row)
    full = draft.q[torch.arange(len(row), device=row.device), row.clamp_min(0)]
    q_left = torch.where(fresh[:, None], full, q_left)
    q_left_row = torch.where(fresh, row, q_left_row)
    q = torch.where(sampled[:, None], q_left, one_hot)
    used = q_left.scatter(1, token, 0.0)
    used = used / used.sum(-1, keepdim=True).clamp_min(torch.finfo(used.dtype).tiny)
    return q, torch.where((turn & sampled)[:, None], used, q_left), q_left_row


def collect(draft: DraftTree, see: torch.Tensor, best: torch.Tensor, bonus: torch.Tensor) -> Verdict:
    """Accept the path from the root to row ``best [B]``, then ``bonus [B]``; copies to the host once."""
    batch, n = draft.tokens.shape
    if n == 0:
        return Verdict([[0] for _ in range(batch)], [[token] for token in bonus.tolist()], [0] * batch)
    on_path = see[torch.arange(batch, device=best.device), best][:, 1:].long()
    depth = see.sum(-1).amax(1) - 1
    packed = torch.cat([on_path, draft.tokens, bonus[:, None], depth[:, None]], dim=1).tolist()
    rows, tokens = [], []
    for line in packed:
        path = [node for node in range(n) if line[node]]
        rows.append([0] + [node + 1 for node in path])
        tokens.append([line[n + node] for node in path] + [line[2 * n]])
    return Verdict(rows, tokens, [line[-1] for line in packed])


def rule_for(sampling: Sampling) -> Rule:
    """The lossless rule for a way of sampling."""
    return verify_greedy if sampling.greedy else verify_sampled
