"""Elementwise operations of fused layers, plain or compiled by torch into one CUDA kernel for each function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_compiled: ContextVar[bool] = ContextVar("compiled", default=False)
# Compilations of a function, by dtype, model's width, batch and rows (one, any). Beyond them it runs uncompiled.
MOST_COMPILATIONS = 64


@contextmanager
def compiling(compiled: bool) -> Iterator[None]:
    """Let torch.compile (Inductor, its results cached on disk) run this file's functions in this thread."""
    token = _compiled.set(compiled)
    try:
        yield
    finally:
        _compiled.reset(token)


@cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function)  # not at import: this loads the compiler
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_COMPILATIONS)
    return compiled


def compilable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of tensors and numbers: inside ``compiling(True)`` its compiled form is called."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return (_compile(function) if _compiled.get() else function)(*arguments)

    return call


@compilable
def rotate(heads: Tensor, cos: Tensor, sin: Tensor, head_norm: Tensor | None, eps: float) -> Tensor:
    """RoPE of ``heads [B, R, heads, D]``, after Qwen3's norm over each head; ``cos``, ``sin``: ``signed`` angles."""
    if head_norm is not None:
        heads = F.rms_norm(heads, heads.shape[-1:], eps=eps) * head_norm
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


@compilable
def softmax(scores: Tensor, scale: float, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Attention weights ``[B, heads, R, S]`` in ``dtype``: the softmax of ``scores * scale + bias``."""
    scores = scores * scale
    return (scores if bias is None else scores + bias).softmax(-1).to(dtype)


@compilable
def add_norm(hidden: Tensor, change: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """``hidden + change``, and its RMSNorm; without ``weight`` itself again."""
    hidden = hidden + change
    return hidden, hidden if weight is None else F.rms_norm(hidden, weight.shape, weight, eps)


@compilable
def gate(both: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """``activation(gate) * up`` of ``both = [gate, up]``."""
    gate, up = both.chunk(2, dim=-1)
    return activation(gate) * up
