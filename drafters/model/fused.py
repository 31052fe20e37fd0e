"""Decoder layers rewritten for decoding: transformers' weights, a third of its operations.

One token's hidden state passes through some sixty operations in a stock layer, and each costs more to start than to
compute. Here queries, keys and values are one product, as are gate and up; RoPE turns queries and keys together; and
query heads that share a key head attend as rows of it, so that grouped heads need no copy of the cache.

The weights are not copied: the stock layer's projections become views of the joined ones (but see linear.py for CPUs).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from drafters.config import Quantization
from drafters.model import backend
from drafters.model.cache import KVCache, StorageRows
from drafters.model.elementwise import add_norm, gate, rotate, softmax
from drafters.model.linear import EXPERTS, Product
from drafters.model.loading import has_hooks
from drafters.model.rows import Angles

# Families whose layers are exactly norm, attention, norm, MLP with RoPE over whole heads.
FAMILIES = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
# Queries of all heads and sequences up to which matrix products attend faster on CUDA than torch's kernel, which gives
# each head one multiprocessor. H200, 32 heads, 1280 keys: 1 token 24 and 55 us, 60 tokens 44 and 63, 104 tokens 84
# and 64.
FEW_QUERIES = 2048


def why_not(layer: nn.Module, config: PretrainedConfig) -> str | None:
    """None for a layer that can be rewritten, else the reason why not."""
    if config.model_type not in FAMILIES:
        return f"model_type {config.model_type!r} is not one of {', '.join(sorted(FAMILIES))}"
    if config._attn_implementation != "sdpa":
        return f"its attention implementation is {config._attn_implementation!r}, not 'sdpa'"
    if has_hooks(layer):
        return "hooks are set on its layers"
    attention: Any = layer.self_attn
    linears = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    if hasattr(layer, "mlp") and hasattr(layer.mlp, "gate_proj"):
        linears += [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]  # type: ignore[union-attr]
    other = next((type(linear).__name__ for linear in linears if type(linear) is not nn.Linear), None)
    return f"it has {other} layers in place of plain linear ones" if other else None


def signed(angles: Angles) -> Angles:
    """cos and sin ``[..., D]`` -> ``[..., 1, D]`` with the sign of ``rotate_half`` moved into the sines."""
    cos, sin = angles
    half = sin.shape[-1] // 2
    return cos[..., None, :], torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)[..., None, :]


class FusedNorm:
    """RMSNorm; nothing at all for a layer that has none (EAGLE's first)."""

    def __init__(self, norm: Any) -> None:
        self.weight = norm.weight if not isinstance(norm, nn.Identity) else None
        self.eps = norm.variance_epsilon if self.weight is not None else 0.0

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., H]``."""
        return hidden if self.weight is None else F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class FusedAttention:
    """Self-attention of a stock layer, over a ``KVCache`` or among the new tokens."""

    def __init__(self, attention: Any) -> None:
        self.heads = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = Product(attention.o_proj.weight, attention.o_proj.bias)
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.query_heads = attention.q_proj.out_features // self.head_dim
        self.key_heads = attention.k_proj.out_features // self.head_dim
        self.groups = self.query_heads // self.key_heads
        self.few = backend.attention(attention.q_proj.weight, self.head_dim, self.groups)
        self.head_norm: Tensor | None = None
        self.eps = 0.0
        if hasattr(attention, "q_norm"):  # Qwen3: over each head, before RoPE
            self.eps = attention.q_norm.variance_epsilon
            norms = [attention.q_norm.weight] * self.query_heads + [attention.k_norm.weight] * self.key_heads
            self.head_norm = torch.stack(norms)

    def __call__(
        self, hidden: Tensor, angles: Angles, bias: Tensor | None, cache: KVCache | None, index: int
    ) -> Tensor:
        """``[B, R, H]`` -> ``[B, R, H]``.

        Args:
            angles: angles of the tokens' positions, ``signed``.
            bias: bias of the tokens (``Placed.bias``), for ``groups``; None: each sees all up to itself.
            cache: cache directed at the tokens' slots (``KVCache.at``); None attends within the tokens.
            index: number of the cache's layer.
        """
        batch, rows, _ = hidden.shape
        heads = self.heads(hidden).view(batch, rows, -1, self.head_dim)
        turned, values = heads.split_with_sizes((self.query_heads + self.key_heads, self.key_heads), dim=2)
        turned = rotate(turned, *angles, self.head_norm, self.eps)
        queries, keys = turned.split_with_sizes((self.query_heads, self.key_heads), dim=2)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, index)
            if self.few is not None and rows <= self.few.rows and isinstance(cache, KVCache):
                attended = self.few(queries, keys, values, bias, cache.ends, self.scale)
                return self.out(attended.view(batch, rows, -1))
        queries = queries.transpose(1, 2)
        if bias is None and rows > 1:
            attended = self._prompt(queries, keys, values)
        else:
            queries = queries.reshape(batch, self.key_heads, self.groups * rows, self.head_dim)
            captured = queries.is_cuda and isinstance(cache, StorageRows)  # elsewhere each operation costs a launch
            if captured and batch * rows * self.query_heads <= FEW_QUERIES:
                attended = attend_by_products(queries, keys, values, bias, self.scale)
            else:
                attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=self.scale)
            attended = attended.reshape(batch, self.query_heads, rows, self.head_dim)
        return self.out(attended.transpose(1, 2).reshape(batch, rows, -1))

    def _prompt(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Causal attention of a block with nothing before it: long, so through the kernel made for that."""
        grouped = self.groups > 1
        if grouped and queries.device.type == "cpu":  # whose kernels take no groups, and would not use one at all
            keys, values = (x.repeat_interleave(self.groups, dim=1) for x in (keys, values))
            grouped = False
        return F.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, scale=self.scale, enable_gqa=grouped
        )


def attend_by_products(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of ``queries [B, heads, R, D]`` over ``keys`` and ``values [B, heads, S, D]``; scores in float32."""
    wide: Any = {} if queries.dtype == torch.float32 else {"out_dtype": torch.float32}
    scores = torch.bmm(queries.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), **wide)
    return softmax(scores.view(*queries.shape[:3], -1), scale, bias, values.dtype) @ values


class FusedMLP:
    """The gated MLP of a stock layer; a mixture of experts is called as it is."""

    def __init__(self, mlp: Any) -> None:
        self.experts = None if hasattr(mlp, "gate_proj") else mlp
        if self.experts is None:
            self.gate_up = _join([mlp.gate_proj, mlp.up_proj])
            self.down = Product(mlp.down_proj.weight, mlp.down_proj.bias)
            self.activation = F.silu if isinstance(mlp.act_fn, type(ACT2FN["silu"])) else mlp.act_fn

    def __call__(self, hidden: Tensor) -> Tensor:
        """``[B, R, H]`` -> ``[B, R, H]``."""
        if self.experts is not None:
            return self.experts(hidden)
        return self.down(gate(self.gate_up(hidden), self.activation))


class FusedLayer:
    """A decoder layer: ``h + attention(norm(h))``, then, if it has an MLP, ``h + mlp(norm(h))``.

    EAGLE-3's first layer takes ``[B, R, 2 H]``, an embedding e beside h: ``h + attention(norm(e), feature_norm(h))``.

    DFlash2's layers have convolutions around attention and MLP, over the new tokens: one block of each sequence.

    ``products``: its linear layers, a mixture's experts and convolutions apart.
    """

    def __init__(self, layer: Any) -> None:
        self.feature_norm = FusedNorm(layer.hidden_norm) if hasattr(layer, "hidden_norm") else None
        self.normed_residual: bool = getattr(layer, "normed_residual", False)
        self.attention_norm, self.attention = FusedNorm(layer.input_layernorm), FusedAttention(layer.self_attn)
        self.groups = self.attention.groups
        self.few_rows = 0 if self.attention.few is None else self.attention.few.rows
        self.mlp: FusedMLP | None = None
        if hasattr(layer, "mlp"):
            self.mlp_norm, self.mlp = FusedNorm(layer.post_attention_layernorm), FusedMLP(layer.mlp)
        self.convs = (layer.attention_conv, layer.mlp_conv) if hasattr(layer, "attention_conv") else None
        self.products = [self.attention.heads, self.attention.out]
        if self.mlp is not None and self.mlp.experts is None:
            self.products += [self.mlp.gate_up, self.mlp.down]

    def __call__(
        self, hidden: Tensor, angles: Angles, bias: Tensor | None, cache: KVCache | None, index: int
    ) -> Tensor:
        """``[B, R, H]`` -> ``[B, R, H]``; the arguments are ``FusedAttention``'s."""
        if self.feature_norm is None:
            normed = self.attention_norm(hidden)
        else:
            embedding, hidden = hidden.chunk(2, dim=-1)
            features = self.feature_norm(hidden)
            normed = torch.cat([self.attention_norm(embedding), features], dim=-1)
            hidden = features if self.normed_residual else hidden
        if self.convs is not None:
            assert self.mlp is not None
            around_attention, around_mlp = self.convs
            hidden = hidden + around_attention(normed, lambda rows: self.attention(rows, angles, bias, cache, index))
            return hidden + around_mlp(self.mlp_norm(hidden), self.mlp)
        attended = self.attention(normed, angles, bias, cache, index)
        if self.mlp is None:
            return hidden + attended
        hidden, normed = add_norm(hidden, attended, self.mlp_norm.weight, self.mlp_norm.eps)
        return hidden + self.mlp(normed)

    def quantize(self, layer: Any, kind: Quantization) -> None:
        """Quantise the projections and take their weights from the stock ``layer``, which cannot run any more.

        Raises:
            ValueError: a mixture of experts, or sizes that int4 cannot group.
        """
        if self.mlp is None or self.mlp.experts is not None:
            raise ValueError(EXPERTS)
        self.quantize_products(kind)
        for module in (*layer.self_attn.children(), *layer.mlp.children()):
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.new_empty(0)

    def quantize_products(self, kind: Quantization) -> None:
        """Read the projections in ``kind``; the stock layer keeps its weights."""
        for product in self.products:
            product.quantize(kind)


def _join(linears: list[nn.Linear]) -> Product:
    """Linear layers one above the other as one product; their weights become views of its."""
    weights = _adjoin([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    return Product(weights, _adjoin(biases) if biases else None)


@torch.no_grad()
def _adjoin(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat(parts)``, with the parts made views of it; if they already are, the whole they are views of."""
    base, end = parts[0], parts[0].storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() and part.is_contiguous()
        if not same or part.storage_offset() != end:
            break
        end += part.numel()
    else:
        return base.as_strided((sum(part.shape[0] for part in parts), *base.shape[1:]), base.stride())
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, joined.split([part.shape[0] for part in parts]), strict=True):
        part.data = view
    return joined
