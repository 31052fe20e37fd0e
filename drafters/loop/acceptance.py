"""Acceptance rules: from the target's logits over [root, nodes], the accepted path plus one bonus token.

A rule is a function ``(draft, logits, see, sampling, generator) -> Verdict``. The two here are lossless for every draft
tree; a method with a rule of its own (joint likelihood, thresholds) keeps it in its own file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.loop.sampling import Sampling, draw, residual, without
from drafters.loop.tree import ROOT, DraftTree
from drafters.model.backend import most_likely

TINY = torch.finfo(torch.float32).tiny
FEW_ROWS = 4  # up to this batch a CPU is faster row by row
Rule = Callable[[DraftTree, Tensor, Tensor, Sampling, torch.Generator | None], "Verdict"]
Find = Callable[[list[int], list[int], list[int] | None, list[int]], tuple[int, int]]
# (row of [root, nodes] of each batch row [B], which of them are wanted [B]) -> p [B, V] after those rows.
After = Callable[[Tensor, Tensor], Tensor]


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

    def own_rows(self, row: int, size: int) -> list[int]:
        """Of a batch row's accepted rows those of [root, the first ``size`` nodes]: a drafter's own, where other nodes
        hang behind them."""
        return [one for one in self.rows[row] if one <= size]


def verify_greedy(
    draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> Verdict:
    """Accept the deepest path whose every token is the target's argmax after its parent; the bonus is the next argmax.

    Args:
        logits: ``[B, N+1, V]`` of [root, nodes].
        see: ``[B, N+1, N+1]`` ancestor mask.
    """
    return verdict_of(draft, most_likely(logits), _deepest_match)


def _deepest_match(
    tokens: list[int], parents: list[int], valid: list[int] | None, choices: list[int]
) -> tuple[int, int]:
    """The deepest row (the first of several) whose path the target would have taken, and its choice after that row."""
    depth, best = [0] * (len(tokens) + 1), 0  # of each row, -1 where its path is not accepted
    for node, parent in enumerate(parents):
        right = depth[parent + 1] >= 0 and tokens[node] == choices[parent + 1]
        accepted = right and (valid is None or valid[node])
        depth[node + 1] = depth[parent + 1] + 1 if accepted else -1
        if depth[node + 1] > depth[best]:
            best = node + 1
    return best, choices[best]


def verify_sampled(
    draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> Verdict:
    """Multi-round speculative sampling: the committed tokens are distributed as the target's own (EAGLE, Algorithm 1).

    After the row accepted last, one token is drawn that is distributed as p (``_next_token``). Where a child holds it,
    that child is accepted, and so on; where none does, it is the bonus.
    """
    uniform = torch.rand(draft.tokens.shape, device=logits.device, generator=generator)
    few = logits.device.type == "cpu" and len(logits) <= FEW_ROWS
    walk = _walk_by_row if few else _walk_by_level
    at, bonus = walk(draft, logits, sampling, uniform, generator)
    return collect(draft, see, at, bonus)


def _walk_by_level(
    draft: DraftTree, logits: Tensor, sampling: Sampling, uniform: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """All batch rows side by side, by logits that are all there."""
    every = torch.arange(len(logits), device=logits.device)

    def after(at: Tensor, going: Tensor) -> Tensor:
        return sampling.probabilities(logits[every, at])

    return walk_by_level(draft, after, every >= 0, uniform, generator)


def walk_by_level(
    draft: DraftTree, after: After, going: Tensor, uniform: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """The deepest accepted row and the bonus, ``[B]`` each: all batch rows side by side, without reading a value.

    Args:
        after: asked for the rows on the way alone, from the root down.
        going: ``[B]`` the batch rows to be walked; of the others what is returned means nothing.
        uniform: ``[B, N]`` one random number a node, for its trial.
    """
    at = bonus = torch.zeros_like(going, dtype=torch.long)
    # Down the tree, level by level, for as long as any row goes on.
    for draws in draft.levels:
        p = after(at, going)
        # One token a row, distributed as p; whose child holds it, if one does, goes on.
        children = draft.parents == at[:, None] - 1
        if draft.valid is not None:
            children = children & draft.valid
        token = _next_token(draft, children, p, draws, uniform, generator)
        found, node = (children & (draft.tokens == token[:, None])).max(1)
        bonus = torch.where(going, token, bonus)
        going = going & found
        at = torch.where(going, node + 1, at)
        if _known_none(going):
            return at, bonus
    # Rows that were accepted down to a leaf: nothing was drafted after it.
    last = draw(after(at, going), generator)
    return at, torch.where(going, last, bonus)


def _next_token(
    draft: DraftTree, children: Tensor, p: Tensor, draws: int, uniform: Tensor, generator: torch.Generator | None
) -> Tensor:
    """A token ``[B]`` distributed as ``p [B, V]`` that is a child's as often as can be.

    The children that were sampled are tried in order: x, the j-th draw without replacement from q, passes with
    probability min(1, p(x) / q_j(x)), where q_j is q without the earlier siblings, renormalised; else p becomes
    norm(max(0, p - q_j)). Where none passes, the token is drawn from what is left of p, and so may be that of a
    deterministic child x: with probability p(x), as if x were drawn from a one-hot q. With one sampled child a node
    this is Leviathan et al. (2023), Algorithm 1.

    Args:
        children: ``[B, N]`` the nodes that may come next. draws: the most of them that were sampled.
    """
    if not draws:
        return draw(p, generator)
    assert draft.q is not None and draft.q_row is not None
    # Try the sampled children in turn, all batch rows side by side, and take from p what each trial has used up.
    untried = children & (draft.q_row >= 0)
    passed = torch.zeros_like(untried[:, :1])
    token, q = draft.tokens[:, :1], p  # replaced by the first trial
    for trial in range(draws):
        turn, node = untried.max(1, keepdim=True)  # the first child that is left
        if trial == 0:
            row = draft.q_row.gather(1, node).clamp_min(0)
            q = draft.q.gather(1, row[..., None].expand(-1, -1, p.shape[1]))[:, 0]
        x = draft.tokens.gather(1, node)
        accept = turn & (uniform.gather(1, node) * q.gather(1, x) < p.gather(1, x))
        token, passed = torch.where(accept, x, token), passed | accept
        if _known_none(~passed):
            return token[:, 0]
        p = torch.where(turn, residual(p, q), p)
        untried = (untried & ~accept).scatter_(1, node, False)
        if trial + 1 == draws or _known_none(untried):
            break
        q = without(q, x)
    return torch.where(passed[:, 0], token[:, 0], draw(p, generator))


def _walk_by_row(
    draft: DraftTree, logits: Tensor, sampling: Sampling, uniform: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """The same, one batch row after the other and reading values, which is free on a CPU: faster for few rows."""
    every_parents, batch = draft.parents.tolist(), len(logits)
    q_rows = draft.q_row.tolist() if draft.q_row is not None else [[-1] * draft.size] * batch
    valid = draft.valid.tolist() if draft.valid is not None else [[True] * draft.size] * batch
    ends: list[list[int]] = []
    for b, (tokens, numbers) in enumerate(zip(draft.tokens.tolist(), uniform.tolist(), strict=True)):
        at, bonus, accepted = 0, 0, True
        while accepted:
            p = sampling.probabilities(logits[b, at])
            children = [node for node, parent in enumerate(every_parents[b]) if parent + 1 == at and valid[b][node]]
            drawn = [node for node in children if q_rows[b][node] >= 0]
            token = None
            if drawn and draft.q is not None:
                token = _try_in_turn(p, draft.q[b, q_rows[b][drawn[0]]], tokens, drawn, numbers)
            bonus = int(draw(p, generator)) if token is None else token
            holding = [node for node in children if tokens[node] == bonus]
            accepted = bool(holding)
            at = holding[0] + 1 if accepted else at
        ends.append([at, bonus])
    deepest, extra = torch.tensor(ends, device=logits.device).unbind(1)
    return deepest, extra


def _try_in_turn(p: Tensor, q: Tensor, tokens: list[int], drawn: list[int], numbers: list[float]) -> int | None:
    """The token of the first of the nodes ``drawn`` that passes; where none does, ``p [V]`` becomes what is left of it.

    Neither p nor q is renormalised: their sums are carried along.
    """
    p_sum = q_sum = 1.0
    for number, node in enumerate(drawn):
        x = tokens[node]
        if numbers[node] * float(q[x]) * p_sum < float(p[x]) * q_sum:
            return x
        left = p.sub(q, alpha=p_sum / max(q_sum, TINY)).clamp_min_(0.0)
        if (total := float(left.sum())) > 0:  # p == q leaves nothing, and there nothing is rejected but by rounding
            p_sum = total
            p.copy_(left)
        if number + 1 < len(drawn):
            q = q.clone() if number == 0 else q  # it is the draft's
            q[x] = 0.0
            q_sum = float(q.sum())
    return None


def _known_none(rows: Tensor) -> bool:
    """Whether it is known that none is true. A CPU says so for nothing; elsewhere, asking would wait for the device."""
    return rows.device.type == "cpu" and not rows.any()


def collect(draft: DraftTree, see: Tensor, best: Tensor, bonus: Tensor) -> Verdict:
    """Accept the path from the root to row ``best [B]``, then ``bonus [B]``; copies to the host once."""
    return verdict_of(draft, torch.stack([best, bonus], dim=1), lambda tokens, parents, valid, ends: (ends[0], ends[1]))


def verdict_of(draft: DraftTree, values: Tensor, find: Find) -> Verdict:
    """Copy a draft and ``values [B, W]`` to the host, all at once, and accept in each row the path that ``find`` finds.

    Args:
        find: (tokens, parents, valid, values) of a batch row -> the last accepted row of [root, nodes], and the bonus.
    """
    n, width = draft.size, values.shape[1]
    parts = [draft.tokens, None if draft.is_chain else draft.parents, draft.valid, values]
    verdict = Verdict([], [], [])
    for line in torch.cat([part.long() for part in parts if part is not None], dim=1).tolist():
        tokens, parents = line[:n], list(range(ROOT, n - 1)) if draft.is_chain else line[n : 2 * n]
        valid = None if draft.valid is None else line[-width - n : -width]
        best, bonus = find(tokens, parents, valid, line[-width:])
        # From the accepted row back up to the root.
        path, node = [], best - 1
        while node != ROOT:
            path.append(node)
            node = parents[node]
        path.reverse()
        verdict.rows.append([0, *(node + 1 for node in path)])
        verdict.tokens.append([*(tokens[node] for node in path), bonus])
        depth = [0]  # of each row, for the report
        for node, parent in enumerate(parents):
            depth.append(depth[parent + 1] + 1 if valid is None or valid[node] else 0)
        verdict.depths.append(max(depth))
    return verdict


def rule_for(sampling: Sampling) -> Rule:
    """The lossless rule for a way of sampling."""
    return verify_greedy if sampling.greedy else verify_sampled
