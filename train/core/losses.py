"""Training losses: how far the drafter's distributions or features are from the target's.

Every function returns sums over rows. The caller divides by the number of trained positions of the whole optimiser step
(all ranks and micro-batches), because micro-batches differ in how many of their tokens belong to answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Pairs:
    """Predictions beside what the target gives for the same tokens: losses and held-out figures are computed from them.

    Attributes:
        predictions: ``[S, n, h]``, S predictions of each of n tokens, as they enter an LM head. Unrolled steps and
            Medusa's heads are S predictions of one token; a drafter of blocks flattens its blocks into n.
        targets: ``[n, H]``, the target's features for these tokens; or int64 ``[n]``, tokens, -1 for one outside
            ``loss_vocab``.
        weights: ``[S, n]``, weight of each prediction in the loss; None for 1.
        tokens: int64 ``[n]``, the text's tokens, -1 for one outside ``loss_vocab``; None if the loss needs none.
        latents: ``[S, n, r]``, input of the drafter's correction of its logits, or None.
        confidence: ``[n]``, logits of the estimated acceptance; None if the drafter does not estimate it.
        previous: int64 ``[n]``, the text's tokens before these; None if the drafter does not read them here.
    """

    predictions: Tensor
    targets: Tensor
    weights: Tensor | None = None
    tokens: Tensor | None = None
    latents: Tensor | None = None
    confidence: Tensor | None = None
    previous: Tensor | None = None

    def at(self, rows: Tensor | slice) -> "Pairs":
        """The pairs of some tokens; ``rows`` is an index, a mask or a slice over n."""
        weights = None if self.weights is None else self.weights[:, rows]
        tokens = None if self.tokens is None else self.tokens[rows]
        latents = None if self.latents is None else self.latents[:, rows]
        confidence = None if self.confidence is None else self.confidence[rows]
        previous = None if self.previous is None else self.previous[rows]
        return Pairs(self.predictions[:, rows], self.targets[rows], weights, tokens, latents, confidence, previous)

    def perfect(self) -> "Pairs":
        """The pairs of a drafter that gives exactly the target's features."""
        predictions = self.targets.expand(len(self.predictions), *self.targets.shape)
        return replace(self, predictions=predictions, latents=None, confidence=None, previous=None)


def regression_sum(pairs: Pairs) -> Tensor:
    """SmoothL1 (beta 1), mean over the hidden size, summed over tokens: float32 ``[S]``."""
    theirs = pairs.targets.float().expand_as(pairs.predictions)
    each = F.smooth_l1_loss(pairs.predictions.float(), theirs, reduction="none").mean(-1)
    return (each if pairs.weights is None else each * pairs.weights).sum(-1)


# p and log q of some tokens [n, V] -> each token's term [n]. Autograd differentiates it by log q.
Divergence = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(p: Tensor, log_q: Tensor) -> Tensor:
    """``- sum_x p(x) log q(x)``."""
    return -torch.linalg.vecdot(p, log_q)


def forward_kl(p: Tensor, log_q: Tensor) -> Tensor:
    """``D_KL(p || q)``: the cross-entropy without the target's entropy."""
    return torch.xlogy(p, p).sum(-1) + cross_entropy(p, log_q)


def reverse_kl(p: Tensor, log_q: Tensor) -> Tensor:
    """``D_KL(q || p)``."""
    return (log_q.exp() * (log_q - _log(p))).sum(-1)


def jsd(p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """``beta D_KL(p || m) + (1 - beta) D_KL(q || m)``, m = beta p + (1 - beta) q: the generalised Jensen-Shannon
    divergence of DistillSpec (Zhou et al. 2023, arXiv:2310.08461), as are both KLs above and the total variation."""
    q = log_q.exp()
    log_m = _log(torch.lerp(q, p, beta))
    return (beta * (torch.xlogy(p, p) - p * log_m) + (1 - beta) * q * (log_q - log_m)).sum(-1)


def total_variation(p: Tensor, log_q: Tensor) -> Tensor:
    """``1 - alpha``, alpha = sum_x min(p(x), q(x)): the probability that sampled drafting rejects the token."""
    return 1 - _acceptance(p, log_q)


def lk_alpha(p: Tensor, log_q: Tensor) -> Tensor:
    """``- log alpha``, the LK loss without a parameter (Samarin et al. 2026, arXiv:2602.23881): the total variation's
    gradient divided by alpha, so it stays large where hardly anything is accepted."""
    return -_log(_acceptance(p, log_q))


def lk_lambda(p: Tensor, log_q: Tensor, eta: float) -> Tensor:
    """``lambda KL(p, q) + (1 - lambda) (1 - alpha)``, lambda = exp(-eta alpha) taken as a constant: the LK loss that
    moves from KL to the total variation as alpha grows (the same paper).

    Each token has its own lambda, as in vLLM's speculators, so that it depends on neither packing nor ranks; SpecForge
    computes it from a batch's mean alpha.
    """
    alpha = _acceptance(p, log_q)
    return torch.lerp(1 - alpha, forward_kl(p, log_q), torch.exp(-eta * alpha.detach()))


def _acceptance(p: Tensor, log_q: Tensor) -> Tensor:
    """alpha ``[n]``; no gradient where q = p, so that a perfect drafter is not moved."""
    q = log_q.exp()
    return torch.where(q < p, q, p).sum(-1)


def _log(p: Tensor) -> Tensor:
    """The logarithm of probabilities that softmax may have rounded to 0, without infinity."""
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()


@dataclass(frozen=True)
class TopK:
    """Adds ``- weight sum_{x in K} p(x) log q(x)``, K the target's ``count`` most likely tokens, p and q over all
    tokens: the Top-K loss of HASS (Zhang et al. 2024, arXiv:2408.15766, and its train/main_hass.py)."""

    count: int
    weight: float

    def __call__(self, p: Tensor, log_q: Tensor, tokens: Tensor | None) -> Tensor:
        """The term of each token ``[n]``."""
        among = p.topk(min(self.count, p.shape[-1]), sorted=False)
        return -self.weight * (among.values * log_q.gather(-1, among.indices)).sum(-1)


@dataclass(frozen=True)
class TextTokens:
    """Adds ``- weight log q(t)``, t the text's tokens, -1 for one without this term (DSpark)."""

    weight: float

    def __call__(self, p: Tensor, log_q: Tensor, tokens: Tensor | None) -> Tensor:
        """The term of each token ``[n]``; ``tokens``: int64 ``[n]``."""
        assert tokens is not None
        return -self.weight * (tokens >= 0) * log_q.gather(-1, tokens.clamp_min(0)[:, None])[:, 0]


def divergence_sum(
    pairs: Pairs,
    lm_head: nn.Linear,
    divergence: Divergence = cross_entropy,
    term: TopK | TextTokens | None = None,
    chunk_rows: int = 256,
    drafter_heads: Sequence[Tensor] = (),
    correction: Tensor | None = None,
    overlap: Tensor | None = None,
) -> Tensor:
    """The drafter's divergence from the target over the vocabulary at temperature 1, summed over tokens:
    p = softmax(lm_head(targets)), q = softmax(lm_head(predictions)). S predictions share the target's logits.

    Only ``chunk_rows`` tokens have logits in memory at a time: each chunk is differentiated in the forward pass, and
    the backward pass multiplies its gradients with those of the sums.

    Args:
        pairs: pairs of n tokens.
        lm_head: the target's LM head, or some of its rows. Its bias, scale or cap is not for ``drafter_heads``.
        divergence: one of those above.
        term: a term to add; it reads ``pairs.tokens``.
        chunk_rows: tokens whose logits are in memory at a time.
        drafter_heads: the weight ``[V, h]`` of the drafter's own LM head for each of the S predictions, or one for
            all, whose sums must then enter the loss with one factor; it gets a gradient if it requires one.
        correction: the weight W ``[V, r]`` of the drafter's correction: q = softmax(lm_head(predictions) + W latents).
            It gets a gradient, and its sums must enter the loss with one factor.
        overlap: float32 ``[S, n]``, overwritten with sum_x min(p(x), q(x)), the acceptance rate of sampled drafting;
            with tokens as targets it is q(token).

    Returns:
        float32 ``[S]``.
    """
    wide = torch.promote_types(pairs.predictions.dtype, torch.float32)
    heads = list(drafter_heads) or [lm_head.weight]
    latents = None if correction is None else pairs.latents
    inputs = [pairs.predictions, latents, correction, *heads]
    gradients = [_zeros_for(tensor, wide) for tensor in inputs]
    sums = torch.zeros(len(pairs.predictions), dtype=wide, device=pairs.predictions.device)
    for start in range(0, len(pairs.targets), chunk_rows):
        rows = slice(start, start + chunk_rows)
        part = pairs.at(rows)
        with torch.no_grad():
            p, known = _target_distribution(part.targets, lm_head, wide)
        for k in range(len(sums)):
            # What this chunk's k-th sum is differentiated by, and where the gradients go.
            used = (0, 1, 2, 3 + min(k, len(heads) - 1))
            leaves: list[Any] = [_part_of(inputs[i], k, rows, gradients[i] is not None) for i in used]
            places = [_part_of(gradients[i], k, rows, False) for i in used]
            with torch.set_grad_enabled(any(place is not None for place in places)):
                log_q = _log_draft_distribution(leaves, None if drafter_heads else lm_head, wide)
                terms = divergence(p, log_q) if term is None else divergence(p, log_q) + term(p, log_q, part.tokens)
                total = torch.dot(terms, known if part.weights is None else known * part.weights[k])
            sums[k] += total.detach()
            if overlap is not None:
                overlap[k, rows] = torch.minimum(p, log_q.detach().exp()).sum(-1)
            _add_gradients(total, leaves, places)
    factors = [slice(None), slice(None), 0, *range(len(heads))]  # of the sums' gradients, for each input
    return _WithGradients.apply(sums, gradients, factors, *inputs)


def default_chunk_rows(lm_head: nn.Linear, on_gpu: bool | None = None) -> int:
    """Rows of logits to hold at a time: enough to use the device, few enough to fit its cache or leave memory free.

    On a CPU 2 MiB of float32 logits stay in the cache, but below 64 rows the products are slow. On a GPU each chunk
    reads the whole LM head three times, so it needs some hundred rows: 256 MiB are 523 rows of a vocabulary of 128,256,
    2,097 rows of a vocabulary of 32,000.

    Args:
        lm_head: its vocabulary and its device decide.
        on_gpu: whether to estimate for a GPU (default: for the LM head's device).
    """
    if on_gpu is None:
        on_gpu = lm_head.weight.device.type != "cpu"
    budget = 2**28 if on_gpu else 2**21
    return max(64, budget // (4 * lm_head.out_features))


def _target_distribution(targets: Tensor, lm_head: nn.Linear, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """p ``[n, V]`` of features, or one-hot of tokens; and float ``[n]``, 0 for tokens outside the LM head, else 1."""
    if targets.is_floating_point():
        # On a GPU softmax widens as it reads, so there is no wide copy of the logits.
        return lm_head(targets).softmax(-1, dtype=wide), targets.new_ones(len(targets), dtype=wide)
    known = (targets >= 0).to(wide)
    p = known.new_zeros(len(targets), lm_head.out_features)
    return p.scatter_(1, targets.clamp_min(0)[:, None], known[:, None]), known


def _log_draft_distribution(leaves: Sequence[Any], lm_head: nn.Linear | None, wide: torch.dtype) -> Tensor:
    """log q ``[n, V]`` of predictions ``[n, h]``, latents and correction (both or neither), and LM head weights.

    ``lm_head``: the target's, whose bias, scale and cap count, too; None if the weights are the drafter's own.
    """
    predictions, latents, correction, weight = leaves
    logits = F.linear(predictions, weight, None if lm_head is None else lm_head.bias)
    change = getattr(lm_head, "change", None)
    logits = logits if change is None else change(logits)
    if latents is not None:
        logits = torch.addmm(logits, latents, correction.T)
    return logits.log_softmax(-1, dtype=wide)


def _zeros_for(tensor: Tensor | None, wide: torch.dtype) -> Tensor | None:
    """A gradient to add to, if one is wanted; that of a weight is summed in float32, as over micro-batches."""
    if tensor is None or not tensor.requires_grad or not torch.is_grad_enabled():
        return None
    return torch.zeros_like(tensor, dtype=tensor.dtype if tensor.dim() == 3 else wide)


def _part_of(tensor: Tensor | None, k: int, rows: slice, differentiated: bool) -> Tensor | None:
    """The k-th prediction's ``rows`` of ``[S, n, .]``, or a whole weight, as a leaf."""
    if tensor is None:
        return None
    part = tensor.detach()[k, rows] if tensor.dim() == 3 else tensor.detach()
    return part.requires_grad_(differentiated)


def _add_gradients(total: Tensor, leaves: Sequence[Tensor | None], places: Sequence[Tensor | None]) -> None:
    """Add the gradients of ``total`` by ``leaves`` to the ``places`` that are not None."""
    pairs = [
        (leaf, place) for leaf, place in zip(leaves, places, strict=True) if leaf is not None and place is not None
    ]
    if pairs:
        parts = torch.autograd.grad(total, [leaf for leaf, _ in pairs])
        for (_, place), part in zip(pairs, parts, strict=True):
            place += part


class _WithGradients(torch.autograd.Function):
    """Sums ``[S]`` whose gradients by ``inputs`` are known; ``factors``: index of the sums that an input enters."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, gradients: list[Tensor | None], factors: list[Any], *inputs: Any) -> Tensor:
        ctx.gradients, ctx.factors, ctx.dtypes = gradients, factors, [None if x is None else x.dtype for x in inputs]
        return sums.clone()

    @staticmethod
    def backward(ctx: Any, *by_sums: Tensor) -> tuple[Any, ...]:
        gradients: list[Any] = []
        for gradient, place, dtype in zip(ctx.gradients, ctx.factors, ctx.dtypes, strict=True):
            factor = by_sums[0][place]
            factor = factor[:, None, None] if factor.dim() else factor
            gradients.append(None if gradient is None else (gradient * factor).to(dtype))
        return None, None, None, *gradients
