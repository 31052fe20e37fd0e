"""The attention mask and positions of the new tokens of a forward; biases and cache slots are derived from them.

The committed slots of a cache are followed by T = ``offset + R`` uncommitted ones: those that earlier forwards of the
step wrote, and those of the R new tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.model.files import rope_depends_on_length

Angles = tuple[Tensor, Tensor]  # cos and sin


class Rows(NamedTuple):
    """The new tokens of a forward; by default a chain.

    Attributes:
        see: bool ``[B or 1, R, offset + R]``: uncommitted tokens that each new one attends to, itself included (it
            also sees all committed ones); None: those before it.
        depths: ``[B or 1, offset + R]``: positions of the uncommitted tokens, counted from the cache's length; None:
            one after the other.
        offset: uncommitted tokens that earlier calls of this step wrote.
    """

    see: Tensor | None = None
    depths: Tensor | None = None
    offset: int = 0


CHAIN = Rows()


class Scope(NamedTuple):
    """Which tokens a layer attends to: all, those less than ``window`` back, or those of its own ``chunk``.

    ``anchored``: all new rows see ``window`` tokens before the first of them. ``causal``: none sees a later one.
    """

    window: int | None = None
    chunk: int | None = None
    anchored: bool = False
    causal: bool = False

    def hides_none(self, end: int) -> bool:
        """Return True if rows up to ``end`` see one another."""
        return not self.causal and all(size is None or end <= size for size in (self.window, self.chunk))

    def of(self, positions: Tensor, keys: Tensor) -> Tensor:
        """Bool ``[B, R or 1, S]``: which keys at ``keys [B, S]`` tokens at ``positions [B, R]`` attend to."""
        if self.window is not None:
            first, keys = positions[:, :1, None], keys[:, None]
            near = first - keys <= self.window if self.anchored else positions[:, :, None] - keys < self.window
            return near & (keys <= positions[:, :, None]) if self.causal else near
        assert self.chunk is not None
        return positions[:, :, None] // self.chunk == keys[:, None] // self.chunk


EVERYTHING = Scope()


class Placed:
    """``count`` new tokens after ``lengths[b]`` committed ones of each sequence.

    Attributes:
        see, depths, offset: fields of ``rows``; the depths of a chain, too.
        uniform: True if all sequences have the same length; then nothing is copied to the device, or waited for.
        is_prompt: True for a chain with nothing before it.
        end: tokens of the longest sequence, the new ones included.
    """

    def __init__(
        self, rows: Rows, lengths: list[int], count: int, device: torch.device, dropped: list[int] | None = None
    ) -> None:
        self.see, depths, self.offset = rows
        self.dropped = dropped if dropped and any(dropped) else None
        self.depths = torch.arange(rows.offset + count, device=device)[None] if depths is None else depths
        self.lengths, self.count, self.device = lengths, count, device
        self.uniform = lengths.count(lengths[0]) == len(lengths)
        self.is_prompt = rows is CHAIN and not any(lengths)
        self.end = max(lengths) + self.offset + count

    def positions(self) -> Tensor:
        """``[B, R]``."""
        depths = self.depths[:, self.offset :]
        first = self.lengths[0] if self.uniform else self._lengths()[:, None]
        return (first + depths).expand(len(self.lengths), -1)

    def text_positions(self) -> Tensor:
        """``[B, R]`` in the text, of which the cache may have dropped the beginning."""
        if self.dropped is None:
            return self.positions()
        return self.positions() + torch.tensor(self.dropped, device=self.device)[:, None]

    def mask(self, scope: Scope = EVERYTHING, always: bool = False) -> Tensor | None:
        """Bool ``[B or 1, 1, R, end]``; None where attention needs none: one token that sees everything, or a causal
        block with nothing before it.

        ``scope``: other keys are hidden. ``always``: no None.
        """
        limited, see = not scope.hides_none(self.end), self.see
        if see is None:
            if self.uniform and (self.count == 1 or self.end == self.count) and not limited and not always:
                return None
            see = torch.ones(self.count, self.offset + self.count, dtype=torch.bool, device=self.device)
            see = see.tril(self.offset)[None]
        if self.uniform:
            mask = nn.functional.pad(see, (self.lengths[0], 0), value=True)
        else:
            mask = visible(self._lengths(), see, self.end)
        if limited:
            depths = self.depths.expand(len(self.lengths), -1)
            mask = mask & scope.of(self.positions(), key_positions(self._lengths(), depths, self.end))
        return mask[:, None]

    def bias(self, scope: Scope, groups: int, dtype: torch.dtype, causal: bool = False) -> Tensor | None:
        """``mask`` as values to add to the scores: ``[B or 1, 1, groups * R, end]`` or None.

        The R tokens are repeated once for each of the ``groups`` query heads that share a key head. ``causal``:
        attention needs none for tokens that see all before them.
        """
        if causal and self.see is None and scope.hides_none(self.end):
            return None
        mask = self.mask(scope)
        return None if mask is None else additive(mask, groups, dtype, float("-inf"))

    def _lengths(self) -> Tensor:
        if self.uniform:
            return torch.full((len(self.lengths),), self.lengths[0], device=self.device)
        return torch.tensor(self.lengths, device=self.device)


class Rope:
    """cos and sin by position.

    Args:
        rotary: a model's module for them. config: its configuration.
        form: engine's form of ``[..., D]`` angles, for its layers.
        like: weight whose dtype and device they have.

    Attributes:
        by_length: whether other angles belong to a longer text.
    """

    def __init__(
        self, rotary: nn.Module, config: PretrainedConfig, form: Callable[[Angles], Angles], like: Tensor
    ) -> None:
        self.by_length = rope_depends_on_length(config)
        self._rotary, self._form, self._like = rotary, form, like
        self._table: Angles | None = None

    def __call__(self, rows: "Placed | BufferedRows") -> Angles:
        """``[B, R, ...]`` at the tokens' positions."""
        positions = rows.text_positions()
        if self.by_length:
            return self._form(self._rotary(self._like, position_ids=positions))
        dropped = rows.dropped if isinstance(rows, Placed) else None  # the table of a captured forward is long enough
        cos, sin = self.table(rows.end + max(dropped or [0]))
        return cos[positions], sin[positions]

    def table(self, upto: int) -> Angles:
        """``[N, ...]`` of positions 0 to N - 1, N at least ``upto``."""
        if self._table is None or self._table[0].shape[0] < upto:
            count = 1 << max(upto - 1, 255).bit_length()
            every = torch.arange(count, device=self._like.device)[None]
            angles = self._rotary(self._like, position_ids=every)
            if not isinstance(angles, tuple):
                raise ValueError("its RoPE gives no cos and sin; use a head with a Llama layer")
            self._table = self._form((angles[0][0].clone(), angles[1][0].clone()))
        return self._table


class BufferedRows:
    """R tokens (padded) over T uncommitted ones, in buffers that never move: filled before a captured forward is
    replayed, and read inside of it. Its methods are those of ``Placed``.

    Attributes:
        lengths, offset: numbers of committed tokens ``[B]``, and of uncommitted tokens before the new ones ``[]``.
        dropped: ``[B]`` number of tokens before those of the cache.
        depths: ``[B, T]`` depths of the uncommitted tokens. see: ``[B, R, T]`` which of them each new token sees.
        end: cache slots that attention reads.
    """

    is_prompt = False

    def __init__(self, batch: int, count: int, uncommitted: int, end: int, device: torch.device) -> None:
        self.count, self.end, self.device = count, end, device
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)
        self.dropped = torch.zeros(batch, dtype=torch.long, device=device)
        self.offset = torch.zeros((), dtype=torch.long, device=device)
        self.depths = torch.zeros(batch, uncommitted, dtype=torch.long, device=device)
        self.see = torch.zeros(batch, count, uncommitted, dtype=torch.bool, device=device)

    def fill(self, rows: Placed) -> None:
        """Put a step's values into the buffers."""
        if rows.uniform:
            self.lengths.fill_(rows.lengths[0])
        else:
            known = torch.tensor(rows.lengths, pin_memory=self.lengths.is_cuda)
            self.lengths.copy_(known, non_blocking=True)
        if rows.dropped is None:
            self.dropped.zero_()
        else:
            self.dropped.copy_(torch.tensor(rows.dropped, pin_memory=self.lengths.is_cuda), non_blocking=True)
        self.offset.fill_(rows.offset)
        order = torch.arange(self.see.shape[2], device=self.device)
        indices = (rows.offset + torch.arange(self.count, device=self.device))[:, None]
        # A token of padding needs to see only itself; a token of a chain sees all before it.
        if rows.see is None:
            self.see.copy_(order[None] <= indices)
        else:
            self.see.copy_(order[None] == indices)
            self.see[:, : rows.count, : rows.see.shape[2]].copy_(rows.see)
        self.depths.copy_(order)
        self.depths[:, : rows.depths.shape[1]].copy_(rows.depths)

    def slots(self) -> Tensor:
        """``[B, R]`` where the new tokens' keys and values go."""
        return self.lengths[:, None] + self.offset + torch.arange(self.count, device=self.device)

    def positions(self) -> Tensor:
        """``[B, R]``."""
        indices = (self.offset + torch.arange(self.count, device=self.device)).clamp_max(self.depths.shape[1] - 1)
        return self.lengths[:, None] + self.depths[:, indices]

    def text_positions(self) -> Tensor:
        """``[B, R]`` in the text; the cache may have dropped its first tokens."""
        return self.positions() + self.dropped[:, None]

    def mask(self, scope: Scope = EVERYTHING, always: bool = True) -> Tensor:
        """Bool ``[B, 1, R, end]``; never None, because lengths are not known on the host."""
        mask = visible(self.lengths, self.see, self.end)
        if scope != EVERYTHING:
            mask = mask & scope.of(self.positions(), key_positions(self.lengths, self.depths, self.end))
        return mask[:, None]

    def bias(self, scope: Scope, groups: int, dtype: torch.dtype, causal: bool = False) -> Tensor:
        """``mask`` as values to add to the scores: ``[B, 1, groups * R, end]``."""
        return additive(self.mask(scope), groups, dtype, float("-inf"))


def visible(lengths: Tensor, see: Tensor, end: int) -> Tensor:
    """Bool ``[B, R, end]``: each new token sees all committed ones, and of the rest those in ``see [B or 1, R, T]``."""
    number = torch.arange(end, device=lengths.device) - lengths[:, None]  # of uncommitted tokens; below 0 before them
    among = number.clamp(0, see.shape[2] - 1)[:, None].expand(-1, see.shape[1], -1)
    uncommitted = see.expand(len(lengths), -1, -1).gather(2, among) & (number < see.shape[2])[:, None]
    return (number < 0)[:, None] | uncommitted


def key_positions(lengths: Tensor, depths: Tensor, end: int) -> Tensor:
    """``[B, end]`` position of the token in each cache slot; ``depths [B, T]`` are the uncommitted tokens'."""
    slots = torch.arange(end, device=lengths.device)
    number = slots - lengths[:, None]
    behind = lengths[:, None] + depths.gather(1, number.clamp(0, depths.shape[1] - 1))
    return torch.where(number < 0, slots, behind)


def additive(mask: Tensor, groups: int, dtype: torch.dtype, hidden: float) -> Tensor:
    """Mask ``[B, 1, R, S]`` -> bias ``[B, 1, groups * R, S]``, 0 where it is true and ``hidden`` elsewhere."""
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, hidden)
    return bias.repeat(1, 1, groups, 1) if groups > 1 else bias
