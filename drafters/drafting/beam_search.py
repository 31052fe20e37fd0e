"""Beam search with one model; its hypotheses are a tree in one cache. MJSD drafts with it, MJGD decodes with it.

It never copies to the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafters.loop.sampling import Sampling, draw_without_replacement
from drafters.model.cache import KVCache
from drafters.model.draft_head import DraftHead
from drafters.model.rows import Rows
from drafters.model.target import TargetModel


class Level(NamedTuple):
    """The M hypotheses of one length.

    Attributes:
        tokens: ``[M]`` last token of each.
        score: ``[M]`` log-likelihood of all its tokens.
        parent: ``[M]`` index of the hypothesis of the previous level that it extends.
    """

    tokens: Tensor
    score: Tensor
    parent: Tensor


class Paths(NamedTuple):
    """m hypotheses of d tokens.

    Attributes:
        tokens: ``[m, d]``.
        log_p: ``[m, d]`` log-likelihood of each token given those before; 0 after an EOS.
        rows: ``[m, d]`` index of each token among the nodes of all levels. Those of the last level have no cache slot.
    """

    tokens: Tensor
    log_p: Tensor
    rows: Tensor


def beam_search(
    model: TargetModel,
    head: DraftHead,
    cache: KVCache,
    features: Tensor,
    length: int,
    width: int,
    sampling: Sampling,
    eos: frozenset[int],
    generator: torch.Generator | None = None,
    offset: int = 0,
    warped: bool = False,
) -> list[Level]:
    """Return the ``width`` hypotheses of highest joint likelihood per level (Qin et al. 2024, section 2.1).

    Greedy search extends a hypothesis by its likeliest tokens; sampling extends it by tokens drawn without replacement
    from the warped distribution. A hypothesis that ended repeats EOS with probability 1.

    Args:
        head: LM head of the model, possibly over a draft vocabulary.
        features: ``[1, H]`` of the model after the last token that all hypotheses share.
        length: number of levels.
        sampling: choice of tokens.
        eos: tokens that end a hypothesis.
        offset: uncommitted cache slots that all hypotheses share. Their own slots follow, level by level.
        warped: measure likelihoods by the warped distribution when sampling, otherwise by the model's own.
    """
    device = features.device
    levels: list[Level] = []
    see = torch.ones(1, offset, dtype=torch.bool, device=device)  # [M, slots] the uncommitted slots of each hypothesis
    depths = torch.arange(offset, device=device)[None]
    for depth in range(length):
        # Forward the last tokens of all hypotheses; each attends to the slots of its own hypothesis.
        if levels:
            last, score, parent = levels[-1]
            rows = len(last)
            see = torch.cat([see[parent], torch.eye(rows, dtype=torch.bool, device=device)], 1)
            depths = torch.cat([depths, depths.new_full((1, rows), offset + depth - 1)], 1)
            start = depths.shape[1] - rows
            features = model.run(last[None], cache, Rows(see[None], depths, start)).features[0]
        # Extend each hypothesis by its candidates; one that ended has only EOS.
        step, places = _candidates(head(features), width, sampling, generator, warped)  # [M, candidates]
        tokens = head.tokens(places)
        if levels:
            ended = is_end(last[:, None], eos) if eos else None
            if ended is not None and (ended.device.type != "cpu" or bool(ended.any())):  # on a GPU any() would sync
                step, tokens = step.masked_fill(ended, -torch.inf), torch.where(ended, last[:, None], tokens)
                step[:, :1].masked_fill_(ended, 0.0)
            step = score[:, None] + step
        # Keep the likeliest of all extensions.
        best, index = step.flatten().topk(min(width, step.numel()))
        levels.append(Level(tokens.flatten()[index], best, index.div(step.shape[1], rounding_mode="floor")))
    return levels


def _candidates(
    logits: Tensor, count: int, sampling: Sampling, generator: torch.Generator | None, warped: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-likelihoods ``[M, count]`` of the candidates of each hypothesis, and their columns in ``logits [M, W]``."""
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    if sampling.greedy:
        step, tokens = log_p.topk(min(count, log_p.shape[1]), -1)
        return step, tokens
    warping, pool = sampling, None
    if 0 < sampling.top_k < log_p.shape[1]:
        # Continue with top_k columns: random numbers and sorting for V columns cost more than a forward pass of a small
        # draft model. Of tokens that tie for the last of the top_k, only one remains.
        log_p, pool = log_p.topk(sampling.top_k, -1)
        warping = Sampling(sampling.temperature, 0, sampling.top_p)
    # log_p differs from the logits by a constant per row, which does not change the warped distribution.
    probabilities = warping.probabilities(log_p)
    drawn, valid = draw_without_replacement(probabilities, min(count, log_p.shape[1]), generator)
    step = (probabilities.log() if warped else log_p).gather(1, drawn).masked_fill(~valid, -torch.inf)
    return step, drawn if pool is None else pool.gather(1, drawn)


def trace_back(levels: list[Level], last: Tensor) -> Paths:
    """Return all tokens of the hypotheses ``last [m]`` of the last level."""
    tokens, scores, rows = [], [], []
    first = sum(len(level.tokens) for level in levels)
    for level in reversed(levels):
        first -= len(level.tokens)
        tokens.append(level.tokens[last])
        scores.append(level.score[last])
        rows.append(last + first)
        last = level.parent[last]
    score = torch.stack(scores[::-1], 1)
    # Token log-likelihoods are differences of scores. A padding candidate scores -inf, and -inf - -inf is NaN.
    log_p = torch.diff(score, dim=1, prepend=score.new_zeros(len(score), 1)).nan_to_num_(0.0, neginf=-torch.inf)
    return Paths(torch.stack(tokens[::-1], 1), log_p, torch.stack(rows[::-1], 1))


def until_end(tokens: Tensor, eos: frozenset[int]) -> Tensor | None:
    """``[m, d]`` True up to and including the first EOS of each of ``tokens [m, d]``; None without EOS ids."""
    if not eos:
        return None
    ends = is_end(tokens, eos).long()
    return ends.cumsum(1) == ends


def is_end(tokens: Tensor, eos: frozenset[int]) -> Tensor:
    """``[...]`` True where ``tokens [...]`` are EOS; ``eos`` must not be empty."""
    first, *others = eos
    ends = tokens == first
    for token in others:
        ends = ends | (tokens == token)
    return ends
