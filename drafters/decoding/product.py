"""A linear layer for decoding: a few rows against a large weight, in the layout and precision that reads fastest."""

import psutil
import torch
from torch.nn import functional as F

# Weights from here on are read faster by the CPU's kernel for four rows than by its own for one (4096 x 4096 on two
# cores: 1.3 against 1.5 ms in bf16, 2.0 against 3.1 in float32), so a single row is multiplied four times over.
LARGE = 1 << 22


class Product:
    """``x @ weight.T + bias``; the weights must not change afterwards.

    On a CPU the weight is laid out once more for its kernels, where memory allows it: a plain product does so again in
    every call, which may take as long as the product itself (two cores, 5 rows, 4096 x 4096: 1.7 times faster in bf16,
    4 times in float32).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.packed = _pack(weight)
        self.scales: torch.Tensor | None = None
        self._kernel = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` -> ``[..., outputs]``."""
        if self.scales is not None:
            return self._quantized(x, self.scales)
        if self.packed is None or (x.requires_grad and torch.is_grad_enabled()):  # the kernel has no derivative
            return F.linear(x, self.weight, self.bias)
        if x.numel() == x.shape[-1] and self.weight.numel() >= LARGE:
            return self._multiply(x.expand(4, *x.shape).reshape(4, -1))[:1].view(*x.shape[:-1], -1)
        return self._multiply(x)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    @property
    def nbytes(self) -> int:
        """Bytes that a call reads of it."""
        parts = [self.weight, self.bias, self.scales]
        return sum(part.nbytes for part in parts if part is not None)

    def quantize(self) -> None:
        """Keep the weight as int8 alone, with one scale an output (symmetric, by the largest value)."""
        scales = self.weight.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        dtype = self.weight.dtype
        self.weight = (self.weight.float() / scales[:, None]).round_().to(torch.int8)
        self.scales, self.packed = scales.to(dtype), None
        try:
            row = torch.zeros(1, self.weight.shape[1], dtype=dtype, device=self.weight.device)
            torch._weight_int8pack_mm(row, self.weight, self.scales)
        except (RuntimeError, NotImplementedError):  # torch has no such kernel for this device or these sizes
            self._kernel = False

    def _quantized(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if self._kernel:
            flat = x.reshape(-1, x.shape[-1])
            out = torch._weight_int8pack_mm(flat, self.weight, scales).view(*x.shape[:-1], -1)
        else:
            out = F.linear(x, self.weight.to(x.dtype)) * scales
        return out if self.bias is None else out + self.bias


def _pack(weight: torch.Tensor) -> torch.Tensor | None:
    """The weight in the layout of the CPU's kernels; None where there is no such layout or too little memory."""
    ready = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if not ready or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if 4 * weight.nbytes > psutil.virtual_memory().available:
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
