"""Solve for the first weights of a DSpark Markov head: the target's mean scores of a token, given the one before it.

W1 W2^T is the rank-r matrix nearest to M ``[V, N]``. Row x of M is the mean of log p(next | text) over positions with
the token x, less the mean over all positions. Rows are weighted by the square roots of the tokens' counts. The SVD is
randomised (Halko et al. 2011, algorithm 5.1), so M is never held.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from train.data.packing import Source
from train.data.regression import trained_parts

POSITIONS = 300_000  # trained positions that are read
PRIOR = 20.0  # positions with score 0 that are added to each token's: keeps the scores of rare tokens small
FLOOR = -15.0  # of log p, so that impossible tokens do not decide
OVERSAMPLED = 16  # directions beyond the rank


@torch.no_grad()
def fit_markov(task: Any, train: Source) -> None:
    """Solve for W1 ``[V, r]`` and W2 ``[N, r]`` of a Markov head, vanilla or gated, over positions of ``train``.

    With a ``loss_vocab`` the rows of W2 of other tokens are 0.

    Raises:
        ValueError: no position is trained.
    """
    head, ids = task.drafting_module.markov_head, task.heads.ids
    scores, previous = head.markov_w2.weight, head.markov_w1.weight
    vocab, rank, tokens = len(previous), head.rank, task.heads.sliced.out_features
    width, device = min(rank + OVERSAMPLED, vocab, tokens), task.ends.embed.weight.device

    # Range: M times random directions.
    generator = torch.Generator().manual_seed(task.config.seed)
    directions = torch.randn(tokens, width, generator=generator).to(device)
    counts, mean = torch.zeros(vocab, device=device), torch.zeros(tokens, device=device)
    products = torch.zeros(vocab, width, device=device)
    for before, log_p in _parts(task, train):
        counts.index_add_(0, before, torch.ones_like(before, dtype=torch.float32))
        products.index_add_(0, before, log_p @ directions)
        mean += log_p.sum(0)
    if not counts.any():
        raise ValueError("start: regression has no trained position to fit; set start=random")
    mean /= counts.sum()
    weights = counts.sqrt() / (counts + PRIOR)
    basis = torch.linalg.qr(weights[:, None] * (products - counts[:, None] * (mean @ directions))).Q  # [V, width]

    # Projection onto the range, and its SVD.
    projected, weighted = torch.zeros(width, tokens, device=device), basis * weights[:, None]
    for before, log_p in _parts(task, train):
        projected += weighted[before].T @ (log_p - mean)
    left, sizes, right = torch.linalg.svd(projected, full_matrices=False)
    columns = min(rank, width)
    w1 = basis @ left[:, :columns] * sizes[:columns].sqrt() / counts.clamp_min(1).sqrt()[:, None]
    w2 = right[:columns].T * sizes[:columns].sqrt()
    balance = (w1.norm() / w2.norm()).sqrt()  # equal norms, because both have one learning rate

    scale = 2 if head.kind == "gated" else 1  # its gates begin at 1/2
    previous.zero_()[:, :columns] = scale * w1 / balance
    rows = ids.to(device).long() if ids is not None and len(scores) > len(ids) else slice(None)
    scores.zero_()[rows, :columns] = w2 * balance


def _parts(task: Any, train: Source) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens int64 ``[n]`` and the target's log p of the next one, less its mean over tokens, ``[n, N]``, part by part,
    of about ``POSITIONS`` trained positions."""
    size = task.heads.rows_at_once(task.heads.sliced)
    for batch, rows in trained_parts(task, train, POSITIONS):
        for some in rows.split(size):
            features, before = batch.features.flatten(0, 1)[some], batch.input_ids.flatten()[some]
            log_p = task.heads.sliced(features).float().log_softmax(-1).clamp_min(FLOOR)
            yield before, log_p - log_p.mean(-1, keepdim=True)
