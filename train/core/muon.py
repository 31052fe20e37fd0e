"""Muon: momentum whose matrices are made orthogonal before they are applied (Jordan et al. 2024), AdamW for the rest.

AdamW moves all elements by about the same amount, so a matrix moves mostly along the few directions in which its
gradients are large. An orthogonal update moves it equally in all directions. Scaled as by Liu et al. 2025 (Muon is
Scalable for LLM Training, arXiv:2502.16982, equation 4), both use one learning rate.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from drafters.common.precision import training_dtype

MOMENTUM = 0.95  # Jordan's, and Liu's
ADAM_SIZE = 0.2  # root mean square of AdamW's updates, to which those of matrices are scaled
# Of x -> a x + b x^3 + c x^5: five steps map singular values of 0.003 to 1 into 0.7 to 1.2 (Jordan).
A, B, C = 3.4445, -4.7750, 2.0315
TIMES = 5
WIDE = 1.5  # columns for each row from which X X^T takes fewer operations
SHAPE = "shape"  # key of a group of one matrix that gets orthogonal updates


def matrix_groups(group: dict[str, Any], leave: Collection[nn.Parameter]) -> list[dict[str, Any]]:
    """Split a parameter group for ``Muon``: one group for each matrix, and one for all other weights.

    Args:
        leave: matrices among the other weights: embeddings and LM heads, whose rows are about one token each.
    """
    left = {id(weights) for weights in leave}
    matrices = [weights for weights in group["params"] if weights.dim() == 2 and id(weights) not in left]
    moved = {id(weights) for weights in matrices}
    rest = [weights for weights in group["params"] if id(weights) not in moved]
    groups = [{**group, "params": [weights], SHAPE: tuple(weights.shape)} for weights in matrices]
    return groups + ([{**group, "params": rest}] if rest or not groups else [])


class Muon(torch.optim.AdamW):
    """``M <- 0.95 M + 0.05 G;  W <- W - rate (0.2 sqrt(max(rows, columns)) orthogonal(0.95 M + 0.05 G) + decay W)``

    for a group of one matrix, as ``matrix_groups`` makes them; AdamW for any other. M is in the state as ``exp_avg``.

    A matrix may be flat and split over the ranks in equal, padded parts, as in DeepSpeed's stages 1 and 2. Then each
    rank computes the whole orthogonal matrix and takes its own part.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if SHAPE not in group]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = groups
        for group in groups:
            for weights in group["params"] if SHAPE in group else ():
                if weights.grad is not None:
                    self._move(weights, weights.grad, group)
        return loss

    def _move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weights]
        if not state:
            state |= {"step": torch.tensor(0.0, device=weights.device), "exp_avg": torch.zeros_like(weights)}
        state["step"] += 1
        momentum = state["exp_avg"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        looked_ahead = gradient.lerp(momentum, MOMENTUM)  # Nesterov's
        rows, columns = group[SHAPE]
        way = orthogonal(_whole(looked_ahead, rows, columns)).mul_(ADAM_SIZE * max(rows, columns) ** 0.5)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        weights.sub_(_part(way, weights), alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows, or columns, ``U V^T`` of ``U S V^T``, roughly: its singular values are
    between 0.7 and 1.2. float32 ``[rows, columns]`` -> the same."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-30)
    x = x.to(_dtype(matrix.device))
    if x.dtype == torch.float32 and x.shape[1] > WIDE * x.shape[0]:
        x = _by_gram(x)
    else:
        for _ in range(TIMES):
            square = x @ x.T
            x = torch.addmm(x, torch.addmm(square, square, square, beta=B, alpha=C), x, beta=A)
    return (x.T if tall else x).to(matrix.dtype)


def _by_gram(x: Tensor) -> Tensor:
    """The same iteration in products of the smaller X X^T: each factor a + b G + c G^2 commutes with G (Gram
    Newton-Schulz, Dao AI Lab 2026, dao-lab.ai/blog/2026/gram-newton-schulz). bf16 is too coarse for it."""
    square = x @ x.T
    factor = way = _factor(square)
    for _ in range(TIMES - 1):
        square = factor @ (factor @ square)
        factor = _factor(square)
        way = factor @ way
    return way @ x


def _factor(square: Tensor) -> Tensor:
    """a + b G + c G^2."""
    factor = torch.addmm(square, square, square, beta=B, alpha=C)
    factor.diagonal().add_(A)
    return factor


def _dtype(device: torch.device) -> torch.dtype:
    """The dtype of the iteration: bf16 is precise enough, unless it is slower."""
    return training_dtype(device) if device.type == "cpu" else torch.bfloat16


def _whole(part: Tensor, rows: int, columns: int) -> Tensor:
    if part.dim() == 2:
        return part
    ranks = torch.distributed.get_world_size()
    flat = part.new_empty(ranks * len(part)) if ranks > 1 else part
    if ranks > 1:
        torch.distributed.all_gather_into_tensor(flat, part.contiguous())
    return flat[: rows * columns].view(rows, columns)


def _part(whole: Tensor, like: Tensor) -> Tensor:
    if like.dim() == 2:
        return whole
    start = torch.distributed.get_rank() * len(like)
    share = whole.flatten()[start : start + len(like)]
    return nn.functional.pad(share, (0, len(like) - len(share)))
