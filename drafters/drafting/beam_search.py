"""Beam search with one model, its hypotheses side by side in one cache as a tree: MJSD drafts so, MJGD decodes so.

Nothing is copied from a device to the host.
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
    """The hypotheses of one length, M at most.

    Attributes:
        tokens: ``[M]`` last token of each.
        score: ``[M]`` log-likelihood of all its tokens.
        parent: ``[M]`` which hypothesis of the level before it extends.
    """

    tokens: Tensor
    score: Tensor
    parent: Tensor


class Paths(NamedTuple):
    """Hypotheses spelt out, m of them of d tokens.

    Attributes:
        tokens: ``[m, d]``. log_p: ``[m, d]`` of each token given those before; 0 for what follows an EOS.
        rows: ``[m, d]`` which row of the search holds each token. The last level's tokens were not forwarded.
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
    """The ``width`` likeliest hypotheses of every length up to ``length`` (Qin et al. 2024, section 2.1).

    Likelihoods are those of the model's own distribution, unless ``warped`` asks for the one that tokens are drawn from
    (greedy search draws none: it has the model's own). Greedy search extends each hypothesis by its likeliest
    tokens, sampling by tokens drawn without replacement from the warped distribution; in both those of highest joint
    likelihood are kept. One that ended repeats EOS at no cost.

    Args:
        head: the model's, by whose tokens hypotheses are extended.
        features: ``[1, H]`` of the model after the last token that all hypotheses share.
        sampling: how tokens are drawn.
        offset: uncommitted rows of the cache that all hypotheses share; theirs lie behind those, level by level.
    """
    device = features.device
    levels: list[Level] = []
    see = torch.ones(1, offset, dtype=torch.bool, device=device)  # of which uncommitted rows each hypothesis is made
    depths = torch.arange(offset, device=device)[None]
    for depth in range(length):
        if levels:  # the last tokens, side by side: each sees what its hypothesis is made of
            last, score, parent = levels[-1]
            rows = len(last)
            see = torch.cat([see[parent], torch.eye(rows, dtype=torch.bool, device=device)], 1)
            depths = torch.cat([depths, depths.new_full((1, rows), offset + depth - 1)], 1)
            start = depths.shape[1] - rows
            features = model.run(last[None], cache, Rows(see[None], depths, start)).features[0]
        step, places = _candidates(head(features), width, sampling, generator, warped)
        tokens = head.tokens(places)
        if levels:
            ended = is_end(last[:, None], eos) if eos else None
            # Looking costs nothing on a CPU; elsewhere it would wait for the device.
            if ended is not None and (ended.device.type != "cpu" or bool(ended.any())):
                step, tokens = step.masked_fill(ended, -torch.inf), torch.where(ended, last[:, None], tokens)
                step[:, :1].masked_fill_(ended, 0.0)
            step = score[:, None] + step
        best, index = step.flatten().topk(min(width, step.numel()))
        levels.append(Level(tokens.flatten()[index], best, index.div(step.shape[1], rounding_mode="floor")))
    return levels


def _candidates(
    logits: Tensor, count: int, sampling: Sampling, generator: torch.Generator | None, warped: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-likelihoods and places in ``logits`` ``[M, count]`` of what may follow each hypothesis; fewer where there are
    fewer."""
    log_p = logits.log_softmax(-1, dtype=torch.float32)
    if sampling.greedy:
        step, tokens = log_p.topk(min(count, log_p.shape[1]), -1)
        return step, tokens
    warping, pool = sampling, None
    if 0 < sampling.top_k < log_p.shape[1]:
        # What follows then handles top_k columns, not V: sorting and random numbers for all V cost more than a forward
        # pass of a small draft model. (Of tokens that tie for the last place just one stays.)
        log_p, pool = log_p.topk(sampling.top_k, -1)
        warping = Sampling(sampling.temperature, 0, sampling.top_p)
    # log_p is the logits but for a constant, which no warping feels.
    probabilities = warping.probabilities(log_p)
    drawn, valid = draw_without_replacement(probabilities, min(count, log_p.shape[1]), generator)
    step = (probabilities.log() if warped else log_p).gather(1, drawn).masked_fill(~valid, -torch.inf)
    return step, drawn if pool is None else pool.gather(1, drawn)


def trace_back(levels: list[Level], last: Tensor) -> Paths:
    """The hypotheses ``last [m]`` of the last level."""
    tokens, scores, rows = [], [], []
    first = sum(len(level.tokens) for level in levels)
    for level in reversed(levels):
        first -= len(level.tokens)
        tokens.append(level.tokens[last])
        scores.append(level.score[last])
        rows.append(last + first)
        last = level.parent[last]
    score = torch.stack(scores[::-1], 1)
    # A hypothesis of no tokens has likelihood 1. (One that could not be drawn scores -inf, and -inf - -inf is NaN.)
    log_p = torch.diff(score, dim=1, prepend=score.new_zeros(len(score), 1)).nan_to_num_(0.0, neginf=-torch.inf)
    return Paths(torch.stack(tokens[::-1], 1), log_p, torch.stack(rows[::-1], 1))


def until_end(tokens: Tensor, eos: frozenset[int]) -> Tensor | None:
    """``[m, d]``: which tokens of hypotheses ``[m, d]`` are not padding after an EOS; None where nothing can end."""
    if not eos:
        return None
    ends = is_end(tokens, eos).long()
    return ends.cumsum(1) == ends


def is_end(tokens: Tensor, eos: frozenset[int]) -> Tensor:
    """Which ``tokens [...]`` are EOS; ``eos`` is not empty."""
    first, *others = eos
    ends = tokens == first
    for token in others:
        ends = ends | (tokens == token)
    return ends
