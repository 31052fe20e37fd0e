"""Solve for the first weights of an EAGLE head or MTP layer: seconds of least squares, without a gradient.

A head is ``layer(fc(embedding, feature))``, and the layer is residual. While the layer adds nothing, fc is a linear
prediction of the next feature, so its best weights are a least-squares solution. Training then adds what is not linear.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from train.core.task import target_states
from train.data.packing import Batch, Source, collate, complete, epoch_batches

ROWS = 16  # rows of the least squares for each input
PART_TOKENS = 4096  # tokens of the dialogues that are read together
# Projections whose output a layer adds to its input, by family; those of experts are parameters.
ADDING = {"o_proj", "down_proj", "c_proj", "dense", "output_linear"}
SMALLEST = 1e-3  # factor of a norm below which an output counts for nothing
RIDGE = 1e-3  # regularisation, as a share of an input's mean square: keeps weights small that few rows determine


def side_by_side(features: Tensor, embeddings: Tensor, first: Tensor) -> Tensor:
    """What an EAGLE head's fc reads."""
    return torch.cat([embeddings, features], dim=-1)


@torch.no_grad()
def fit_fc(
    task: Any,
    train: Source,
    noise_width: float,
    enter: Callable[[Tensor, Tensor, Tensor], Tensor] = side_by_side,
    norm: nn.Module | None = None,
) -> None:
    """Solve for the fc of an EAGLE or MTP head over trained positions of ``train``, and let its layer add nothing.

    Args:
        noise_width: width of the uniform noise on the features in training.
        enter: features ``[n, H]``, embeddings ``[n, H]`` and bool ``[n]``, at position 0 of a text -> what fc reads,
            ``[n, 2 H]``.
        norm: the norm behind the layer; None without one.

    Raises:
        ValueError: no position is trained.
    """
    width = task.ends.embed.embedding_dim
    noise = torch.zeros(2 * width)
    noise[width:] = noise_width**2 / 3  # the mean square of U(-a, a)
    pairs = _pairs(task, train, ROWS * 2 * width, enter)
    if norm is None:
        solution = least_squares(pairs, noise)
    else:
        factor, bias = affine(norm, torch.ones(width, device=task.ends.embed.weight.device))
        solution = least_squares(((x, y - bias) for x, y in pairs), noise)
        solution /= factor.where(factor.abs() > SMALLEST, 1.0).to(solution)[:, None]
    task.module.get_parameter("fc.weight").copy_(solution)
    add_nothing(task.module)


def affine(norm: nn.Module, ones: Tensor) -> tuple[Tensor, Tensor]:
    """Factor and bias ``[H]`` of a norm, whether its class multiplies by w or 1 + w, and also subtracts the mean."""
    signs = ones.clone()
    signs[1::2] = -1  # mean 0, mean square 1
    bias = norm(torch.zeros_like(ones))
    return (norm(signs) - bias) * signs, bias


@torch.no_grad()
def add_nothing(head: nn.Module) -> None:
    """Let a head's layer return its input."""
    for name, weights in head.named_parameters():
        if not ADDING.isdisjoint(name.split(".")):
            weights.zero_()


def _pairs(
    task: Any, train: Source, wanted: int, enter: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs ``[n, 2 H]`` and targets ``[n, H]`` of fc, part by part, up to about ``wanted`` rows."""
    for batch, rows in trained_parts(task, train, wanted, task.config.taps):
        read = batch.input_ids.roll(-task.token_shift, dims=1).flatten()[rows]
        features, targets = (
            task.features(batch).flatten(0, 1)[rows],
            target_states(batch, task.ahead).flatten(0, 1)[rows],
        )
        first = batch.position_ids.flatten()[rows] == 0
        yield enter(features, task.ends.embed(read).float(), first), targets


def trained_parts(task: Any, train: Source, wanted: int, taps: tuple[int, ...] = ()) -> Iterator[tuple[Batch, Tensor]]:
    """Batches of ``train`` in float32 on the target's device, with their trained positions, about ``wanted`` in all."""
    device, count = task.ends.embed.weight.device, 0
    for part in epoch_batches(train.lengths.tolist(), PART_TOKENS, task.config.seed, 0):
        if count >= wanted:
            return
        batch = collate(train, part, taps)
        rows = task.rows(batch)
        count += len(rows)
        yield complete(train, batch, taps).to(device, torch.float32), rows


def least_squares(pairs: Iterable[tuple[Tensor, Tensor]], noise: Tensor) -> Tensor:
    """The W that minimises sum |y - W x|^2 over all rows, with a small penalty on its size.

    Args:
        pairs: rows x ``[n, D]`` and y ``[n, H]``, part by part.
        noise: ``[D]``, the mean square of the noise that training adds to x.

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
    ridge = RIDGE * square.diagonal() + rows * noise.to(square)
    ridge = ridge.where(ridge > 0, 1.0)  # of an input that is always 0
    factor = torch.linalg.cholesky(square + torch.diag(ridge))
    return torch.cholesky_solve(product, factor).T.float().contiguous()
