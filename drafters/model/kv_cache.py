"""A preallocated key/value cache with a length per row, shared by every drafter and by the target.

Two things tell it from the caches of transformers. Where new rows go is said by the caller (``KVCache.at``), not read
off a counter, so that the shallow layers of a model may run ahead of the deep ones (Kangaroo), and a rejected draft
needs no clean-up: its rows lie beyond the length and are overwritten. And after a draft *tree* was verified,
``commit`` keeps just the rows of the accepted path, wherever they lie.
"""

import itertools

import torch
from transformers import PretrainedConfig

from ..wording import size_text
from .files import free_memory

_SMALL = 1 << 26  # bytes that nobody asks about


class KVCache:
    """Keys and values of ``layers`` layers, ``[layers, batch, kv_heads, capacity, head_dim]`` each.

    ``lengths[b]`` is the number of committed rows of batch row ``b``; a host-side list, because the loop learns the
    number of accepted tokens on the host anyway, once a step.

    Args:
        device: of all layers, or a list with each layer's; layers that lie together must follow each other.
        storage: keys and values to use, zeroed; None makes them.

    Attributes:
        keys, values: of the layers on the first device, which are all but where the target spans several.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str | list[torch.device],
        storage: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        shape = (batch, kv_heads, capacity, head_dim)
        self.static = storage is not None  # captured graphs are bound to these very tensors
        each = device if isinstance(device, list) else [torch.device(device)] * layers
        runs = [(place, len(list(run))) for place, run in itertools.groupby(each)]
        # Zeros, not empty: rows beyond a length are masked, but 0 * NaN in an attention's value product is NaN.
        self._parts = [storage] if storage is not None else [_zeros((count, *shape), dtype, at) for at, count in runs]
        self.keys, self.values = self._parts[0]
        assert len(each) == layers == sum(len(keys) for keys, _ in self._parts) and self.keys.shape[1:] == shape
        self.batch, self.capacity = batch, capacity
        self.lengths = [0] * batch
        self._end = 0
        # Of each new row, where batch rows differ in length; each layer's.
        self._slots: tuple[torch.Tensor, ...] | None = None
        self._new: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] = ((), ())  # each layer's, else
        self._seen: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] = ((), ())
        self._all: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] = ((), ())

    @classmethod
    def for_config(
        cls,
        config: PretrainedConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str | list[torch.device],
        layers: int | None = None,
        storage: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> "KVCache":
        """A cache of the shape that ``config``'s attention layers write.

        Raises:
            ValueError: less memory than it needs.
        """
        layers = layers or config.num_hidden_layers
        needed = cache_bytes(config, batch, capacity, dtype, layers)
        if storage is None and needed > _SMALL:
            places = set(device) if isinstance(device, list) else {torch.device(device)}
            if needed > (free := sum(map(free_memory, places))):
                raise ValueError(
                    f"a cache of {batch} x {capacity} rows of {layers} layers needs {size_text(needed)} and "
                    f"{', '.join(map(str, places))} has {size_text(free)} free: lower max_new_tokens, shorten the "
                    "prompts, or decode fewer at once"
                )
        kv_heads, head_dim = head_sizes(config)
        return cls(layers, batch, kv_heads, capacity, head_dim, dtype, device, storage)

    def at(self, rows: int, offset: int = 0) -> "KVCache":
        """Direct the next ``update`` of every layer to the ``rows`` slots after ``lengths + offset``."""
        starts = [length + offset for length in self.lengths]
        self._end = max(starts) + rows
        assert self._end <= self.capacity, f"cache of {self.capacity} rows asked for {self._end}"
        # Views of all layers at once: slicing costs microseconds, which every layer would pay again.
        end = self._end
        self._seen = self.views(0, end)
        if starts.count(starts[0]) == len(starts):
            self._new, self._slots = self.views(starts[0], end), None
        else:
            slots = torch.tensor(starts)[:, None] + torch.arange(rows)
            spread = [(slots.to(keys.device)[:, None, :, None],) * len(keys) for keys, _ in self._parts]
            self._slots = tuple(itertools.chain.from_iterable(spread))
            self._all = self.views(0, self.capacity)
        return self

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What an attention layer calls: write ``[B, kv_heads, rows, head_dim]``, return all up to the last row."""
        if self._slots is None:
            self._new[0][layer_idx].copy_(key_states)
            self._new[1][layer_idx].copy_(value_states)
        else:
            index = self._slots[layer_idx].expand_as(key_states)
            self._all[0][layer_idx].scatter_(2, index, key_states)
            self._all[1][layer_idx].scatter_(2, index, value_states)
        return self._seen[0][layer_idx], self._seen[1][layer_idx]

    def views(self, first: int, end: int) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Each layer's keys and values ``[B, kv_heads, end - first, head_dim]`` of some slots."""
        keys: tuple[torch.Tensor, ...] = ()
        values: tuple[torch.Tensor, ...] = ()
        for some_keys, some_values in self._parts:
            keys += some_keys[..., first:end, :].unbind(0)
            values += some_values[..., first:end, :].unbind(0)
        return keys, values

    def commit(self, rows: list[list[int]]) -> None:
        """Keep, for batch row ``b``, the rows ``rows[b]`` counted from its length (ascending), and forget the rest."""
        for b, kept in enumerate(rows):
            start = self.lengths[b]
            prefix = 0  # rows that already lie where they belong
            while prefix < len(kept) and kept[prefix] == prefix:
                prefix += 1
            if prefix < len(kept):
                moved = torch.tensor([start + row for row in kept[prefix:]])
                target = slice(start + prefix, start + len(kept))
                for keys, values in self._parts:
                    source = moved.to(keys.device)
                    keys[:, b, :, target] = keys[:, b].index_select(2, source)
                    values[:, b, :, target] = values[:, b].index_select(2, source)
            self.lengths[b] = start + len(kept)

    def crop(self, lengths: list[int]) -> None:
        """Forget committed rows beyond ``lengths[b]``."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)


def cache_bytes(
    config: PretrainedConfig, batch: int, capacity: int, dtype: torch.dtype, layers: int | None = None
) -> int:
    """Bytes of a cache of ``capacity`` rows of each batch row, of all layers or of so many."""
    kv_heads, head_dim = head_sizes(config)
    return 2 * (layers or config.num_hidden_layers) * batch * kv_heads * capacity * head_dim * dtype.itemsize


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Key heads, and the width of a head."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, head_dim


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
