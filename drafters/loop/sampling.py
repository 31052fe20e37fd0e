"""Temperature, top-k and top-p; drawing tokens; residual distributions. All probabilities are float32."""

from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from drafters.model.backend import most_likely

COLDEST = 1e-20  # below this temperature, logits / temperature may exceed float32's range (3e38)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits. ``temperature=0`` is greedy; ``top_k=0`` and ``top_p=1`` are off.

    Raises:
        ValueError: a value that is out of range or not a number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, kind in (("temperature", Real), ("top_k", Integral), ("top_p", Real)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                number = "whole number" if kind is Integral else "number"
                off = {"temperature": "0 is greedy", "top_k": "0 is off", "top_p": "1 is off"}[name]
                raise ValueError(f"{name} must be a {number} ({off}), found {value!r}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, found {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or a positive number of tokens, found {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1] (1 is off), found {self.top_p}")

    @property
    def greedy(self) -> bool:
        """True when tokens are argmaxes."""
        return self.temperature == 0.0

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the float32 distribution ``[..., V]`` that tokens are drawn from, given ``logits [..., V]``.

        Temperature, then top-k, then top-p, as in transformers. Greedy gives a one-hot distribution at the argmax.
        """
        logits = logits.float()
        if self.greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        if self.temperature < COLDEST:  # the quotients of differences overflow to -inf only, so the maximum stays 0
            logits = logits - logits.amax(-1, keepdim=True)
        if self.temperature != 1.0:
            logits = logits / max(self.temperature, torch.finfo(torch.float32).tiny)
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k, dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        probabilities = logits.softmax(-1)
        if self.top_p < 1.0:
            ordered, index = likeliest(logits, probabilities, self.top_p)
            # A token stays while the mass before it is below top_p, so the first one always stays.
            ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= self.top_p, 0.0)
            nucleus = torch.zeros_like(probabilities).scatter_(-1, index, ordered)
            probabilities = nucleus / nucleus.sum(-1, keepdim=True)
        return probabilities

    def pick(self, logits: Tensor, generator: torch.Generator | None, q: list[Tensor] | None = None) -> Tensor:
        """Choose a token for each row of ``logits [..., V]`` -> ``[...]``: the argmax or, when sampling, a draw.

        Args:
            q: the distribution of a draw is appended to it.
        """
        if self.greedy:
            return most_likely(logits)
        probabilities = self.probabilities(logits)
        if q is not None:
            q.append(probabilities)
        return draw(probabilities, generator)


def likeliest(logits: Tensor, probabilities: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """The largest of ``probabilities [..., V]`` in falling order, and their indices; they sum to ``mass`` or more.

    The order is that of ``logits``; equal ones are in falling order of their ids, as transformers has them wherever
    torch.sort is stable. On a CPU the 256 largest are tried first: for V = 128,256 that takes 0.3 ms and a sort 7.6 ms.
    On a GPU all are sorted, because checking the sum would synchronise.
    """
    size = logits.shape[-1]
    for count in (256, 2048) if logits.device.type == "cpu" else ():
        if count >= size:
            break
        values, index = logits.topk(count, dim=-1)
        # Tokens that were left out may be equal to the last one, so that the others have to suffice.
        inside = probabilities.gather(-1, index).masked_fill_(values == values[..., -1:], 0.0)
        if bool((inside.sum(-1) >= mass).all()):
            index = index.sort(dim=-1, descending=True).values
            order = logits.gather(-1, index).sort(dim=-1, descending=True, stable=True).indices
            index = index.gather(-1, order)
            return probabilities.gather(-1, index), index
    index = size - 1 - logits.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    return probabilities.gather(-1, index), index


def draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one token per distribution ``[..., V]`` -> ``[...]`` without host synchronisation.

    It inverts the cumulative sum with one random number per draw: V numbers (the exponential race) would take longer
    than a small model's LM head.
    """
    cumulative = probabilities.cumsum(-1)
    total = cumulative[..., -1:]
    uniform = torch.rand(total.shape, dtype=torch.float32, device=probabilities.device, generator=generator)
    # The token is the first whose cumulative sum exceeds the point, so its probability is above 0. Rounding can put
    # the point on the total, which no sum exceeds: the minimum prevents that.
    point = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True)[..., 0]


def draw_without_replacement(probabilities: Tensor, k: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Draw ``k`` tokens without replacement from ``[..., V]``, in order (Gumbel top-k; Kool et al. 2019).

    The keys are -p / E with E = -log(u), u uniform: six times faster on a CPU than torch's exponential numbers. float32
    uniforms above 0 give E <= 16.6. u = 0 would give a possible token the key 0, so E is at most 17.

    Returns:
        tokens ``[..., k]`` and valid ``[..., k]``: False where the support was exhausted before the k-th draw.
    """
    shape, device = probabilities.shape, probabilities.device
    noise = torch.rand(shape, dtype=torch.float32, device=device, generator=generator).log_().clamp_min_(-17.0)
    keys, tokens = (probabilities / noise).topk(k, dim=-1, largest=False)
    return tokens, keys < 0


def residual(p: Tensor, q: Tensor) -> Tensor:
    """``norm(max(0, p - q))`` over the last dimension (Leviathan et al. 2023, section 2.3).

    Where p == q the residual is 0/0. Only rounding can reject a token there, so p is returned.
    """
    rest = (p - q).clamp_min(0.0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total.clamp_min(torch.finfo(p.dtype).tiny), p)


def without(q: Tensor, token: Tensor) -> Tensor:
    """Return ``q [..., V]`` without ``token [..., 1]``, renormalised."""
    rest = q.scatter(-1, token, 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
