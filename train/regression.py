"""Where an EAGLE head can begin: the best that it can do without its layer, which takes seconds and no gradient.

A head is ``layer(fc(embedding, feature))``, and the layer adds to what it is given. So fc alone is a linear prediction
of the next feature, whose least squares are solved at once; what the layer then learns is what a line cannot say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from train.data.packing import Source, collate, complete, epoch_batches
from train.eagle import NOISE_WIDTH

if TYPE_CHECKING:
    from train.eagle import EagleTask

ROWS = 16  # for each input
PART_TOKENS = 4096  # of dialogues that are read together
# What a layer adds to its input comes out of these, in all families.
ADDING = {"o_proj", "down_proj", "c_proj", "dense"}
RIDGE = 1e-3  # of an input's mean square: what few rows do not tell is left small


@torch.no_grad()
def fit_fc(task: EagleTask, train: Source) -> None:
    """Give the head's fc the least squares over trained positions of dialogues all over ``train``, and have its layer
    add nothing yet.

    Raises:
        ValueError: no position is trained.
    """
    width = task.ends.embed.embedding_dim
    noise = torch.zeros(2 * width)
    if task.config.noise != "none":
        noise[width:] = NOISE_WIDTH**2 / 3  # the mean square of U(-a, a)
    solution = least_squares(_pairs(task, train, ROWS * 2 * width), noise)
    task.module.get_parameter("fc.weight").copy_(solution)
    add_nothing(task.module)


@torch.no_grad()
def add_nothing(head: nn.Module) -> None:
    """Have a head's layer hand on what it is given."""
    for name, module in head.named_modules():
        if name.rpartition(".")[2] in ADDING:
            for weights in module.parameters():
                weights.zero_()


def _pairs(task: EagleTask, train: Source, wanted: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What fc reads, ``[n, 2 H]``, and what it should say, ``[n, H]``, until there are ``wanted`` rows or no more."""
    device, found = task.ends.embed.weight.device, 0
    for part in epoch_batches(train.lengths.tolist(), PART_TOKENS, task.config.seed, 0):
        if found >= wanted:
            return
        batch = collate(train, part, one_row=True)
        rows = task.rows(batch)
        batch = complete(train, batch, ()).to(device, torch.float32)
        read = batch.input_ids.roll(-task.token_shift, dims=1).flatten()[rows]
        features, targets = batch.features.flatten(0, 1)[rows], task.targets(batch).flatten(0, 1)[rows]
        yield torch.cat([task.ends.embed(read).float(), features], dim=-1), targets
        found += len(rows)


def least_squares(pairs: Iterable[tuple[Tensor, Tensor]], noise: Tensor | None = None) -> Tensor:
    """The W that minimises sum |y - W x|^2 over all rows, and a little of its own size.

    Args:
        pairs: rows x ``[n, D]`` and y ``[n, H]``, part by part.
        noise: ``[D]``, the mean square of the noise that x will have, if any.

    Returns:
        float32 ``[H, D]``.

    Raises:
        ValueError: no rows.
    """
    square, product, rows = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for x, y in pairs:
        square, product = square.to(x.device) + x.T @ x, product.to(x.device) + x.T @ y
        rows += len(x)
    if not rows:
        raise ValueError("start: regression has no trained position to fit; set start=random")
    ridge = RIDGE * square.diagonal()
    if noise is not None:
        ridge = ridge + rows * noise.to(ridge)
    ridge = ridge.where(ridge > 0, 1.0)  # of an input that is never there
    factor = torch.linalg.cholesky(square + torch.diag(ridge))
    return torch.cholesky_solve(product, factor).T.float().contiguous()
