"""A pass of an EAGLE head on a CPU with AVX-512, in one call: see cpu_pass.h."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from drafters.cpu import kernels as cpu_kernels
from drafters.cpu.kernels import Product
from drafters.cpu.layer import CpuLayer, tiles_of
from drafters.model.cache import KVCache
from drafters.model.clock import model_time
from drafters.model.linear import Product as Linear
from drafters.model.rope import Rope

# Of each node: places among the draft head's logits, and their probabilities.
Likeliest = tuple[list[list[int]], list[list[float]]]


class _Head(ctypes.Structure):
    """``Head`` of cpu_pass.h."""

    _fields_ = [
        ("layer", ctypes.c_void_p), ("fc", Product), ("lm_head", Product), ("embeddings", ctypes.c_void_p),
    ]  # fmt: skip


class _Pass(ctypes.Structure):
    """``Pass`` of cpu_pass.h."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in ("features", "parents", "tokens", "positions", "cos", "sin", "see", "keys", "values", "out")
        + ("probabilities", "places")
    ] + [(name, ctypes.c_int64) for name in ("rows", "committed", "before", "key_head", "judged", "ranks")]


class CpuPass:
    """A head's layer, its fc and the LM head it drafts through; all of them must outlive it.

    Args:
        layer: the head's. fc: of cat(embedding, feature). lm_head: that of drafting. embeddings: ``[V, H]``.
        rope: the angles of its layer.
    """

    def __init__(self, layer: CpuLayer, fc: Linear, lm_head: Linear, embeddings: Tensor, rope: Rope) -> None:
        loaded = cpu_kernels.library()
        assert loaded is not None
        self._run, self._rope = loaded.pass_over, rope
        # Detached: a module that is cast elsewhere takes its parameters' memory along.
        biases = [None if part.bias is None else part.bias.detach() for part in (fc, lm_head)]
        tiles, embeddings = [tiles_of(part) for part in (fc, lm_head)], embeddings.detach()
        self._kept = layer, tiles, biases, embeddings
        products = [one.product(bias) for one, bias in zip(tiles, biases, strict=True) if one is not None]
        self._head = _Head(ctypes.addressof(layer.native), *products, embeddings.data_ptr())

    def __call__(
        self,
        features: Tensor,
        parents: Sequence[int],
        tokens: Sequence[int],
        cache: KVCache,
        ranks: int,
        seen: Sequence[Sequence[int]] | None = None,
        before: int = 0,
        judged: int | None = None,
    ) -> tuple[Tensor, Likeliest]:
        """Go on from rows of ``features [n, H]``, each with the token after it.

        Args:
            parents: the row of each new one. seen: which of the ``before`` rows of this draft and of the new ones each
                sees, itself last, as numbers; None: each sees those before it.
            cache: of one sequence. ranks: how many candidates. judged: the last rows, for which these are wanted.

        Returns:
            Features ``[R, H]`` predicted at the new rows, and the likeliest tokens after the judged ones.
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
        keys, values = cache.layer(0)
        out = torch.empty(rows, features.shape[1], dtype=features.dtype)
        probabilities, places = (ctypes.c_float * (judged * ranks))(), (ctypes.c_int64 * (judged * ranks))()
        numbers = [(ctypes.c_int64 * rows)(*given) for given in (parents, tokens, positions)]
        given = _Pass(
            features.data_ptr(), *map(ctypes.addressof, numbers), cos.data_ptr(), sin.data_ptr(),
            None if see is None else ctypes.addressof(see), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            ctypes.addressof(probabilities), ctypes.addressof(places),
            rows, committed, before, keys.stride(1), judged, ranks,
        )  # fmt: skip
        with model_time():
            self._run(ctypes.byref(self._head), ctypes.byref(given), torch.get_num_threads())
        starts = range(0, judged * ranks, ranks)
        return out, ([places[at : at + ranks] for at in starts], [probabilities[at : at + ranks] for at in starts])


def cpu_pass(
    layer: CpuLayer | None, fc: Linear, lm_head: Linear | None, embed: nn.Module, rope: Rope | None
) -> CpuPass | None:
    """The pass in one call; None where a part of it is not for these kernels."""
    if layer is None or lm_head is None or type(embed) is not nn.Embedding or embed._forward_hooks:
        return None
    if rope is None or rope.by_length:
        return None
    embeddings: Tensor = embed.weight
    for part in (fc, lm_head):
        if tiles_of(part) is None or (part.bias is not None and part.bias.dtype != torch.bfloat16):
            return None
    plain = embeddings.dtype == torch.bfloat16 and embeddings.device.type == "cpu" and embeddings.is_contiguous()
    return CpuPass(layer, fc, lm_head, embeddings, rope) if plain else None
