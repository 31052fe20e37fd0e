"""How hidden states lie on disk: in 16 or 32 bits as they are, or in 8 bits with one scale per token.

Symmetric, by the token's largest absolute value: ``value = stored * scale``. Per token, since hidden states of one
token are alike in size while those of different tokens differ by orders of magnitude (the first token of a dialogue
above all); one scale for all would leave most tokens a few of the 255 steps.
"""

import torch
from torch import Tensor

from drafters.model.files import resolve_dtype

# What is stored, and its largest value: the token's largest absolute value becomes that.
SCALED = {"int8": (torch.int8, 127.0), "float8": (torch.float8_e4m3fn, 448.0)}
ID_AND_MASK_BYTES = 5  # a token's id (int32) and its place in the loss mask (bool)
SCALE_BYTES = 4


def storage_dtype(name: str) -> torch.dtype:
    """The dtype of the tensors on disk: ``"int8"`` -> ``torch.int8``.

    Raises:
        ValueError: not one of float32, bfloat16, float16, int8, float8.
    """
    return SCALED[name][0] if name in SCALED else resolve_dtype(name)


def state_names(taps: list[int]) -> list[str]:
    """The store's names of the hidden states that it holds of each token: the feature and one per tap."""
    return ["features", *(f"tap_{layer}" for layer in taps)]


def token_bytes(hidden_size: int, taps: int, dtype: str) -> int:
    """Bytes on disk of one token with its feature and ``taps`` other states, each ``hidden_size`` wide."""
    state = hidden_size * storage_dtype(dtype).itemsize + (SCALE_BYTES if dtype in SCALED else 0)
    return ID_AND_MASK_BYTES + (1 + taps) * state


def to_storage(states: Tensor, dtype: str) -> tuple[Tensor, Tensor | None]:
    """Floating point ``[..., H]`` -> what is stored ``[..., H]`` and, for int8 and float8, float32 scales ``[...]``.

    A token with a NaN has the scale NaN, one with an infinite value an infinite scale, so that the check for those
    needs the scales alone. A token of zeros (or below float32's normal numbers) has the scale 0 and is read as zeros.
    """
    if dtype not in SCALED:
        return states.to(resolve_dtype(dtype)), None
    kind, most = SCALED[dtype]
    scale = states.abs().amax(-1).float() / most
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, torch.zeros_like(scale), scale)
    # In float32, and from here on in place: a batch of a large target's states takes hundreds of megabytes.
    steps = states / torch.where(scale == 0, torch.ones_like(scale), scale).unsqueeze(-1)
    steps = (steps.round_() if kind == torch.int8 else steps).clamp_(-most, most)
    # Cast to int8, a NaN is whatever the machine makes of it; the token's scale tells, so zeros will do.
    return steps.masked_fill_(~torch.isfinite(scale).unsqueeze(-1), 0.0).to(kind), scale


def from_storage(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``to_storage`` made, ``[T, H]`` with scales ``[T]``, as floating point ``dtype`` again."""
    return stored.float().mul_(scale.unsqueeze(-1)).to(dtype)
