"""Candidates of an LM head: the exact logits of the k tokens that a low-rank product ranks first.

A draft needs the likeliest tokens, not all logits. With A ``[W, r]`` and C ``[r, H]``, z = A C h approximates the
logits of an input h of the LM head. The k rows of the LM head with the largest z are multiplied exactly. A draft is
drawn from, and verified against, the distribution q over these k tokens: sampling stays lossless with any pair.

``train/tools/candidates.py`` fits a pair and writes it into a checkpoint.
"""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from drafters.config import Config, Vocabulary
from drafters.model.draft_head import DraftHead
from drafters.model.fingerprint import digest, samples_of
from drafters.model.linear import Product, draft_dtype
from drafters.model.runner import model_time

# A pair's tensors in a checkpoint: A, C, and the fingerprint of its LM head as int64.
TENSORS = ("candidates_a", "candidates_c", "candidates_lm_head")
AGAIN = "fit it again: python -m train.tools.candidates --checkpoint FOLDER --features STORE"


class CandidateOptions(Config):
    """``candidates``: number of tokens that a draft scores, chosen by the checkpoint's pair; null: all."""

    candidates: Vocabulary | None = Field(default=None, ge=1)


def add_pair(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give the module the tensors of a pair that ``weights`` have, so that they are loaded and saved with it."""
    for name in TENSORS:
        if name in weights:
            module.register_buffer(name, torch.zeros_like(weights[name]))


def without_pair(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights except for those of a pair."""
    return {name: value for name, value in weights.items() if name not in TENSORS}


def head_fingerprint(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a hash of an LM head as an int64 scalar; the same for every dtype that it is loaded in."""
    parts = [(name, part) for name, part in (("weight", weight), ("bias", bias)) if part is not None]
    number = digest(parts, samples_of([tuple(weight.shape)]))
    return torch.tensor(int.from_bytes(bytes.fromhex(number), "big", signed=True))


class Candidates:
    """A pair in use: the inputs of an LM head -> the logits of ``count`` candidates, and their rows.

    Args:
        a: ``[W, r]``. c: ``[r, H]``. weight: ``[W, H]``, the LM head's. bias: ``[W]``. dtype: A is read in it.

    Attributes:
        inner: the product with C.
    """

    def __init__(
        self,
        a: Tensor,
        c: Tensor,
        count: int,
        weight: Tensor,
        bias: Tensor | None = None,
        dtype: Literal["int8"] | None = None,
    ) -> None:
        self.count, self._weight, self._bias = count, weight, bias
        self.inner, self._outer = Product(c.to(weight)), Product(a.to(weight), bias)
        if (quantization := draft_dtype(dtype, weight.device)) is not None:
            self._outer.quantize(quantization)

    def reads_less(self, inputs: Tensor) -> bool:
        """Return True if the inputs ``[..., H]`` have fewer candidates than the LM head has rows."""
        return inputs[..., 0].numel() * self.count < len(self._weight)

    def __call__(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """``[..., H]`` -> logits ``[..., k]`` and rows ``[..., k]``."""
        with model_time():
            rows = self._outer(self.inner(inputs)).topk(self.count, dim=-1, sorted=False).indices
            weight = torch.nn.functional.embedding(rows, self._weight)  # on a CPU twice as fast as indexing
            logits = (weight @ inputs[..., None])[..., 0]
            return (logits if self._bias is None else logits + self._bias[rows]), rows


def with_candidates(head: DraftHead, module: nn.Module, options: Any) -> DraftHead:
    """Let ``head`` draft with candidates, if the ``options`` say so; the pair is the module's.

    Raises:
        ValueError: there is no pair, it does not fit the LM head or is one of another, there are fewer tokens than
            candidates, or ``draft_vocab`` is set too.
    """
    count: int | None = options.candidates
    if count is None:
        return head
    weight, bias = (None if part is None else part.to(head.model.device) for part in head.whole_head)
    assert weight is not None
    rows, width = weight.shape
    pair: list[Any] = [getattr(module, name, None) for name in TENSORS]
    if any(part is None for part in pair):
        missing = TENSORS[pair.index(None)]
        raise ValueError(
            f"candidates is {count:,}, and the checkpoint has no pair for it ({missing}); set it to null, or {AGAIN}"
        )
    if getattr(options, "draft_vocab", None) is not None:
        raise ValueError(f"candidates is {count:,} and draft_vocab {options.draft_vocab:,}; set one of them to null")
    a, c, fingerprint = pair
    sizes, rank = [list(part.shape) for part in (a, c)], len(c)
    if sizes != [[rows, rank], [rank, width]] or rank > width:
        raise ValueError(
            f"{TENSORS[0]} and {TENSORS[1]} have the shapes {sizes[0]} and {sizes[1]}, and the LM head needs "
            f"[{rows}, r] and [r, {width}] with r of at most {width}; {AGAIN}"
        )
    if count > rows:
        raise ValueError(f"candidates is {count:,}, more than the LM head's {rows:,} tokens; set it to a few hundred")
    if int(fingerprint) != int(head_fingerprint(weight, bias)):
        raise ValueError(f"the pair of candidates is of another LM head than the drafter's; {AGAIN}")
    head.candidates, head.width = Candidates(a, c, count, weight, bias, head.dtype), count
    return head
