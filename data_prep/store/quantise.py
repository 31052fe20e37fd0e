"""Hidden states on disk: in 16 or 32 bits unchanged, or in 8 bits with one scale per token.

Symmetric: ``value = stored * scale``; the scale comes from the token's largest absolute value. Hidden states of
different tokens differ by orders of magnitude (a dialogue's first token has the largest), so one scale for all tokens
would leave most of them only a few of the 255 steps.
"""

import torch
from torch import Tensor

from drafters.model.files import resolve_dtype

# Stored dtype and its largest value, which represents the token's largest absolute value.
SCALED = {"int8": (torch.int8, 127.0), "float8": (torch.float8_e4m3fn, 448.0)}


def storage_dtype(name: str) -> torch.dtype:
    """The dtype of the tensors on disk: ``"int8"`` -> ``torch.int8``; ValueError for an unknown name."""
    return SCALED[name][0] if name in SCALED else resolve_dtype(name)


def state_names(taps: list[int]) -> list[str]:
    """Names of a token's stored hidden states: the feature and one per tap."""
    return ["features", *(f"tap_{layer}" for layer in taps)]


def to_storage(states: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Floating point ``[..., H]`` -> stored values ``[..., H]`` and, for int8 and float8, float32 scales ``[...]``.

    A token with a NaN or infinite value has a NaN or infinite scale, so checking the scales is enough. A token of zeros
    (or below float32's normal numbers) has the scale 0 and is read as zeros.
    """
    if dtype not in SCALED:
        return states.to(resolve_dtype(dtype)), None
    kind, most = SCALED[dtype]
    scale = states.abs().amax(-1).float() / most
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.zeros_like(scale), scale)
    # In float32, and from here on in place: a batch of a large target's states takes hundreds of megabytes.
    steps = states / torch.where(scale == 0, torch.ones_like(scale), scale).unsqueeze(-1)
    steps = (steps.round_() if kind == torch.int8 else steps).clamp_(-most, most)
    # The int8 value of a NaN depends on the machine, so store 0: the scale marks the token.
    return steps.masked_fill_(~torch.isfinite(scale).unsqueeze(-1), 0.0).to(kind), scale


def from_storage(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of ``to_storage``: stored ``[T, H]`` and scales ``[T]`` -> floating point ``dtype`` ``[T, H]``."""
    return stored.float().mul_(scale.unsqueeze(-1)).to(dtype)
