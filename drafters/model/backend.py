"""The only door to ``drafters/cpu``, an optional folder of kernels for CPUs; every function here has torch as default.

A function returns None (``join_layers``: the layers unchanged) for a tensor on a GPU, for a dtype or shape without a
kernel, with ``DRAFTERS_CPU_KERNELS=0``, without a compiler and without that folder. Its caller then uses torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from drafters.cpu.kernels import FewRows, Tiles
    from drafters.cpu.layers import HeadPass
    from drafters.model.runner import Part, PartLayer

_kernels: Any = None
_layers: Any = None
try:
    from drafters.cpu import kernels as _kernels
    from drafters.cpu import layers as _layers
except ModuleNotFoundError:  # the folder was left out
    pass


def available() -> bool:
    """Return True if there are kernels for this CPU; an entry of a cache of timings says so."""
    return _kernels is not None and _kernels.library() is not None


def most_likely(logits: Tensor) -> Tensor:
    """Return ``logits.argmax(-1)``: ``[..., V]`` -> ``[...]``."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    tokens: Tensor | None = None if _kernels is None else _kernels.most_likely(logits)
    return logits.float().argmax(-1) if tokens is None else tokens  # torch's is twice as slow in 16 bits


def pack(values: Tensor, scales: Tensor | None = None, middles: Tensor | None = None) -> "Tiles | None":
    """Convert a weight to the kernels' layout, or return None.

    Args:
        values: ``[outputs, inputs]`` in bf16; or in int8 with ``scales [outputs]``; or 0 to 15 in uint8 with ``scales``
            and ``middles [outputs, inputs / 32]`` of each group: ``(values - 8) * scales + middles``.
    """
    return None if _kernels is None else _kernels.pack(values, scales, middles)


def attention(weight: Tensor, head_dim: int, groups: int) -> "FewRows | None":
    """Return attention of a few new tokens over a cache, or None.

    Args:
        weight: weight of the queries' projection. groups: query heads that share a key head.
    """
    return None if _kernels is None else _kernels.attention(weight, head_dim, groups)


def join_layers(layers: "Sequence[PartLayer]", taps: tuple[int, ...]) -> "Sequence[PartLayer]":
    """Return the layers with every run of them that the kernels compute in one call as one layer; taps end a run."""
    return layers if _layers is None else _layers.join(layers, taps)


def head_pass(part: "Part", fc: Any, lm_head: Any, embeddings: Tensor) -> "HeadPass | None":
    """Return a pass of an EAGLE head (fc, its only layer, LM head, likeliest tokens) as one call, or None."""
    return None if _layers is None else _layers.head_pass(part, fc, lm_head, embeddings)
