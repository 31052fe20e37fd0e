"""A linear layer for decoding: a few rows against a large weight, in the layout and precision that reads fastest."""

from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import logging

from drafters.config import Quantization
from drafters.model import backend

# Size of a weight from which oneDNN's kernel for four rows is faster than its kernel for one (4096 x 4096, two cores:
# 1.3 against 1.5 ms in bf16, 2.0 against 3.1 in float32). A single row is then multiplied four times.
LARGE = 1 << 22

# Size of a float32 weight below which the plain product is faster: a oneDNN call costs 20 us (one row, packed and
# plain: 64 x 48 27 and 3 us, 256 x 256 28 and 8 us, 1024 x 256 40 and 44 us). In bf16 both go through oneDNN.
SMALL = 1 << 18

STEPS = (15, 14, 13, 12, 11, 10, 9, 8, 16, 17, 18, 20)  # steps of int4 over the range of a group that are tried
EXPERTS = "a mixture of experts cannot be quantised here; leave quantize out"
GROUP = 32  # inputs that share a scale in int4; 64 or 128 change the output of a model of 135M parameters too much


def derived(x: Tensor) -> bool:
    """Return True if a derivative is wanted; kernels for packed weights have none."""
    return x.requires_grad and torch.is_grad_enabled()


class Product:
    """``x @ weight.T + bias`` for weights that do not change afterwards.

    On a CPU with enough memory the weight is copied once into the layout of ``backend.pack`` or of oneDNN.
    A plain product lays the weight out in every call, which may take as long as the product itself (two cores, 5 rows,
    4096 x 4096: packed is 1.7 times faster in bf16, 4 times in float32).

    Args:
        changing: number of outputs, the last ones, that ``put`` may replace. oneDNN's layout cannot be changed, so they
            stay out of it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, changing: int = 0) -> None:
        self.weight, self.bias, self.changing = weight, bias, changing
        self.quantized: Int8 | Int4 | None = None
        # The weight as the kernels of ``drafters/cpu`` read it; None if torch multiplies it.
        self.cpu_weight = backend.pack(weight.detach()) if _has_room(weight) else None
        self.packed = _onednn_layout(weight[: len(weight) - changing]) if self.cpu_weight is None else None

    def __call__(self, x: Tensor) -> Tensor:
        """``[..., inputs]`` -> ``[..., outputs]``."""
        few = self.cpu_weight is not None and x.numel() <= self.cpu_weight.most_rows * x.shape[-1] and not derived(x)
        multiply: Any = self.quantized or (self.cpu_weight if few else None)
        if multiply is not None:
            out = multiply(x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)
            return out if self.bias is None else out + self.bias
        if self.packed is None or derived(x):
            return F.linear(x, self.weight, self.bias)
        if x.numel() == x.shape[-1] and self.weight.numel() >= LARGE:
            return self._by_onednn(x.expand(4, *x.shape).reshape(4, -1))[:1].view(*x.shape[:-1], -1)
        return self._by_onednn(x)

    def _by_onednn(self, x: Tensor) -> Tensor:
        if not self.changing:
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        fixed = len(self.weight) - self.changing
        ours, theirs = (None, None) if self.bias is None else (self.bias[:fixed], self.bias[fixed:])
        first = torch.ops.mkldnn._linear_pointwise(x, self.packed, ours, "none", [], "")
        return torch.cat([first, F.linear(x, self.weight[fixed:], theirs)], dim=-1)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a call reads."""
        weights = self.weight.nbytes if self.quantized is None else self.quantized.nbytes
        return weights + (self.bias.nbytes if self.bias is not None else 0)

    def quantize(self, kind: Quantization) -> None:
        """Replace the weight by its int8 or int4 form.

        Raises:
            ValueError: int4 of a number of inputs that no group size divides.
        """
        self.quantized = Int8(self.weight) if kind == "int8" else Int4(self.weight)
        self.weight, self.cpu_weight, self.packed = self.weight.new_empty(0), self.quantized.cpu_weight, None

    def put(self, outputs: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Replace the rows ``outputs [n]``, all among the last ``changing``, by ``weight [n, inputs]``."""
        assert not isinstance(self.quantized, Int4)
        if self.quantized is not None:
            self.quantized.put(outputs, weight)
        else:
            self.weight[outputs] = weight
            if self.cpu_weight is not None:
                self.cpu_weight.put(outputs, weight)
        if self.bias is not None and bias is not None:
            self.bias[outputs] = bias


def quantize_linears(layers: nn.Module, kind: Quantization) -> list[Product]:
    """Replace the weights of the linear layers below ``layers`` by int8 or int4 forms, in place; return the products.

    Raises:
        ValueError: a mixture of experts, linear layers of another class, or sizes that int4 cannot group.
    """
    if any(".experts." in name for name, _ in layers.named_parameters()):
        raise ValueError(EXPERTS)
    linears = {name: part for name, part in layers.named_modules() if hasattr(part, "in_features")}
    other = next((type(part).__name__ for part in linears.values() if type(part) is not nn.Linear), None)
    if other or not linears:
        raise ValueError(f"it has {other or 'other'} layers in place of plain linear ones; leave quantize out")
    products = []
    for name, linear in linears.items():
        if name.endswith("dt_proj"):  # small, and Mamba 1 reads its weight without calling it
            continue
        product = Product(linear.weight.detach(), linear.bias)
        product.quantize(kind)
        linear.weight.data = linear.weight.data.new_empty(0)
        linear.forward = product
        products.append(product)
    return products


class Int8:
    """A weight as int8 with one scale for each output (symmetric, by the largest value)."""

    def __init__(self, weight: Tensor) -> None:
        self.values, self.scales = _as_int8(weight)
        self.cpu_weight = backend.pack(self.values, self.scales)
        # On a CPU it reads 16 inputs at a time. On CUDA each thread reads a whole row, which is slower than a product.
        self.kernel = self.cpu_weight is None and weight.device.type == "cpu" and weight.shape[1] % 16 == 0
        if self.cpu_weight is not None:
            self.values = self.cpu_weight.tiles
        self.nbytes = self.values.nbytes + self.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, inputs]`` -> ``[rows, outputs]``."""
        if self.cpu_weight is not None:
            return self.cpu_weight(x)
        if self.kernel:
            return torch._weight_int8pack_mm(x, self.values, self.scales)
        return F.linear(x, self.values.to(x.dtype)) * self.scales

    def put(self, outputs: Tensor, weight: Tensor) -> None:
        """Replace the rows ``outputs``."""
        values, self.scales[outputs] = _as_int8(weight)
        if self.cpu_weight is not None:
            self.cpu_weight.put(outputs, values, self.scales[outputs])
        else:
            self.values[outputs] = values


def _as_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Values ``[outputs, inputs]`` and scales ``[outputs]``."""
    # Scales are rounded to the weight's dtype first: the values are for the rounded ones.
    scales = (weight.float().abs().amax(dim=1) / 127).to(weight.dtype).clamp_min(torch.finfo(weight.dtype).tiny)
    return (weight.float() / scales.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


class Int4:
    """A weight as int4 with a scale and a middle for each group of inputs (asymmetric), fitted by ``fit_groups``.

    The layout is that of ``backend.pack``, else of torch's kernel (also used by torchao and gpt-fast). On a device, or
    for a size, without a kernel two values share a byte, and every call unpacks them, which is slow.

    Raises:
        ValueError: the number of inputs is no multiple of a group.
    """

    def __init__(self, weight: Tensor) -> None:
        outputs, inputs = weight.shape
        if inputs % GROUP:
            raise ValueError(
                f"a weight of {inputs} inputs cannot be quantised to int4: their number must be a multiple of "
                f"{GROUP}; use int8"
            )
        fitted = [fit_groups(some.float().view(len(some), -1, GROUP), weight.dtype) for some in weight.split(256)]
        values, scales, middles = (torch.cat(parts) for parts in zip(*fitted, strict=True))
        values = values.view(outputs, inputs)
        self.scales_and_zeros = torch.stack([scales.t(), middles.t()], dim=-1).contiguous()
        self.cpu_weight = backend.pack(values, scales, middles)
        self.kernel = self.cpu_weight is None and _int4_kernel(weight.device, weight.dtype, outputs, inputs)
        if self.cpu_weight is not None:
            self.values, self.scales_and_zeros = self.cpu_weight.tiles, self.scales_and_zeros.new_empty(0)
        else:
            self.values = _int4_layout(values.int()) if self.kernel else _two_a_byte(values)
        self.nbytes = self.values.nbytes + self.scales_and_zeros.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """``[rows, inputs]`` -> ``[rows, outputs]``."""
        if self.cpu_weight is not None:
            return self.cpu_weight(x)
        return self._through_kernel(x) if self.kernel else F.linear(x, self.spread(self.values))

    def _through_kernel(self, x: Tensor) -> Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm
        if x.device.type == "cpu":
            multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return multiply(x, self.values, GROUP, self.scales_and_zeros)

    def spread(self, values: Tensor) -> Tensor:
        """Unpack two values per byte: ``[outputs, inputs / 2]`` -> the weight ``[outputs, inputs]``."""
        pairs = torch.stack([values >> 4, values & 15], dim=-1).view(values.shape[0], -1, GROUP)
        scales, middles = (part.t()[..., None] for part in self.scales_and_zeros.unbind(-1))
        return ((pairs.to(scales.dtype) - 8) * scales + middles).view(values.shape[0], -1)


def fit_groups(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Sixteen equal steps for each group of inputs, with the smallest squared error found.

    Tried are steps of a part of the group's range: fewer than 15 of them span it where the weights are themselves
    from a coarser grid (of a 4-bit file, which this finds again), more cut off its ends. Then step and middle are
    fitted to the values chosen, by least squares.

    Args:
        weight: ``[outputs, groups, GROUP]`` in float32.
        dtype: dtype of the scales and middles.

    Returns:
        Values 0 to 15 ``[outputs, groups, GROUP]``, scales and middles ``[outputs, groups]``:
        ``(values - 8) * scales + middles``.
    """
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    tiny = torch.finfo(dtype).tiny
    error = torch.full_like(low, torch.inf)
    scales, middles = torch.zeros_like(low), torch.zeros_like(low)

    def choose(scale: Tensor, middle: Tensor) -> None:
        nonlocal error, scales, middles
        scale, middle = scale.to(dtype).clamp_min(tiny).float(), middle.to(dtype).float()  # as they will be kept
        off = (_steps(weight, scale, middle) * scale + middle - weight).square_().sum(-1, keepdim=True)
        better = off < error
        error, scales, middles = (
            torch.where(better, new, old) for new, old in ((off, error), (scale, scales), (middle, middles))
        )

    for steps in STEPS:
        scale = (high - low) / steps
        choose(scale, low + (8 + max(0, steps - 15) / 2) * scale)  # what is cut off is cut off at both ends
    for _ in range(2):
        chosen = _steps(weight, scales, middles)
        mean, centre = chosen.mean(-1, keepdim=True), weight.mean(-1, keepdim=True)
        spread = (chosen - mean).square().sum(-1, keepdim=True).clamp_min(tiny)
        scale = ((chosen - mean) * weight).sum(-1, keepdim=True) / spread
        choose(scale, centre - mean * scale)
    values = (_steps(weight, scales, middles) + 8).to(torch.uint8)
    return values, scales.squeeze(-1).to(dtype), middles.squeeze(-1).to(dtype)


def _steps(weight: Tensor, scale: Tensor, middle: Tensor) -> Tensor:
    """How many steps, -8 to 7, each weight is from the middle."""
    return ((weight - middle) / scale).round_().clamp_(-8, 7)


def _two_a_byte(values: Tensor) -> Tensor:
    return (values[:, ::2] << 4 | values[:, 1::2]).to(torch.uint8)


def _int4_layout(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 8)
    return torch.ops.aten._convert_weight_to_int4pack(_two_a_byte(values), 8)


@cache
def _int4_kernel(device: torch.device, dtype: torch.dtype, outputs: int, inputs: int) -> bool:
    """Whether torch multiplies int4 weights of this size there, and what comes out is right: layouts have changed."""
    probe = Int4.__new__(Int4)
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randint(0, 16, (outputs, inputs), generator=generator, device=device, dtype=torch.int32)
    shape = (inputs // GROUP, outputs, 2)
    probe.scales_and_zeros = torch.rand(shape, generator=generator, device=device).to(dtype)
    row = torch.randn(1, inputs, generator=generator, device=device).to(dtype)
    expected = F.linear(row.float(), probe.spread(_two_a_byte(values)).float())
    try:
        probe.values = _int4_layout(values)
        gap = (probe._through_kernel(row).float() - expected).abs().max()
    except RuntimeError:  # no kernel for this device, dtype or size
        return False
    return bool(gap <= 0.02 * expected.abs().max())


def draft_dtype(wanted: Quantization | None, device: torch.device) -> Quantization | None:
    """In which type what drafts is read there: ``wanted``, but as it is (None) where that would only take longer."""
    if wanted is None or device.type != "cuda":
        return wanted
    text = f"draft_dtype: {wanted} is left out, for drafting would be slower by it on {device.type}"
    logging.get_logger(__name__).warning_once(text)
    return None


def _has_room(weight: Tensor) -> bool:
    """Return True if a CPU's memory has room for a second copy of ``weight``."""
    return weight.device.type == "cpu" and 4 * weight.nbytes <= psutil.virtual_memory().available


def _onednn_layout(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout; None if there is none for it, too little memory, or it would be slower."""
    if not _has_room(weight) or not torch.backends.mkldnn.is_available() or not len(weight):
        return None
    wanted = weight.dtype == torch.float32 and weight.numel() >= SMALL
    if wanted or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
    return None
