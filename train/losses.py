"""What training losses are made of.

Every function returns a SUM over rows. The caller divides by the number of rows of the whole optimiser step (all ranks
and micro-batches), because micro-batches differ in how many of their tokens belong to answers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def regression_sum(predicted: Tensor, target: Tensor) -> Tensor:
    """SmoothL1 (beta 1), mean over the hidden size, summed over rows: ``[n, H]`` twice -> scalar float32."""
    return F.smooth_l1_loss(predicted.float(), target.float(), reduction="none").mean(-1).sum()


def soft_cross_entropy_sum(predicted: Tensor, target: Tensor, lm_head: nn.Linear, chunk_rows: int = 256) -> Tensor:
    """Cross-entropy over the full vocabulary at temperature 1 against the target's own distribution, summed over rows.

    ``- sum_rows sum_x p(x) log q(x)``, p = softmax(lm_head(target)), q = softmax(lm_head(predicted)).

    The LM head is frozen, so the gradient of ``predicted`` is all that a backward pass needs: (q - p) W, known as soon
    as the logits are. It is taken at once, and only ``chunk_rows`` rows of logits exist at a time.

    Args:
        predicted: ``[n, H]``, what the drafter gives to the LM head.
        target: ``[n, H]``, the target's features; constants.
        lm_head: the frozen LM head.
        chunk_rows: rows of logits to hold at once.

    Returns:
        scalar float32.
    """
    total: Tensor = _SoftCrossEntropy.apply(predicted, target, lm_head.weight, lm_head.bias, chunk_rows)
    return total


@torch.no_grad()
def overlap_and_agreement(
    predicted: Tensor, target: Tensor, lm_head: nn.Linear, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Of each pair of rows ``[n, H]``: sum_x min(p, q), and whether both put the same token first; ``[n]`` each."""
    overlap, agree = [], []
    for ours, theirs in zip(predicted.split(chunk_rows), target.split(chunk_rows), strict=True):
        q, p = lm_head(ours).float(), lm_head(theirs).float()
        overlap.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1))
        agree.append(p.argmax(-1) == q.argmax(-1))
    return torch.cat(overlap), torch.cat(agree)


def default_chunk_rows(lm_head: nn.Linear, on_gpu: bool | None = None) -> int:
    """Rows of logits to hold at once: many enough to use the device, few enough to fit its cache or leave it free.

    On a CPU 2 MiB of float32 logits stay in the cache, but below 64 rows the products are slow. On a GPU a chunk reads
    the whole LM head three times, which pays from some hundred rows on: 256 MiB are 523 rows of a vocabulary of
    128,256, 2,097 of one of 32,000.

    Args:
        lm_head: its vocabulary and device count.
        on_gpu: for an estimate of another device than the LM head's; default: that one.
    """
    if on_gpu is None:
        on_gpu = lm_head.weight.device.type != "cpu"
    budget = 2**28 if on_gpu else 2**21
    return max(64, budget // (4 * lm_head.out_features))


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, target: Tensor, weight: Tensor, bias: Tensor | None, chunk_rows: int
    ) -> Tensor:
        wide = torch.promote_types(predicted.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=predicted.device)
        gradient = torch.empty_like(predicted)
        chunk_rows = min(chunk_rows, (2**31 - 1) // len(weight))  # torch.dot counts in 32 bits
        for start in range(0, len(predicted), chunk_rows):
            rows = slice(start, start + chunk_rows)
            # On a GPU softmax widens as it reads: no wide copy of the logits, two wide [rows, V] tensors at a time.
            p = F.linear(target[rows], weight, bias).softmax(-1, dtype=wide)
            log_q = F.linear(predicted[rows], weight, bias).log_softmax(-1, dtype=wide)
            total -= torch.dot(p.flatten(), log_q.flatten())
            difference = torch.sub(log_q.exp_(), p, out=torch.empty_like(p, dtype=weight.dtype))
            torch.mm(difference, weight, out=gradient[rows])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grads[0]).to(gradient.dtype), None, None, None, None
