"""Where the new rows of a forward stand and what they see: positions, attention masks, additive biases."""

from functools import lru_cache

import torch
from torch import nn

# A chain's bias is the same at every length but for its width; kept while it is no larger than this many values.
_KEPT_VALUES = 1 << 18


def uniform(lengths: list[int]) -> bool:
    """Every batch row has the same length."""
    return lengths.count(lengths[0]) == len(lengths)


def row_positions(
    lengths: list[int], depths: torch.Tensor | None, offset: int, rows: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """Positions ``[B, R]`` of the new rows (``depths [B, offset + R]``, None: a chain), and a bound above them."""
    upto = max(lengths) + offset + rows
    if uniform(lengths):  # nothing to copy to the device, so nothing to wait for
        if depths is None:
            return torch.arange(lengths[0] + offset, upto, device=device).expand(len(lengths), -1), upto
        return (lengths[0] + depths[:, offset:]).expand(len(lengths), -1), upto
    first = torch.tensor(lengths, device=device)[:, None]
    if depths is None:
        return first + torch.arange(offset, offset + rows, device=device), upto
    return first + depths[:, offset:], upto


def attention_mask(
    lengths: list[int],
    see: torch.Tensor | None,
    depths: torch.Tensor | None,
    positions: torch.Tensor,
    offset: int,
    rows: int,
    window: int | None = None,
    always: bool = False,
) -> torch.Tensor | None:
    """Bool mask ``[B, 1, R, max(length) + offset + R]`` of ``TargetModel.run``'s rows; None where attention needs none:
    one row that sees everything, or a causal block with nothing before it.

    ``window``: keys ``window`` or more positions back are hidden. ``always``: no None (eager attention needs a mask).
    """
    device = positions.device
    batch, temporary = len(lengths), offset + rows
    if see is None and window is None and not always and _needs_no_mask(lengths, offset, rows):
        return None
    if see is None:
        make = _chain_mask if rows <= 64 else _chain_mask.__wrapped__  # a prompt's is too large to be kept
        see = make(rows, offset, device).expand(batch, -1, -1)
    if uniform(lengths):
        mask = nn.functional.pad(see, (lengths[0], 0), value=True)
    else:
        first = torch.tensor(lengths, device=device)
        slots = torch.arange(max(lengths) + temporary, device=device)
        mask = (slots < first[:, None])[:, None].repeat(1, rows, 1)
        index = (first[:, None] + torch.arange(temporary, device=device))[:, None].expand(-1, rows, -1)
        mask.scatter_(2, index, see.expand(batch, -1, -1))
    if window is not None:
        keys = _key_positions(lengths, depths, temporary, device)
        mask = mask & (positions[:, :, None] - keys[:, None] < window)
    return mask[:, None]


def attention_bias(
    lengths: list[int],
    see: torch.Tensor | None,
    depths: torch.Tensor | None,
    positions: torch.Tensor,
    offset: int,
    rows: int,
    window: int | None,
    groups: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """``attention_mask`` as values to add to the scores: ``[B or 1, 1, groups * R, max(length) + offset + R]`` or None.

    The R rows are repeated once for each of the ``groups`` query heads that share a key head.
    """
    device = positions.device
    if see is None and window is None and uniform(lengths) and not _needs_no_mask(lengths, offset, rows):
        before = lengths[0] + offset
        width = 1 << max(before - 1, 255).bit_length()
        if groups * rows * (width + rows) <= _KEPT_VALUES:
            return _chain_bias(rows, groups, width, dtype, device)[..., width - before :]
    mask = attention_mask(lengths, see, depths, positions, offset, rows, window)
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill_(~mask, float("-inf"))
    return bias.repeat(1, 1, groups, 1) if groups > 1 else bias


def _needs_no_mask(lengths: list[int], offset: int, rows: int) -> bool:
    return uniform(lengths) and (rows == 1 or lengths[0] + offset == 0)


def _key_positions(
    lengths: list[int], depths: torch.Tensor | None, temporary: int, device: torch.device
) -> torch.Tensor:
    """``[B, max(length) + temporary]`` position of the token in each cache slot."""
    slots = torch.arange(max(lengths) + temporary, device=device).repeat(len(lengths), 1)
    if depths is not None and uniform(lengths):
        slots[:, lengths[0] :] = lengths[0] + depths
    elif depths is not None:
        first = torch.tensor(lengths, device=device)[:, None]
        slots.scatter_(1, first + torch.arange(temporary, device=device), first + depths)
    return slots


@lru_cache(maxsize=256)
def _chain_mask(rows: int, offset: int, device: torch.device) -> torch.Tensor:
    """``[1, R, offset + R]``: each row sees the uncommitted rows up to itself."""
    return torch.ones(rows, offset + rows, dtype=torch.bool, device=device).tril(offset)[None]


@lru_cache(maxsize=64)
def _chain_bias(rows: int, groups: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[1, 1, groups * R, width + R]``: after ``width`` rows that all see, each row sees those up to itself."""
    hidden = ~torch.ones(rows, width + rows, dtype=torch.bool, device=device).tril(width)
    bias = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return bias.repeat(groups, 1)[None, None]
