"""Acceptance rules: from the target's logits over [root, nodes] to the accepted path and one bonus token.

A rule is a function ``(draft, logits, see, sampling, generator) -> Verdict``. ``verify_greedy`` and ``verify_sampled``
are lossless for every draft tree. Other rules (joint likelihood, thresholds) are in the file of their method.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from drafters.loop.sampling import Sampling, draw, residual, without
from drafters.loop.tree import ROOT, DraftTree
from drafters.model.backend import most_likely

if TYPE_CHECKING:
    from drafters.loop.state import DecodeState

TINY = torch.finfo(torch.float32).tiny
MOST_VALUES = 1 << 28  # of the distributions that are verified at once: 1 GiB
FEW_ROWS, SMALL_VOCAB = 4, 8192  # a CPU verifies at once beyond so few sequences, up to this vocabulary
Rule = Callable[[DraftTree, Tensor, Tensor, Sampling, torch.Generator | None], "Verdict"]
Find = Callable[[list[int], list[int], list[int] | None, list[int]], tuple[int, int]]
After = Callable[[int, int], Tensor]  # (sequence, its row of [root, nodes]) -> p [V] after that row


@dataclass
class Verdict:
    """Result of one verification, on the host. Building it is the only device-to-host copy of a step.

    Attributes:
        rows: each sequence's accepted rows of the forward from the root down: 0 (the root), then node index + 1.
        tokens: each sequence's accepted draft tokens and the bonus token: one token after each entry of ``rows``.
        depths: depth of the deepest node of each sequence's draft.
    """

    rows: list[list[int]]
    tokens: list[list[int]]
    depths: list[int]


def verify_greedy(
    draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None = None
) -> Verdict:
    """Accept the deepest path of tokens that are the target's argmax after their parents; the bonus is the next argmax.

    Args:
        logits: ``[B, N+1, V]`` of [root, nodes].
        see: ``[B, N+1, N+1]`` ancestor mask.
    """
    return verdict_of(draft, most_likely(logits), _deepest_match)


def _deepest_match(
    tokens: list[int], parents: list[int], valid: list[int] | None, choices: list[int]
) -> tuple[int, int]:
    """Return the deepest row (the first of several) whose path matches ``choices``, and the choice after that row."""
    depth, best = [0] * (len(tokens) + 1), 0  # depth of each row; -1 where its path is not accepted
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
    """Multi-round speculative sampling: committed tokens follow the target's distribution (EAGLE, Algorithm 1).

    After each accepted row a token is drawn that is distributed as p there. If a child of the row has this token, the
    child is accepted and the walk continues there; otherwise the token is the bonus.
    """
    # One per node, for its trial.
    uniform = torch.rand(draft.tokens.shape, dtype=torch.float32, device=logits.device, generator=generator)
    by_row = len(logits) <= FEW_ROWS or logits.shape[-1] > SMALL_VOCAB
    if by_row and logits.device.type == "cpu":
        at, bonus = walk_by_row(
            draft, lambda row, at: sampling.probabilities(logits[row, at]), [True] * len(logits), uniform, generator
        )
    else:
        size = max(1, MOST_VALUES // logits[0].numel())
        ends = []
        for some in torch.arange(len(logits), device=logits.device).split(size):
            part = draft if size >= len(logits) else draft.of(some)
            ends.append(_walk_at_once(part, sampling.probabilities(logits[some]), uniform[some], generator))
        at, bonus = (torch.cat(parts) for parts in zip(*ends, strict=True))
    return collect(draft, see, at, bonus)


def _walk_at_once(
    draft: DraftTree, p: Tensor, uniform: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Return the deepest accepted row and the bonus, ``[B]`` each, without synchronising with the host.

    The token after every row is drawn at the same time, also after rows that turn out not to be accepted: on a GPU the
    number of operations counts, not their size.

    Args:
        p: ``[B, N + 1, V]`` the target's distributions after [root, nodes].
    """
    at = torch.zeros(len(p), 1, dtype=torch.long, device=p.device)
    rows = torch.arange(p.shape[1], device=p.device)
    children = draft.parents[:, None] == rows[:, None] - 1  # [B, N + 1, N]
    if draft.valid is not None:
        children = children & draft.valid[:, None]
    token = _next_tokens(draft, children, p, uniform, generator)  # [B, N + 1]
    if draft.size:
        has_child, node = (children & (draft.tokens[:, None] == token[..., None])).max(2)
        following = torch.where(has_child, node + 1, rows)  # the accepted child of each row, or the row itself
        for _ in draft.levels:
            at = following.gather(1, at)
    return at[:, 0], token.gather(1, at)[:, 0]


def _next_tokens(
    draft: DraftTree, children: Tensor, p: Tensor, uniform: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Return tokens ``[B, R]`` distributed as ``p [B, R, V]`` that equal a child's token as often as possible.

    Sampled children are tried in order. x, the j-th draw without replacement from q, passes with probability
    min(1, p(x) / q_j(x)), where q_j is q without the earlier siblings, renormalised; otherwise p becomes
    norm(max(0, p - q_j)). If no child passes, the token is drawn from the remaining p. It can then be the token x of a
    deterministic child, with probability p(x), as if x had a one-hot q. With one sampled child per node this is
    Algorithm 1 of Leviathan et al. (2023).

    Args:
        children: ``[B, R, N]`` the nodes that may follow each row.
    """
    most = max(draft.levels, default=0)  # sampled children of any row
    if not most:
        return draw(p, generator)
    assert draft.q is not None and draft.q_row is not None
    tokens, q_rows, uniform = (x[:, None].expand_as(children) for x in (draft.tokens, draft.q_row, uniform))
    # The first untried child of every row is tried, most times; p becomes the residual after each failed trial.
    untried = children & (q_rows >= 0)
    passed, token, q = torch.zeros_like(untried[..., :1]), tokens[..., :1], p
    for trial in range(most):
        turn, node = untried.max(2, keepdim=True)  # [B, R, 1]
        if trial == 0:
            q = draft.q.gather(1, q_rows.gather(2, node).clamp_min(0).expand_as(p))
        x = tokens.gather(2, node)
        accept = turn & (uniform.gather(2, node) * q.gather(2, x) < p.gather(2, x))
        token, passed = torch.where(accept, x, token), passed | accept
        p = torch.where(turn, residual(p, q), p)
        untried = (untried & ~accept).scatter_(2, node, False)
        if trial + 1 < most:
            q = without(q, x)
    return torch.where(passed, token, draw(p, generator)[..., None])[..., 0]


def walk_by_row(
    draft: DraftTree, after: After, active: list[bool], uniform: Tensor, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """As ``_walk_at_once``, only the accepted rows of each sequence, one after the other; it reads values on the host.

    Args:
        after: p ``[V]`` after a row of [root, nodes] of a sequence; called for accepted rows, from the root down.
        active: the sequences to walk. Results for the others are 0.
    """
    every_parents, batch = draft.parents.tolist(), len(active)
    q_rows = draft.q_row.tolist() if draft.q_row is not None else [[-1] * draft.size] * batch
    valid = draft.valid.tolist() if draft.valid is not None else [[True] * draft.size] * batch
    ends: list[list[int]] = []
    for b, (tokens, numbers) in enumerate(zip(draft.tokens.tolist(), uniform.tolist(), strict=True)):
        at, bonus, accepted = 0, 0, active[b]
        while accepted:
            p = after(b, at)
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
    deepest, extra = torch.tensor(ends, device=uniform.device).unbind(1)
    return deepest, extra


def _try_in_turn(p: Tensor, q: Tensor, tokens: list[int], drawn: list[int], numbers: list[float]) -> int | None:
    """Return the token of the first of the nodes ``drawn`` that passes. If none passes, ``p [V]`` becomes the residual.

    Neither p nor q is renormalised: ``p_sum`` and ``q_sum`` hold their sums.
    """
    p_sum = q_sum = 1.0
    for number, node in enumerate(drawn):
        x = tokens[node]
        if numbers[node] * float(q[x]) * p_sum < float(p[x]) * q_sum:
            return x
        left = p.sub(q, alpha=p_sum / max(q_sum, TINY)).clamp_min_(0.0)
        if (total := float(left.sum())) > 0:  # 0 only if p == q, where only rounding can reject
            p_sum = total
            p.copy_(left)
        if number + 1 < len(drawn):
            q = q.clone() if number == 0 else q  # the first q is a view of the draft's
            q[x] = 0.0
            q_sum = float(q.sum())
    return None


def collect(draft: DraftTree, see: Tensor, best: Tensor, bonus: Tensor) -> Verdict:
    """Accept the path from the root to row ``best [B]``, then ``bonus [B]``; copies to the host once."""
    return verdict_of(draft, torch.stack([best, bonus], dim=1), lambda tokens, parents, valid, ends: (ends[0], ends[1]))


def verdict_of(draft: DraftTree, values: Tensor, find: Find) -> Verdict:
    """Copy a draft and ``values [B, W]`` to the host in one copy, and accept the path to the row that ``find`` returns.

    Args:
        find: (tokens, parents, valid, values) of a sequence -> the last accepted row of [root, nodes], and the bonus.
    """
    n, width = draft.size, values.shape[1]
    parts = [draft.tokens, None if draft.is_chain else draft.parents, draft.valid, values]
    verdict = Verdict([], [], [])
    for line in torch.cat([part.long() for part in parts if part is not None], dim=1).tolist():
        tokens, parents = line[:n], list(range(ROOT, n - 1)) if draft.is_chain else line[n : 2 * n]
        valid = None if draft.valid is None else line[-width - n : -width]
        best, bonus = find(tokens, parents, valid, line[-width:])
        # Follow the parents from the accepted row up to the root.
        path, node = [], best - 1
        while node != ROOT:
            path.append(node)
            node = parents[node]
        path.reverse()
        verdict.rows.append([0, *(node + 1 for node in path)])
        verdict.tokens.append([*(tokens[node] for node in path), bonus])
        depth = [0]  # depth of each row, for the trace
        for node, parent in enumerate(parents):
            depth.append(depth[parent + 1] + 1 if valid is None or valid[node] else 0)
        verdict.depths.append(max(depth))
    return verdict


class Control(Protocol):
    """Logits processors and stopping criteria of one ``generate`` call.

    Attributes:
        alters: True if ``scores`` changes anything. Otherwise the drafter's rule and ``Sampling`` apply.
    """

    alters: bool

    def scores(self, row: int, new: list[int], logits: Tensor) -> Tensor:
        """Scores ``[V]`` of the token after the new tokens ``new``, from the target's logits ``[V]``, float32.

        They include temperature, top-k and top-p: the token is their argmax, or is drawn from their softmax.
        """
        ...

    def ends(self, row: int, new: list[int]) -> bool:
        """True if the sequence ends after the new tokens ``new``; called after each token."""
        ...


def scores_after(state: "DecodeState", row: int, drafted: list[int], logits: Tensor) -> Tensor:
    """Scores ``[V]`` by the state's control, from the target's ``logits [V]`` after a sequence and ``drafted``."""
    assert state.control is not None
    new = state.tokens[row][state.prompt_lengths[row] :] + drafted
    return state.control.scores(row, new, logits.float())


def chosen_by(sampling: Sampling) -> Sampling:
    """Sampling for scores that already include temperature, top-k and top-p."""
    return Sampling(0.0 if sampling.greedy else 1.0)


class ByText:
    """Acceptance rule over a control's scores, greedy or sampled: lossless for every draft.

    The walk calls the processors only after accepted tokens: once per output token and in order, as in plain decoding,
    so that processors with a state work too. Drafters draft without the control, so acceptance falls where it changes
    the scores much. The merged trees of SpecInfer and SpecTr are verified as deterministic trees here.
    """

    def __init__(self, state: "DecodeState") -> None:
        self.state = state

    def __call__(
        self, draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None
    ) -> Verdict:
        state, chosen, tokens = self.state, chosen_by(sampling), draft.tokens.tolist()

        def after(row: int, at: int) -> Tensor:
            drafted = list(compress(tokens[row], see[row, at, 1:].tolist()))  # the path to row ``at``
            return chosen.probabilities(scores_after(state, row, drafted, logits[row, at]))

        uniform = torch.rand(draft.tokens.shape, dtype=torch.float32, device=logits.device, generator=generator)
        unfinished = [not finished for finished in state.finished]
        return collect(draft, see, *walk_by_row(draft, after, unfinished, uniform, generator))
