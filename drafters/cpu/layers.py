"""Whole decoder layers in one call of the kernels of layer.h (bf16, AVX-512), and a pass of an EAGLE head, of pass.h.

``drafters/model/backend.py`` calls ``join`` and ``head_pass``. This file gets layers, products, caches and angles of
``drafters/model`` as arguments and imports them for their types only.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.cpu import kernels
from drafters.cpu.kernels import PackedProduct

if TYPE_CHECKING:
    from drafters.model.cache import KVCache
    from drafters.model.fused import FusedLayer
    from drafters.model.linear import Product
    from drafters.model.rows import Angles, Rope
    from drafters.model.runner import Part, PartLayer

HEAD_DIMS = frozenset({32, 64, 96, 128})
# New tokens of one sequence. Beyond, torch's attention is as fast: SmolLM2 on two cores, prompts of 150, 512, 1,024
# and 2,000 tokens: torch's time over ours 1.9, 1.5, 1.3, 1.0.
MOST_ROWS = 1024
# Tokens of a batch in one call, so that the activations between two products stay in the CPU's cache (with 2,400 tokens
# a call takes 1.3 times the time per token).
ROWS_PER_CALL = 1024


class _Layer(ctypes.Structure):
    """``Layer`` of layer.h."""

    _fields_ = [
        *kernels.fields(PackedProduct, "heads out gate_up down"),
        *kernels.fields(ctypes.c_void_p, "attention_norm mlp_norm head_norm"),
        *kernels.fields(ctypes.c_float, "attention_eps mlp_eps head_eps scale"),
        *kernels.fields(ctypes.c_int64, "hidden query_heads key_heads width"),
    ]


class _Forward(ctypes.Structure):
    """``Forward`` of layer.h."""

    _fields_ = [
        *kernels.fields(ctypes.c_void_p, "hidden cos sin bias ends keys values out"),
        *kernels.fields(ctypes.c_int64, "batch rows angle_batch key_batch key_head bias_batch bias_row"),
    ]


class CpuLayer:
    """The weights of a ``FusedLayer`` as the kernels read them.

    Attributes:
        native: the C structure; it points into tensors that this object references.
        shape: sizes that layers of one call must share. key_heads, head_dim: sizes of its keys.
    """

    def __init__(self, layer: "FusedLayer") -> None:
        attention, mlp = layer.attention, layer.mlp
        self._referenced = [(product.cpu_weight, product.bias) for product in layer.products]
        products = [weight.native(bias) for weight, bias in self._referenced if weight is not None]
        nothing = PackedProduct(None, None, None, 0, 0, 16)
        heads = attention.head_norm
        norms = self._norms = [layer.attention_norm.weight, None if mlp is None else layer.mlp_norm.weight, heads]
        self.key_heads, self.head_dim = attention.key_heads, attention.head_dim
        sizes = products[0].inputs, attention.query_heads, self.key_heads, self.head_dim
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


def cpu_layer(layer: Any) -> CpuLayer | None:
    """Return the layer for the kernels; None if one of its parts has another form or dtype, or is a stock layer."""
    if getattr(layer, "products", None) is None or layer.feature_norm is not None or layer.convs is not None:
        return None
    attention, mlp = layer.attention, layer.mlp
    norms = [layer.attention_norm] if mlp is None else [layer.attention_norm, layer.mlp_norm]
    if mlp is not None and (mlp.experts is not None or mlp.activation is not F.silu or norms[1].weight is None):
        return None
    if attention.head_dim not in HEAD_DIMS or any(product.cpu_weight is None for product in layer.products):
        return None
    others = [*(norm.weight for norm in norms), attention.head_norm, *(product.bias for product in layer.products)]
    if any(other is not None and other.dtype != torch.bfloat16 for other in others):
        return None
    return CpuLayer(layer)


class JoinedLayers:
    """Consecutive layers of one shape in one call.

    One call for all layers instead of one each saves an eighth of a step that reads 270 MB of weights.

    Args:
        layers: layers as an engine runs them. native: the same for the kernels.
    """

    def __init__(self, layers: "Sequence[PartLayer]", native: Sequence[CpuLayer]) -> None:
        loaded = kernels.library()
        assert loaded is not None and len({layer.shape for layer in native}) == 1
        self._run, self._layers, self._native = loaded.layers, layers, native
        self._pointers = (ctypes.c_void_p * len(native))(*(ctypes.addressof(layer.native) for layer in native))

    def __call__(
        self, hidden: Tensor, angles: "Angles", bias: Tensor | None, cache: "KVCache | None", index: int
    ) -> Tensor:
        """``[B, R, H]`` -> ``[B, R, H]``; arguments as ``FusedLayer``'s, ``index`` is the first layer's."""
        batch, rows, _ = hidden.shape
        if rows > MOST_ROWS or (hidden.requires_grad and torch.is_grad_enabled()):  # the kernels have no gradient
            for number, layer in enumerate(self._layers):
                hidden = layer.layer(hidden, angles, bias, cache, index + number)
            return hidden
        hidden, out = hidden.contiguous(), torch.empty_like(hidden)
        if cache is not None:
            keys, values = cache.keys[index], cache.values[index]
            ends, step = cache.ends, keys.stride(0) * cache.batch
        else:  # every layer overwrites the keys and values of the layer before it
            sizes = self._native[0]
            keys, values = hidden.new_empty(2, batch, sizes.key_heads, rows, sizes.head_dim)
            ends, step = torch.full((batch,), rows), 0
        some = max(ROWS_PER_CALL // rows, 1)
        for start in range(0, batch, some):
            part = slice(start, start + some)
            cos, sin = (angle[part] if angle.shape[0] > 1 else angle for angle in angles)
            added = bias[part] if bias is not None and bias.shape[0] > 1 else bias
            assert hidden.dtype == cos.dtype == sin.dtype == torch.bfloat16
            assert cos.stride()[-3:] == sin.stride()[-3:] == (cos.shape[-1], cos.shape[-1], 1)
            forward = _Forward(
                *(hidden[part].data_ptr(), cos.data_ptr(), sin.data_ptr(), None if added is None else added.data_ptr()),
                *(states[part].data_ptr() for states in (ends, keys, values, out)),
                *(len(hidden[part]), rows, cos.stride(0) if cos.shape[0] > 1 else 0, keys.stride(0), keys.stride(1)),
                *kernels.bias_strides(added, hidden.dtype),
            )
            self._run(self._pointers, len(self._pointers), ctypes.byref(forward), step, torch.get_num_threads())
        return out


def join(layers: "Sequence[PartLayer]", taps: tuple[int, ...]) -> "list[PartLayer]":
    """Replace every run of consecutive layers of one shape, without a tap between them, by one ``JoinedLayers``."""
    runs: list[list[tuple[PartLayer, CpuLayer | None]]] = []
    for layer in layers:
        packed = cpu_layer(layer.layer)
        if runs:
            before, other = runs[-1][-1]
            follows = layer[1:] == (before.number + 1, *before[2:]) and layer.number not in taps
            if follows and packed is not None and other is not None and packed.shape == other.shape:
                runs[-1].append((layer, packed))
                continue
        runs.append([(layer, packed)])
    joined = []
    for run in runs:
        native = [packed for _, packed in run if packed is not None]
        first = run[0][0]
        joined.append(first._replace(layer=JoinedLayers([layer for layer, _ in run], native)) if native else first)
    return joined


class _Head(ctypes.Structure):
    """``Head`` of pass.h."""

    _fields_ = [
        ("layer", ctypes.c_void_p),
        *kernels.fields(PackedProduct, "fc lm_head"),
        ("embeddings", ctypes.c_void_p),
    ]


class _Pass(ctypes.Structure):
    """``Pass`` of pass.h."""

    _fields_ = [
        *kernels.fields(ctypes.c_void_p, "features parents tokens positions cos sin see keys values out"),
        *kernels.fields(ctypes.c_void_p, "probabilities places"),
        *kernels.fields(ctypes.c_int64, "rows committed before key_head judged ranks"),
    ]


class HeadPass:
    """A pass of an EAGLE head over a few nodes of one sequence's draft: fc, decoder layer, LM head and top ranks."""

    def __init__(self, layer: CpuLayer, fc: "Product", lm_head: "Product", embeddings: Tensor, rope: "Rope") -> None:
        loaded = kernels.library()
        assert loaded is not None and fc.cpu_weight is not None and lm_head.cpu_weight is not None
        self._run, self._rope = loaded.pass_over, rope
        # Detached: a module that is cast to another dtype replaces the memory of its parameters.
        biases = [None if part.bias is None else part.bias.detach() for part in (fc, lm_head)]
        weights, embeddings = (fc.cpu_weight, lm_head.cpu_weight), embeddings.detach()
        self._referenced = layer, weights, biases, embeddings
        products = [weight.native(bias) for weight, bias in zip(weights, biases, strict=True)]
        self._head = _Head(ctypes.addressof(layer.native), *products, embeddings.data_ptr())

    def __call__(
        self,
        features: Tensor,
        parents: Sequence[int],
        tokens: Sequence[int],
        cache: "KVCache",
        ranks: int,
        seen: Sequence[Sequence[int]] | None = None,
        before: int = 0,
        judged: int | None = None,
    ) -> tuple[Tensor, list[list[int]], list[list[float]]]:
        """Run R new nodes, each a token and the feature of its parent.

        Args:
            features: ``[n, H]``. parents: row of ``features`` for each new node.
            tokens: token of each new node. cache: cache of the head, of one sequence.
            seen: numbers of the nodes that each new one attends to, itself last, counted from the first uncommitted
                one; None: all before it. before: uncommitted nodes that earlier calls wrote.
            judged: number of last nodes whose candidates are wanted; None: all. ranks: candidates for each.

        Returns:
            Predicted features ``[R, H]``; for each judged node the places of its likeliest candidates among the LM
            head's logits, and their probabilities.
        """
        rows, committed, judged = len(tokens), cache.lengths[0], judged or len(tokens)
        end = committed + before + rows
        assert end <= cache.capacity, f"cache of {cache.capacity} rows asked for {end}"
        assert features.is_contiguous() and features.dtype == torch.bfloat16
        see = None
        if seen is None:
            positions = range(committed + before, end)
        else:
            positions = [committed + len(others) - 1 for others in seen]  # type: ignore[assignment]
            see = (ctypes.c_uint8 * (rows * (before + rows)))()
            for row, others in enumerate(seen):
                for other in others:
                    see[row * (before + rows) + other] = 1
        cos, sin = self._rope.table(end)
        keys, values = cache.keys[0], cache.values[0]
        out = torch.empty(rows, features.shape[1], dtype=features.dtype)
        probabilities, places = (ctypes.c_float * (judged * ranks))(), (ctypes.c_int64 * (judged * ranks))()
        numbers = [(ctypes.c_int64 * rows)(*each) for each in (parents, tokens, positions)]
        arguments = _Pass(
            *(features.data_ptr(), *map(ctypes.addressof, numbers), cos.data_ptr(), sin.data_ptr()),
            *(None if see is None else ctypes.addressof(see), keys.data_ptr(), values.data_ptr(), out.data_ptr()),
            *(ctypes.addressof(probabilities), ctypes.addressof(places)),
            *(rows, committed, before, keys.stride(1), judged, ranks),
        )
        self._run(ctypes.byref(self._head), ctypes.byref(arguments), torch.get_num_threads())
        starts = range(0, judged * ranks, ranks)
        return out, [places[at : at + ranks] for at in starts], [probabilities[at : at + ranks] for at in starts]


def head_pass(part: "Part", fc: Any, lm_head: Any, embeddings: Tensor) -> HeadPass | None:
    """Return the pass of a head in one call; None if one of its parts is not for these kernels."""
    layer, rope = cpu_layer(part.layers[0].layer), part.rope
    if layer is None or len(part.layers) != 1 or rope is None or rope.by_length:
        return None
    for product in (fc, lm_head):
        weight, bias = getattr(product, "cpu_weight", None), product.bias
        if weight is None or (bias is not None and bias.dtype != torch.bfloat16):
            return None
    fits = embeddings.dtype == torch.bfloat16 and embeddings.device.type == "cpu" and embeddings.is_contiguous()
    return HeadPass(layer, fc, lm_head, embeddings, rope) if fits else None
