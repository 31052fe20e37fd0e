"""Whole decoder layers on a CPU with AVX-512, by the kernels of cpu_layer.h."""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.cpu import kernels as cpu_kernels
from drafters.cpu.kernels import Product, Tiles
from drafters.model.cache import KVCache
from drafters.model.linear import derived
from drafters.model.rope import Angles

if TYPE_CHECKING:
    from drafters.model.fused import FusedLayer
    from drafters.model.linear import Product as Linear

WIDTHS = frozenset({32, 64, 96, 128})  # of a head
# New rows of a sequence: for more, torch's attention is as fast. SmolLM2 on two cores, whole prompts of 150, 512, 1,024
# and 2,000 tokens: torch's time over ours 1.9, 1.5, 1.3, 1.0.
LONGEST = 1024
# Rows of a batch at once: what a layer's parts hand each other stays in the cache (2,400: 1.3 times the time).
TOGETHER = 1024


class _Layer(ctypes.Structure):
    """``Layer`` of cpu_layer.h."""

    _fields_ = (
        [(name, Product) for name in ("heads", "out", "gate_up", "down")]
        + [(name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "head_norm")]
        + [(name, ctypes.c_float) for name in ("attention_eps", "mlp_eps", "head_eps", "scale")]
        + [(name, ctypes.c_int64) for name in ("hidden", "query_heads", "key_heads", "width")]
    )


class _Forward(ctypes.Structure):
    """``Forward`` of cpu_layer.h."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in ("hidden", "cos", "sin", "bias", "ends", "keys", "values", "out")
    ] + [
        (name, ctypes.c_int64)
        for name in ("batch", "rows", "angle_batch", "key_batch", "key_head", "bias_batch", "bias_row")
    ]


class CpuLayer:
    """A ``FusedLayer`` as the kernels want it.

    Attributes:
        shape: what layers that are run in one call have in common.
        alone: it alone, as one call.
    """

    def __init__(self, layer: "FusedLayer") -> None:
        attention, mlp = layer.attention, layer.mlp
        self._kept = [(tiles_of(product), product.bias) for product in layer.products]  # what the kernels point to
        products = [tiles.product(bias) for tiles, bias in self._kept if tiles is not None]
        nothing = Product(None, None, None, 0, 0, 16)
        heads = attention.head_norm
        norms = self._norms = [layer.attention_norm.weight, None if mlp is None else layer.mlp_norm.weight, heads]
        sizes = products[0].inputs, attention.query_heads, attention.key_heads, attention.head_dim
        self.native = _Layer(
            *products,
            *[nothing] * (4 - len(products)),
            *(None if norm is None else norm.data_ptr() for norm in norms),
            layer.attention_norm.eps,
            0.0 if mlp is None else layer.mlp_norm.eps,
            0.0 if heads is None else attention.eps,
            attention.scale,
            *sizes,
        )
        self.shape = *sizes, *((product.inputs, product.outputs) for product in products)
        self.alone = Stack([self])


class Stack:
    """Layers of one shape that follow each other, as one call, which spares what each call costs: an eighth of a step
    in which 270 MB of weights are read."""

    def __init__(self, layers: Sequence[CpuLayer]) -> None:
        assert len({layer.shape for layer in layers}) == 1
        loaded = cpu_kernels.library()
        assert loaded is not None
        self._run = loaded.layers
        self._layers = [layer.native for layer in layers]
        self._given = (ctypes.c_void_p * len(layers))(*map(ctypes.addressof, self._layers))

    def __call__(self, hidden: Tensor, angles: Angles, bias: Tensor | None, cache: KVCache, index: int) -> Tensor:
        """As ``FusedLayer``; the arguments are the same, ``index`` the first layer's."""
        batch, rows, _ = hidden.shape
        hidden, out = hidden.contiguous(), torch.empty_like(hidden)
        keys, values = cache.layer(index)
        some = max(TOGETHER // rows, 1)
        for start in range(0, batch, some):
            part = slice(start, start + some)
            cos, sin = (angle[part] if angle.shape[0] > 1 else angle for angle in angles)
            own = bias[part] if bias is not None and bias.shape[0] > 1 else bias
            ends, step = cache.ends[part], keys.stride(0) * cache.batch
            self._forward(hidden[part], (cos, sin), own, ends, keys[part], values[part], out[part], step)
        return out

    def _forward(
        self,
        hidden: Tensor,
        angles: Angles,
        bias: Tensor | None,
        ends: Tensor,
        keys: Tensor,
        values: Tensor,
        out: Tensor,
        step: int,
    ) -> None:
        batch, rows, _ = hidden.shape
        cos, sin = angles
        assert hidden.dtype == cos.dtype == sin.dtype == torch.bfloat16
        assert cos.stride()[-3:] == sin.stride()[-3:] == (cos.shape[-1], cos.shape[-1], 1)
        forward = _Forward(
            *(hidden.data_ptr(), cos.data_ptr(), sin.data_ptr(), None if bias is None else bias.data_ptr()),
            *(ends.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr()),
            *(batch, rows, cos.stride(0) if cos.shape[0] > 1 else 0, keys.stride(0), keys.stride(1)),
            *cpu_kernels.bias_steps(bias, hidden.dtype),
        )
        self._run(self._given, len(self._given), ctypes.byref(forward), step, torch.get_num_threads())


def fits(hidden: Tensor) -> bool:
    """Whether ``hidden [B, R, H]`` is for a layer as one call."""
    return hidden.shape[1] <= LONGEST and not derived(hidden)


def cpu_layer(layer: "FusedLayer") -> CpuLayer | None:
    """The layer as the kernels want it; None where a part of it is not for these kernels."""
    attention, mlp = layer.attention, layer.mlp
    norms = [layer.attention_norm] if mlp is None else [layer.attention_norm, layer.mlp_norm]
    if mlp is not None and (mlp.experts is not None or mlp.activation is not F.silu or norms[1].weight is None):
        return None
    if attention.head_dim not in WIDTHS or any(tiles_of(product) is None for product in layer.products):
        return None
    others = [*(norm.weight for norm in norms), attention.head_norm, *(product.bias for product in layer.products)]
    if any(other is not None and other.dtype != torch.bfloat16 for other in others):
        return None
    return CpuLayer(layer) if cpu_kernels.library() is not None else None


def tiles_of(linear: "Linear") -> Tiles | None:
    """Its weight as the kernels read it, if it is kept so."""
    own = linear.packed if linear.quantized is None else linear.quantized.tiles
    return own if isinstance(own, Tiles) else None
