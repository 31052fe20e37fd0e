"""Training losses: how far the drafter's distributions or features are from the target's.

Every function returns sums over rows. The caller divides by the number of trained positions of the whole optimiser step
(all ranks and micro-batches), because micro-batches differ in how many of their tokens belong to answers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafters.model.stock import LogitChange


@dataclass(frozen=True)
class Pairs:
    """Predictions beside what the target gives for the same tokens: losses and held-out figures are computed from them.

    Attributes:
        predictions: ``[S, n, h]``, S predictions of each of n tokens, as they enter an LM head. Unrolled steps and
            Medusa's heads are S predictions of one token; a drafter of blocks flattens its blocks into n.
        targets: ``[n, H]``, the target's features for these tokens; or int64 ``[n]``, tokens, -1 for one outside
            ``loss_vocab``.
        weights: ``[S, n]``, what each prediction counts in the loss; None: 1.
        tokens: int64 ``[n]``, the text's tokens, -1 for one outside ``loss_vocab``; None: the loss needs none.
        latents: ``[S, n, r]``, input of the drafter's correction of its logits; None: they are not corrected.
        confidence: ``[n]``, logits of the estimated acceptance; None: the drafter does not estimate it.
    """

    predictions: Tensor
    targets: Tensor
    weights: Tensor | None = None
    tokens: Tensor | None = None
    latents: Tensor | None = None
    confidence: Tensor | None = None

    def at(self, rows: Tensor) -> "Pairs":
        """The pairs of some tokens; ``rows`` is an index or a mask over n."""
        weights = None if self.weights is None else self.weights[:, rows]
        tokens = None if self.tokens is None else self.tokens[rows]
        latents = None if self.latents is None else self.latents[:, rows]
        confidence = None if self.confidence is None else self.confidence[rows]
        return Pairs(self.predictions[:, rows], self.targets[rows], weights, tokens, latents, confidence)

    def perfect(self) -> "Pairs":
        """The pairs of a drafter that gives exactly the target's features."""
        predictions = self.targets.expand(len(self.predictions), *self.targets.shape)
        return replace(self, predictions=predictions, latents=None, confidence=None)


def regression_sum(pairs: Pairs) -> Tensor:
    """SmoothL1 (beta 1), mean over the hidden size, summed over tokens: float32 ``[S]``."""
    theirs = pairs.targets.float().expand_as(pairs.predictions)
    each = F.smooth_l1_loss(pairs.predictions.float(), theirs, reduction="none").mean(-1)
    return (each if pairs.weights is None else each * pairs.weights).sum(-1)


# p and log q of some rows [rows, V], the dtype of the gradient, and weights [rows] of the rows (None: 1) -> the rows'
# weighted sum, and the gradient of each row's own term by q's logits [rows, V]. Overwrites ``log_q`` with q.
Divergence = Callable[[Tensor, Tensor, torch.dtype, Tensor | None], tuple[Tensor, Tensor]]


def cross_entropy(p: Tensor, log_q: Tensor, dtype: torch.dtype, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """``- sum_x p(x) log q(x)``, whose gradient is q - p."""
    # One dot product needs no third [rows, V] tensor.
    total = torch.dot(p.flatten(), log_q.flatten()) if weights is None else _sum(p * log_q, weights)
    return -total, torch.sub(log_q.exp_(), p, out=torch.empty_like(p, dtype=dtype))


def forward_kl(p: Tensor, log_q: Tensor, dtype: torch.dtype, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """``D_KL(p || q)``: the cross-entropy without the target's entropy."""
    entropy = -_sum(torch.xlogy(p, p), weights)
    total, gradient = cross_entropy(p, log_q, dtype, weights)
    return total - entropy, gradient


def reverse_kl(p: Tensor, log_q: Tensor, dtype: torch.dtype, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """``D_KL(q || p)``."""
    ratio = log_q - _log(p)
    q = log_q.exp_()
    return _sum(q * ratio, weights), _by_logits(q, ratio).to(dtype)


def jsd(p: Tensor, log_q: Tensor, dtype: torch.dtype, weights: Tensor | None, beta: float) -> tuple[Tensor, Tensor]:
    """``beta D_KL(p || m) + (1 - beta) D_KL(q || m)``, m = beta p + (1 - beta) q: the generalised Jensen-Shannon
    divergence of DistillSpec (Zhou et al. 2023, arXiv:2310.08461), as are both KLs above and the total variation."""
    log_m = _log(torch.lerp(log_q.exp(), p, beta))
    ratio = log_q - log_m
    q = log_q.exp_()
    value = beta * (torch.xlogy(p, p) - p * log_m) + (1 - beta) * q * ratio
    return _sum(value, weights), _by_logits(q, (1 - beta) * ratio).to(dtype)


def total_variation(p: Tensor, log_q: Tensor, dtype: torch.dtype, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """``1 - alpha``, alpha = sum_x min(p(x), q(x)): the probability that sampled drafting rejects the token."""
    alpha, gradient = _acceptance(p, log_q.exp_())
    return _sum(1 - alpha, weights), gradient.to(dtype)


def lk_alpha(p: Tensor, log_q: Tensor, dtype: torch.dtype, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """``- log alpha``, the LK loss without a parameter (Samarin et al. 2026, arXiv:2602.23881): the total variation's
    gradient divided by alpha, so it stays large where hardly anything is accepted."""
    alpha, gradient = _acceptance(p, log_q.exp_())
    alpha = alpha.clamp_min(torch.finfo(alpha.dtype).tiny)  # without any overlap: large, but not infinite
    return -_sum(alpha.log(), weights), gradient.div_(alpha[:, None]).to(dtype)


def lk_lambda(
    p: Tensor, log_q: Tensor, dtype: torch.dtype, weights: Tensor | None, eta: float
) -> tuple[Tensor, Tensor]:
    """``lambda KL(p, q) + (1 - lambda) (1 - alpha)``, lambda = exp(-eta alpha) taken as a constant: the LK loss that
    moves from KL to the total variation as alpha grows (the same paper).

    Each row has its own lambda, as in vLLM's speculators, so that it depends on neither packing nor ranks; SpecForge
    computes it from a batch's mean alpha.
    """
    kl = (torch.xlogy(p, p) - p * log_q).sum(-1)
    q = log_q.exp_()
    alpha, gradient = _acceptance(p, q)
    share = torch.exp(-eta * alpha)
    return _sum(torch.lerp(1 - alpha, kl, share), weights), gradient.lerp_(q - p, share[:, None]).to(dtype)


def _sum(values: Tensor, weights: Tensor | None) -> Tensor:
    """The sum of ``values``, ``[rows]`` or ``[rows, V]``, each row times its weight."""
    if weights is None:
        return values.sum()
    return torch.dot(values if values.dim() == 1 else values.sum(-1), weights)


def _acceptance(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """alpha ``[rows]``, and the gradient of 1 - alpha by q's logits: q sum_x [q < p] q - [q < p] q."""
    below = torch.where(q < p, q, 0)
    return torch.minimum(p, q).sum(-1), (q * below.sum(-1, keepdim=True)).sub_(below)


def _by_logits(q: Tensor, slope: Tensor) -> Tensor:
    """The gradient by q's logits of a function whose gradient by q is ``slope``, up to a constant along x."""
    return q * (slope - (q * slope).sum(-1, keepdim=True))


def _log(p: Tensor) -> Tensor:
    """The logarithm of probabilities that softmax may have rounded to 0, without infinity."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()


@dataclass(frozen=True)
class TopK:
    """Adds ``- weight sum_{x in K} p(x) log q(x)``, K the target's ``count`` most likely tokens, p and q over all
    tokens: the Top-K loss of HASS (Zhang et al. 2024, arXiv:2408.15766, and its train/main_hass.py)."""

    count: int
    weight: float

    def choose(self, p: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The weighted p(x) and the ids of the tokens in K; ``[rows, count]`` each."""
        chosen = p.topk(min(self.count, p.shape[-1]), sorted=False)
        return self.weight * chosen.values, chosen.indices


@dataclass(frozen=True)
class TextTokens:
    """Adds ``- weight log q(t)``, t the text's tokens int64 ``[n]``, -1 for one without this term (DSpark)."""

    tokens: Tensor
    weight: float

    def choose(self, p: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """The weight, or 0, and the token; ``[rows, 1]`` each."""
        tokens = self.tokens[rows, None]
        return self.weight * (tokens >= 0).to(p.dtype), tokens.clamp_min(0)


def divergence_sum(
    pairs: Pairs,
    lm_head: nn.Linear,
    divergence: Divergence = cross_entropy,
    term: TopK | TextTokens | None = None,
    chunk_rows: int = 256,
    own: Sequence[Tensor] = (),
    correction: Tensor | None = None,
    overlap: Tensor | None = None,
) -> Tensor:
    """The drafter's divergence from the target over the vocabulary at temperature 1, summed over tokens:
    p = softmax(lm_head(targets)), q = softmax(lm_head(predictions)). S predictions share the target's logits.

    The target's LM head is frozen, so the backward pass needs only the gradient by ``predictions``: the gradient by the
    logits times W, known as soon as the logits are. The forward pass computes it at once, so that only ``chunk_rows``
    rows of logits exist at a time.

    Args:
        pairs: of n tokens.
        lm_head: the target's LM head, or some of its rows. Its bias, scale or cap is not for ``own``.
        divergence: one of those above.
        term: a term to add.
        chunk_rows: rows of logits in memory at a time.
        own: the weight ``[V, h]`` of an LM head of the drafter's own for each of the S predictions, or one for all,
            whose sums must then enter the loss with one factor; it gets a gradient if it requires one.
        correction: the weight W ``[V, r]`` of the drafter's correction: q = softmax(lm_head(predictions) + W latents).
            It gets a gradient, and its sums must enter the loss with one factor.
        overlap: float32 ``[S, n]``, overwritten with sum_x min(p(x), q(x)), the acceptance rate of sampled drafting;
            with tokens as targets it is q(token).

    Returns:
        float32 ``[S]``.
    """
    given = pairs.predictions, pairs.latents, correction, pairs.targets, pairs.weights
    head = lm_head.weight, lm_head.bias, getattr(lm_head, "change", None)
    sums: Tensor = _Divergence.apply(*given, *head, divergence, term, chunk_rows, overlap, *own)
    return sums


def default_chunk_rows(lm_head: nn.Linear, on_gpu: bool | None = None) -> int:
    """Rows of logits to hold at a time: enough to use the device, few enough to fit its cache or leave memory free.

    On a CPU 2 MiB of float32 logits stay in the cache, but below 64 rows the products are slow. On a GPU each chunk
    reads the whole LM head three times, so it needs some hundred rows: 256 MiB are 523 rows of a vocabulary of 128,256,
    2,097 rows of a vocabulary of 32,000.

    Args:
        lm_head: its vocabulary and its device decide.
        on_gpu: the device to estimate for; None: the LM head's own.
    """
    if on_gpu is None:
        on_gpu = lm_head.weight.device.type != "cpu"
    budget = 2**28 if on_gpu else 2**21
    return max(64, budget // (4 * lm_head.out_features))


_most_chunks: int | None = None


@contextmanager
def two_chunks_only() -> Iterator[None]:
    """Compute the loss of only the first two chunks, for an estimate of memory on tensors without contents.

    The second chunk finds the first one's tensors still in memory; no later chunk needs more.
    """
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
        predictions: Tensor,
        latents: Tensor | None,
        correction: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        change: LogitChange | None,
        divergence: Divergence,
        term: TopK | TextTokens | None,
        chunk_rows: int,
        overlap: Tensor | None,
        *own: Tensor,
    ) -> Tensor:
        shared = len(own) == 1
        heads = own * len(predictions) if shared else own or [weight] * len(predictions)
        wide = torch.promote_types(predictions.dtype, torch.float32)
        # Summed over the chunks in float32, as gradients are over micro-batches.
        wanted = zip(own, ctx.needs_input_grad[12:], strict=True)
        own_gradients = [torch.zeros_like(part, dtype=wide) if needed else None for part, needed in wanted]
        totals = torch.zeros(len(predictions), dtype=wide, device=predictions.device)
        gradient = torch.empty_like(predictions)
        by_latents = None if latents is None else torch.empty_like(latents)
        by_correction = None if correction is None else torch.zeros_like(correction, dtype=wide)
        chunk_rows = min(chunk_rows, (2**31 - 1) // len(weight))  # torch.dot counts in 32 bits
        for start in range(0, len(targets), chunk_rows)[:_most_chunks]:
            rows = slice(start, start + chunk_rows)
            # On a GPU softmax widens as it reads: no wide copy of the logits, two wide [rows, V] tensors at a time.
            p, known = _distribution(targets[rows], weight, bias, change, wide)
            chosen = None if term is None else term.choose(p, rows)
            for k, (total, ours, slopes) in enumerate(zip(totals, predictions, gradient, strict=True)):
                each = None if weights is None else weights[k, rows].to(wide)
                logits = F.linear(ours[rows], heads[k], None if own else bias)
                changed = None if change is None or own else change(logits)
                inputs = None if latents is None else latents[k, rows]
                whole = _corrected(logits if changed is None else changed, inputs, correction)
                log_q = whole.log_softmax(-1, dtype=wide)
                del logits, whole
                if chosen is None:
                    part, slope = divergence(p, log_q, weight.dtype, each)
                else:
                    part, slope = _with_term(divergence, chosen, p, log_q, each)
                total += part
                if overlap is not None:
                    overlap[k, rows] = torch.minimum(p, log_q).sum(-1)  # q, which the divergence left there
                slope = slope.to(weight.dtype) if known is None else slope.to(weight.dtype).mul_(known)
                if each is not None:
                    slope.mul_(each[:, None])
                _add_correction(slope, inputs, correction, by_latents, by_correction, (k, rows))
                if change is not None and changed is not None:
                    slope.mul_(change.slope(changed))
                torch.mm(slope, heads[k], out=slopes[rows])
                if own and (own_gradient := own_gradients[0 if shared else k]) is not None:
                    own_gradient += torch.mm(slope.T, ours[rows])
        ctx.save_for_backward(gradient, by_latents, by_correction, *own_gradients)
        return totals

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradient, by_latents, by_correction, *own = ctx.saved_tensors
        pairs = zip(own, grads[0], strict=False)
        of_own = [None if part is None else (part * each).to(gradient.dtype) for part, each in pairs]
        of_latents = None if by_latents is None else (by_latents * grads[0][:, None, None]).to(by_latents.dtype)
        of_correction = None if by_correction is None else (by_correction * grads[0][0]).to(gradient.dtype)
        return (gradient * grads[0][:, None, None]).to(gradient.dtype), of_latents, of_correction, *[None] * 9, *of_own


def _corrected(logits: Tensor, latents: Tensor | None, correction: Tensor | None) -> Tensor:
    """Logits ``[rows, V]`` with the drafter's correction, if it has one."""
    return logits if latents is None or correction is None else torch.addmm(logits, latents, correction.T)


def _add_correction(
    slope: Tensor,
    latents: Tensor | None,
    correction: Tensor | None,
    by_latents: Tensor | None,
    by_correction: Tensor | None,
    place: tuple[int, slice],
) -> None:
    """Add the gradients of a correction, from the gradient ``slope`` of its logits, if there is one."""
    if latents is None or correction is None or by_latents is None or by_correction is None:
        return
    by_latents[place] = torch.mm(slope, correction)
    by_correction += torch.mm(slope.T, latents)


def _with_term(
    divergence: Divergence, chosen: tuple[Tensor, Tensor], p: Tensor, log_q: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A divergence and a term, as ``divergence`` returns them; ``chosen`` is of ``TopK.choose`` or another's."""
    known, tokens = chosen
    more = -_sum(known * log_q.gather(-1, tokens), weights)
    part, slope = divergence(p, log_q, p.dtype, weights)
    q = log_q  # overwritten by the divergence
    slope.addcmul_(q, known.sum(-1, keepdim=True)).scatter_add_(-1, tokens, -known)
    return part + more, slope


def _distribution(
    targets: Tensor, weight: Tensor, bias: Tensor | None, change: LogitChange | None, wide: torch.dtype
) -> tuple[Tensor, Any]:
    """p ``[n, V]`` of features; or of tokens, with a column that is 0 for tokens outside the LM head's ``[n, 1]``."""
    if targets.is_floating_point():
        logits = F.linear(targets, weight, bias)
        return (logits if change is None else change(logits)).softmax(-1, dtype=wide), None
    known = (targets >= 0).to(wide)[:, None]
    return known.new_zeros(len(targets), len(weight)).scatter_(1, targets.clamp_min(0)[:, None], known), known
