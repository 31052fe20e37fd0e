"""The training losses of EAGLE and Kangaroo.

Every function returns a SUM over rows. The caller divides by the number of rows of the whole optimiser step (all ranks
and micro-batches), because micro-batches differ in how many of their tokens belong to answers.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.data.packing import Batch, Span, shift

MaskAlignment = Literal["shifted", "paper-code"]
Noise = Literal["paper", "code", "none"]
NOISE_WIDTH = 0.1  # EAGLE paper, section 3.2: U(-0.1, 0.1)


def eagle_rows(batch: Batch, alignment: MaskAlignment) -> Tensor:
    """Flat indices int64 ``[n]`` into ``[R * L]`` of the positions that EAGLE trains.

    At index i the head sees feature_i and token_{i+1}; its target is feature_{i+1}, that is the distribution of
    token_{i+2}. ``shifted`` trains i where the predicted token_{i+2} belongs to an answer. ``paper-code`` trains i
    where token_i does, as the released code: it leaves out the predictions of an answer's first two tokens (the second
    is the first that a drafter ever has to guess) and trains those past its end instead.
    """
    if alignment == "shifted":
        trained = shift(batch.loss_mask, 2, batch.segments)
    else:
        trained = batch.loss_mask & (shift(torch.ones_like(batch.loss_mask), 1, batch.segments))
    return trained.flatten().nonzero().squeeze(1)


def kangaroo_rows(batch: Batch) -> Tensor:
    """Flat indices int64 ``[n]`` of the positions Kangaroo trains: i where the predicted token_{i+1} is an answer's."""
    return shift(batch.loss_mask, 1, batch.segments).flatten().nonzero().squeeze(1)


def feature_noise(features: Tensor, spans: list[Span], kind: Noise, seed: int) -> Tensor:
    """Noise ``[R, L, H]`` for EAGLE's input features (paper, section 3.2), zero in the padding.

    ``paper``: U(-0.1, 0.1). ``code``: ``(rand - 0.5) * 0.2 * 512 / T`` as released, T the dialogue's length. Each
    dialogue has its own random stream, so that its noise depends on neither packing nor ranks nor where a run resumed.
    """
    noise = torch.zeros_like(features)
    if kind == "none":
        return noise
    generator = torch.Generator(features.device)
    for span in spans:
        generator.manual_seed((seed * 2_654_435_761 + span.dialogue) % 2**63)
        width = NOISE_WIDTH if kind == "paper" else NOISE_WIDTH * 512 / span.length
        noise[span.row, span.start : span.start + span.length].uniform_(-width, width, generator=generator)
    return noise


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
