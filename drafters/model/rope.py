"""A model's rotary angles, from a table where they do not depend on the length of the text."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.model.files import rope_depends_on_length
from drafters.model.rows import Placed

Angles = tuple[Tensor, Tensor]  # cos and sin


class Rope:
    """cos and sin by position.

    Args:
        body: the model's, with its ``rotary_emb``.
        form: what an engine makes of ``[..., D]`` angles, for its layers.

    Attributes:
        by_length: whether other angles belong to a longer text.
    """

    def __init__(self, body: Any, config: PretrainedConfig, form: Callable[[Angles], Angles]) -> None:
        self.by_length = rope_depends_on_length(config)
        self._body, self._form = body, form
        self._table: Angles | None = None

    def of(self, rotary: nn.Module, config: PretrainedConfig) -> "Rope":
        """The angles of another RoPE for layers of the same model's engine: a learned head's own."""
        body = SimpleNamespace(rotary_emb=rotary, norm=self._body.norm, embed_tokens=self._body.embed_tokens)
        return Rope(body, config, self._form)

    def __call__(self, rows: Placed) -> Angles:
        """``[B, R, ...]`` of the rows' positions."""
        if self.by_length:
            return self._form(self._body.rotary_emb(self._body.norm.weight, position_ids=rows.positions()))
        cos, sin = self.table(rows.end)
        if rows.consecutive:  # a view will do
            first = rows.end - rows.count
            return cos[first : rows.end][None], sin[first : rows.end][None]
        positions = rows.positions()
        return cos[positions], sin[positions]

    def table(self, upto: int) -> Angles:
        """``[N, ...]`` of positions 0 to N - 1, N at least ``upto``."""
        if self._table is None or self._table[0].shape[0] < upto:
            count = 1 << max(upto - 1, 255).bit_length()
            every = torch.arange(count, device=self._body.embed_tokens.weight.device)[None]
            cos, sin = self._body.rotary_emb(self._body.norm.weight, position_ids=every)
            self._table = self._form((cos[0].clone(), sin[0].clone()))
        return self._table
