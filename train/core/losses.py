"""What training losses are made of.

Every function returns a SUM over rows. The caller divides by the number of rows of the whole optimiser step (all ranks
and micro-batches), because micro-batches differ in how many of their tokens belong to answers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def regression_sum(predicted: Tensor, target: Tensor) -> Tensor:
    """SmoothL1 (beta 1), mean over the hidden size, summed over rows: ``[n, H]`` or ``[S, n, H]`` against ``[n, H]`` ->
    float32, scalar or ``[S]``."""
    theirs = target.float().expand_as(predicted)
    return F.smooth_l1_loss(predicted.float(), theirs, reduction="none").mean(-1).sum(-1)


# p and log q of some rows [rows, V], and the dtype of the gradient -> the rows' sum, and its gradient by q's logits
# [rows, V]. Called so, ``log_q`` holds q afterwards; p is as it was.
Divergence = Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]]


def cross_entropy(p: Tensor, log_q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``- sum_x p(x) log q(x)``, whose gradient is q - p."""
    total = -torch.dot(p.flatten(), log_q.flatten())
    return total, torch.sub(log_q.exp_(), p, out=torch.empty_like(p, dtype=dtype))


def forward_kl(p: Tensor, log_q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``D_KL(p || q)``: the cross-entropy without the target's entropy."""
    entropy = -torch.xlogy(p, p).sum()
    total, gradient = cross_entropy(p, log_q, dtype)
    return total - entropy, gradient


def reverse_kl(p: Tensor, log_q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``D_KL(q || p)``."""
    ratio = log_q - _log(p)
    q = log_q.exp_()
    return (q * ratio).sum(), _by_logits(q, ratio).to(dtype)


def jsd(p: Tensor, log_q: Tensor, dtype: torch.dtype, beta: float) -> tuple[Tensor, Tensor]:
    """``beta D_KL(p || m) + (1 - beta) D_KL(q || m)``, m = beta p + (1 - beta) q: the generalised Jensen-Shannon
    divergence of DistillSpec (Zhou et al. 2023, arXiv:2310.08461), which has the two above and the next one, too."""
    log_m = _log(torch.lerp(log_q.exp(), p, beta))
    ratio = log_q - log_m
    q = log_q.exp_()
    value = beta * (torch.xlogy(p, p) - p * log_m) + (1 - beta) * q * ratio
    return value.sum(), _by_logits(q, (1 - beta) * ratio).to(dtype)


def total_variation(p: Tensor, log_q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``1 - alpha``, alpha = sum_x min(p(x), q(x)): how often sampled drafting is refused."""
    alpha, gradient = _acceptance(p, log_q.exp_())
    return (1 - alpha).sum(), gradient.to(dtype)


def lk_alpha(p: Tensor, log_q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``- log alpha``, the LK loss without a parameter (Samarin et al. 2026, arXiv:2602.23881): the total variation's
    gradient over alpha, so not small where hardly anything is accepted."""
    alpha, gradient = _acceptance(p, log_q.exp_())
    alpha = alpha.clamp_min(torch.finfo(alpha.dtype).tiny)  # no overlap at all: far off, but not infinitely
    return -alpha.log().sum(), gradient.div_(alpha[:, None]).to(dtype)


def lk_lambda(p: Tensor, log_q: Tensor, dtype: torch.dtype, eta: float) -> tuple[Tensor, Tensor]:
    """``lambda KL(p, q) + (1 - lambda) (1 - alpha)``, lambda = exp(-eta alpha) taken as a constant: the LK loss that
    goes over from KL to the total variation as alpha grows (the same paper).

    Lambda is each row's own, as in vLLM's speculators, so that it depends on neither packing nor ranks; SpecForge takes
    that of a batch's mean alpha.
    """
    kl = (torch.xlogy(p, p) - p * log_q).sum(-1)
    q = log_q.exp_()
    alpha, gradient = _acceptance(p, q)
    weight = torch.exp(-eta * alpha)
    return torch.lerp(1 - alpha, kl, weight).sum(), gradient.lerp_(q - p, weight[:, None]).to(dtype)


def _acceptance(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """alpha ``[rows]``, and the gradient of 1 - alpha by q's logits: q sum_x [q < p] q - [q < p] q."""
    below = torch.where(q < p, q, 0)
    return torch.minimum(p, q).sum(-1), (q * below.sum(-1, keepdim=True)).sub_(below)


def _by_logits(q: Tensor, slope: Tensor) -> Tensor:
    """The gradient by q's logits of what has the gradient ``slope`` by q, up to a constant along x."""
    return q * (slope - (q * slope).sum(-1, keepdim=True))


def _log(p: Tensor) -> Tensor:
    """Of probabilities that softmax may have rounded to 0, where a divergence would be infinite."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()


@dataclass(frozen=True)
class TopK:
    """``- weight sum_{x in K} p(x) log q(x)`` in addition, K the target's ``count`` most likely tokens, p and q over
    all tokens: the Top-K loss of HASS (Zhang et al. 2024, arXiv:2408.15766, and its train/main_hass.py)."""

    count: int
    weight: float

    def choose(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Of K the weighted p(x), and which tokens they are; ``[rows, count]`` each."""
        chosen = p.topk(min(self.count, p.shape[-1]), sorted=False)
        return self.weight * chosen.values, chosen.indices


def divergence_sum(
    predicted: Tensor,
    target: Tensor,
    lm_head: nn.Linear,
    divergence: Divergence = cross_entropy,
    top_k: TopK | None = None,
    chunk_rows: int = 256,
    own: Sequence[Tensor] = (),
) -> Tensor:
    """How far the drafter's distributions are from the target's own, over the full vocabulary at temperature 1, summed
    over rows: p = softmax(lm_head(target)), q = softmax(lm_head(predicted)). Several predictions of the same rows share
    the target's logits.

    The LM head is frozen, so the gradient of ``predicted`` is all that a backward pass needs: the divergence's by the
    logits times W, known as soon as the logits are. It is taken at once, and only ``chunk_rows`` rows of logits exist
    at a time.

    Args:
        predicted: ``[n, H]`` or ``[S, n, H]``, what the drafter gives to the LM head; as wide as those of ``own``.
        target: ``[n, H]``, the target's features; constants. Or int64 ``[n]``, tokens, whose p is one-hot; -1 is one
            that the LM head does not have, of which a cross-entropy learns nothing.
        lm_head: the frozen LM head.
        divergence: one of those above.
        top_k: what is added to it.
        chunk_rows: rows of logits to hold at once.
        own: of each of the S predictions the weight ``[V, h]`` of an LM head of its own, which gets a gradient if it
            wants one.

    Returns:
        float32, scalar or ``[S]``.
    """
    several = predicted if predicted.dim() == 3 else predicted[None]
    head = lm_head.weight, lm_head.bias
    sums: Tensor = _Divergence.apply(several, target, *head, divergence, top_k, chunk_rows, *own)
    return sums if predicted.dim() == 3 else sums[0]


@torch.no_grad()
def overlap_and_agreement(
    predicted: Tensor, target: Tensor, lm_head: nn.Linear, chunk_rows: int, own: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    """Of each pair of rows ``[n, H]``: sum_x min(p, q), and whether both put the same token first; ``[n]`` each.

    ``own``: the LM head of the predictions, if it is another one.
    """
    overlap, agree = [], []
    for ours, theirs in zip(predicted.split(chunk_rows), target.split(chunk_rows), strict=True):
        q, p = (own or lm_head)(ours).float(), lm_head(theirs).float()
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


_most_chunks: int | None = None


@contextmanager
def two_chunks_only() -> Iterator[None]:
    """The loss of the first two chunks of rows alone, for an estimate on tensors without contents: the second one finds
    the first one's tensors still there, and no other chunk takes more."""
    global _most_chunks
    _most_chunks = 2
    try:
        yield
    finally:
        _most_chunks = None


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        predicted: Tensor,
        target: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        divergence: Divergence,
        top_k: TopK | None,
        chunk_rows: int,
        *own: Tensor,
    ) -> Tensor:
        heads: list[Any] = [(part, None) for part in own] or [(weight, bias)] * len(predicted)
        wide = torch.promote_types(predicted.dtype, torch.float32)
        # Summed over the chunks in float32, as gradients are over micro-batches.
        wanted = zip(own, ctx.needs_input_grad[7:], strict=True)
        own_gradients = [torch.zeros_like(part, dtype=wide) if needed else None for part, needed in wanted]
        totals = torch.zeros(len(predicted), dtype=wide, device=predicted.device)
        gradient = torch.empty_like(predicted)
        chunk_rows = min(chunk_rows, (2**31 - 1) // len(weight))  # torch.dot counts in 32 bits
        for start in range(0, len(target), chunk_rows)[:_most_chunks]:
            rows = slice(start, start + chunk_rows)
            # On a GPU softmax widens as it reads: no wide copy of the logits, two wide [rows, V] tensors at a time.
            p, there = _distribution(target[rows], weight, bias, wide)
            chosen = None if top_k is None else top_k.choose(p)
            for k, (total, ours, slopes) in enumerate(zip(totals, predicted, gradient, strict=True)):
                log_q = F.linear(ours[rows], *heads[k]).log_softmax(-1, dtype=wide)
                if chosen is None:
                    part, slope = divergence(p, log_q, weight.dtype)
                else:
                    known, tokens = chosen
                    more = -torch.dot(known.flatten(), log_q.gather(-1, tokens).flatten())
                    part, slope = divergence(p, log_q, wide)
                    part, q = part + more, log_q  # which it holds now
                    slope.addcmul_(q, known.sum(-1, keepdim=True)).scatter_add_(-1, tokens, -known)
                total += part
                slope = slope.to(weight.dtype) if there is None else slope.to(weight.dtype).mul_(there)
                torch.mm(slope, heads[k][0], out=slopes[rows])
                if own and (own_gradient := own_gradients[k]) is not None:
                    own_gradient += torch.mm(slope.T, ours[rows])
        ctx.save_for_backward(gradient, *own_gradients)
        return totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *own = ctx.saved_tensors
        pairs = zip(own, grads[0], strict=False)
        of_own = [None if part is None else (part * each).to(gradient.dtype) for part, each in pairs]
        return (gradient * grads[0][:, None, None]).to(gradient.dtype), *[None] * 6, *of_own


def _distribution(target: Tensor, weight: Tensor, bias: Tensor | None, wide: torch.dtype) -> tuple[Tensor, Any]:
    """p ``[n, V]`` of features, or of tokens; and of these, whether the LM head has them ``[n, 1]`` (else p is 0)."""
    if target.is_floating_point():
        return F.linear(target, weight, bias).softmax(-1, dtype=wide), None
    there = (target >= 0).to(wide)[:, None]
    return there.new_zeros(len(target), len(weight)).scatter_(1, target.clamp_min(0)[:, None], there), there
