"""Acceptance rules: from the target's logits over [root, nodes], the accepted path plus one bonus token.

A rule is a function ``(draft, logits, see, sampling, generator) -> Verdict``. The two here are lossless for every draft
tree; a method with a rule of its own (joint likelihood, thresholds) keeps it in its own file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .draft_tree import DraftTree
from .sampling import Sampling, draw, most_likely, residual

FEW_ROWS = 4  # up to this batch a CPU is faster row by row, passing over the nodes that are not reached
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

    def add(self, best: int, bonus: int, tokens: list[int], parents: list[int], valid: list[int] | None) -> None:
        """One more batch row: the path of a draft of ``tokens`` and ``parents`` to row ``best`` is accepted."""
        path, node = [], best - 1
        while node >= 0:
            path.append(node)
            node = parents[node]
        path.reverse()
        self.rows.append([0, *(node + 1 for node in path)])
        self.tokens.append([*(tokens[node] for node in path), bonus])
        depth = [0]  # of every row
        for node, parent in enumerate(parents):
            depth.append(depth[parent + 1] + 1 if valid is None or valid[node] else 0)
        self.depths.append(max(depth))


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
    choice = most_likely(logits)
    batch, n = draft.tokens.shape
    parts = [choice] if draft.valid is None else [choice, draft.valid]
    tokens, parents, (choices, *valid) = to_host(draft, *parts)
    verdict = Verdict([], [], [])
    for b in range(batch):
        depth, best = [0] * (n + 1), 0  # of each row, -1 where its path is not accepted; the first deepest accepted row
        for node, parent in enumerate(parents[b]):
            right = depth[parent + 1] >= 0 and tokens[b][node] == choices[b][parent + 1]
            accepted = right and (not valid or valid[0][b][node])
            depth[node + 1] = depth[parent + 1] + 1 if accepted else -1
            if depth[node + 1] > depth[best]:
                best = node + 1
        verdict.add(best, choices[b][best], tokens[b], parents[b], valid[0][b] if valid else None)
    return verdict


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
    uniform = torch.rand(draft.tokens.shape, device=logits.device, generator=generator)
    few = logits.device.type == "cpu" and len(logits) <= FEW_ROWS
    walk = _walk_on_host if few else _walk_on_device
    at, p = walk(draft, logits, sampling, uniform)
    return collect(draft, see, at, draw(p, generator))


def _walk_on_host(
    draft: DraftTree, logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The deepest accepted row ``[B]`` and what is left of p there ``[B, V]``; reads values, which is free on a CPU."""
    ends, left = [], []
    tokens, parents, rows = draft.tokens.tolist(), draft.parents.tolist(), None
    rows = draft.q_row.tolist() if draft.q is not None and draft.q_row is not None else None
    valid = draft.valid.tolist() if draft.valid is not None else None
    for b, numbers in enumerate(uniform.tolist()):
        at, p = 0, sampling.probabilities(logits[b, 0])
        q_row, q = -2, p  # the row of q that the siblings so far were drawn from, without them
        for node, (token, parent) in enumerate(zip(tokens[b], parents[b], strict=True)):
            if parent + 1 != at or (valid is not None and not valid[b][node]):
                continue
            row = rows[b][node] if rows is not None else -1
            if row >= 0 and row != q_row:
                q_row, q = row, draft.q[b, row]  # type: ignore[index]
            p_x, q_x = float(p[token]), float(q[token]) if row >= 0 else 1.0
            if numbers[node] * q_x < p_x:
                at, q_row = node + 1, -2
                p = sampling.probabilities(logits[b, at])
                continue
            if row < 0:
                p = residual(p, torch.zeros_like(p).index_fill_(0, draft.tokens[b, node], 1.0))
                continue
            p = residual(p, q)
            q = q.index_fill(0, draft.tokens[b, node], 0.0)
            q = q / q.sum().clamp_min(torch.finfo(q.dtype).tiny)
        ends.append(at)
        left.append(p)
    return torch.tensor(ends, device=logits.device), torch.stack(left)


def _walk_on_device(
    draft: DraftTree, logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same without reading a value: every node costs its launches, whether it is visited or not."""
    batch, n = draft.tokens.shape
    everyone = torch.arange(batch, device=logits.device)
    at = torch.zeros(batch, dtype=torch.long, device=logits.device)  # the deepest accepted row
    warped = sampling.probabilities(logits)
    p = warped[:, 0]
    q_left = torch.zeros_like(p)
    q_left_row = torch.full_like(at, -2)
    for node in range(n):
        turn = draft.parents[:, node] + 1 == at
        if draft.valid is not None:
            turn = turn & draft.valid[:, node]
        token = draft.tokens[:, node : node + 1]
        q, q_left, q_left_row = _proposal(draft, node, token, turn, q_left, q_left_row)
        p_x, q_x = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        accept = turn & (uniform[:, node] * q_x < p_x)
        p = torch.where((turn & ~accept)[:, None], residual(p, q), p)
        at = torch.where(accept, node + 1, at)
        q_left_row = torch.where(accept, -2, q_left_row)  # the next level draws anew, even from the same row of q
        p = torch.where(accept[:, None], warped[everyone, at], p)
    return at, p


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
    parts = [torch.stack([best, bonus], dim=1)] if draft.valid is None else [torch.stack([best, bonus], 1), draft.valid]
    tokens, parents, (ends, *valid) = to_host(draft, *parts)
    verdict = Verdict([], [], [])
    for b, (row, token) in enumerate(ends):
        verdict.add(row, token, tokens[b], parents[b], valid[0][b] if valid else None)
    return verdict


def to_host(draft: DraftTree, *parts: torch.Tensor) -> tuple[list[list[int]], list[list[int]], list[list[list[int]]]]:
    """A draft's tokens and parents, and ``parts [B, ...]``, as lists: one copy for all of them."""
    batch, n = draft.tokens.shape
    known = [] if draft.is_chain or n == 0 else [draft.parents]
    given = [draft.tokens, *known, *parts]
    packed = torch.cat([part.long() for part in given], dim=1).tolist() if n else torch.cat(parts, dim=1).tolist()
    split: list[list[list[int]]] = []
    start = 0
    for part in given if n else parts:
        split.append([line[start : start + part.shape[1]] for line in packed])
        start += part.shape[1]
    if not n:
        return [[]] * batch, [[]] * batch, split
    tokens, *rest = split
    parents = rest.pop(0) if known else [list(range(-1, n - 1))] * batch
    return tokens, parents, rest


def rule_for(sampling: Sampling) -> Rule:
    """The lossless rule for a way of sampling."""
    return verify_greedy if sampling.greedy else verify_sampled
