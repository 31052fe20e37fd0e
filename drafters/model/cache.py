"""A preallocated key/value cache with a length per row, shared by every drafter and by the target.

Two things tell it from the caches of transformers. Where new rows go is said by the caller (``KVCache.at``), not read
off a counter, so that the shallow layers of a model may run ahead of the deep ones (Kangaroo), and a rejected draft
needs no clean-up: its rows lie beyond the length and are overwritten. And after a draft *tree* was verified,
``commit`` keeps only the rows of the accepted path, in any slots.
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafters.common.wording import size_text
from drafters.model.files import collect_memory, free_memory

SMALL = 1 << 26  # bytes up to which free memory is not checked
Shape = tuple[int, int, int]  # of a layer: key heads, the width of a key, the width of a value
Views = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # each layer's keys, and its values


@dataclass(eq=False)
class Storage:
    """Keys and values ``[layers, batch, kv_heads, capacity, head_dim]`` that captured forwards are bound to."""

    keys: Tensor
    values: Tensor

    @property
    def capacity(self) -> int:
        """Rows of each batch row."""
        return self.keys.shape[3]

    def at(self, slots: Tensor, seen: int) -> "StorageRows":
        """These rows as attention uses them: new ones go to ``slots [B, R]``, the first ``seen`` are read."""
        return StorageRows(self, slots[:, None, :, None], seen)


@dataclass
class StorageRows:
    """What the attention layers of a captured forward use as their cache."""

    storage: Storage
    index: Tensor
    seen: int

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write ``[B, kv_heads, R, head_dim]`` to the slots; returns the first ``seen`` rows."""
        index, all_keys, all_values = self.index.expand_as(keys), self.storage.keys[layer], self.storage.values[layer]
        all_keys.scatter_(2, index, keys)
        all_values.scatter_(2, index, values)
        return all_keys[:, :, : self.seen], all_values[:, :, : self.seen]


class KVCache:
    """Keys and values of some layers, ``[batch, kv_heads, capacity, width]`` of each.

    ``lengths[b]`` is the number of committed rows of batch row ``b``; a host-side list, because the loop learns the
    number of accepted tokens on the host anyway, once a step.

    Args:
        shapes: of each layer. device: of all layers, or a list with each layer's.
        storage: what to use, zeroed; None makes it.

    Attributes:
        storage: what captured forwards are bound to; None for a cache that is not made for them.
        ends: ``[batch]`` on the host, slots of each batch row in use with those that ``at`` gave to new rows.
    """

    def __init__(
        self,
        shapes: list[Shape],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str | list[torch.device],
        storage: Storage | None = None,
    ) -> None:
        self.storage = storage
        each = device if isinstance(device, list) else [torch.device(device)] * len(shapes)
        runs = [(kind, len(list(run))) for kind, run in itertools.groupby(zip(shapes, each, strict=True))]
        # Zeros, not empty: rows beyond a length are masked, but 0 * NaN in an attention's value product is NaN.
        if storage is None:
            self._parts = [
                tuple(torch.zeros(n, batch, heads, capacity, width, dtype=dtype, device=at) for width in widths)
                for ((heads, *widths), at), n in runs
            ]
        else:
            self._parts = [(storage.keys, storage.values)]
        self.batch, self.capacity = batch, capacity
        self.lengths = [0] * batch
        self.ends = torch.zeros(batch, dtype=torch.long)
        self._returned: Callable[[], object] = lambda: None  # called where the memory was lent
        # Each layer's: the slots of the new rows, and of the rows up to them.
        self._new: Views = ((), ())
        self._seen: Views = ((), ())
        # Where batch rows differ in length: all slots as one list of rows, and each new row's number in it.
        self._all: Views = ((), ())
        self._slots: tuple[Tensor, ...] | None = None

    @classmethod
    def for_config(
        cls,
        config: PretrainedConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str | list[torch.device],
        layers: int | None = None,
        storage: Storage | None = None,
    ) -> "KVCache":
        """A cache of the shape that ``config``'s attention layers write; raises as ``of``."""
        return cls.of(config_shapes(config, layers), batch, capacity, dtype, device, storage)

    @classmethod
    def of(
        cls,
        shapes: list[Shape],
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str | list[torch.device],
        storage: Storage | None = None,
    ) -> "KVCache":
        """A cache for layers of these shapes.

        Raises:
            ValueError: less memory than it needs.
        """
        needed = shape_bytes(shapes, batch, capacity, dtype)
        if storage is None and needed > SMALL:
            places = set(device) if isinstance(device, list) else {torch.device(device)}
            if needed > (free := sum(map(free_memory, places))):
                raise ValueError(
                    f"a cache of {batch} x {capacity} rows of {len(shapes)} layers needs {size_text(needed)} and "
                    f"{', '.join(map(str, places))} has {size_text(free)} free: lower max_new_tokens, shorten the "
                    "prompts, or decode fewer at once"
                )
        return cls(shapes, batch, capacity, dtype, device, storage)

    def at(self, rows: int, offset: int = 0) -> "KVCache":
        """Direct the next ``update`` of every layer to the ``rows`` slots after ``lengths + offset``."""
        starts = [length + offset for length in self.lengths]
        end = max(starts) + rows
        self.ends = torch.tensor([start + rows for start in starts])
        assert end <= self.capacity, f"cache of {self.capacity} rows asked for {end}"
        self._starts, self._end = starts, end
        self._seen = self._new = ((), ())  # made when they are wanted
        return self

    def _place(self) -> None:
        """Make the views of where the new rows go."""
        starts, end = self._starts, self._end
        if starts.count(starts[0]) == len(starts):
            self._new, self._slots = self.views(starts[0], end), None
        else:
            slots = torch.tensor(starts)[:, None] + torch.arange(end - max(starts))
            spread: list[Tensor] = []
            for keys, _ in self._parts:
                heads = keys.shape[2]
                bands = torch.arange(self.batch * heads).view(self.batch, heads, 1)  # a batch row's slots of one head
                spread += [(bands * self.capacity + slots[:, None]).flatten().to(keys.device)] * len(keys)
            self._slots = tuple(spread)
            self._new = self.views(0, self.capacity)
            every_key, every_value = (tuple(x.view(-1, max(x.shape[-1], 1)) for x in each) for each in self._new)
            self._all = every_key, every_value

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """What an attention layer calls: write ``[B, kv_heads, rows, head_dim]``, return all up to the last row."""
        if not self._new[0]:
            self._place()
        if self._slots is None:
            self._new[0][layer_idx].copy_(key_states)
            self._new[1][layer_idx].copy_(value_states)
        else:
            # Not scatter_: in bf16 on a CPU that takes a hundred times as long, for it copies the whole cache.
            index = self._slots[layer_idx]
            for every, states in zip(self._all, (key_states, value_states), strict=True):
                every[layer_idx].index_copy_(0, index, states.reshape(-1, states.shape[-1]))
        return self.seen(layer_idx)

    def seen(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values up to the last of the rows that ``at`` gave slots to."""
        if not self._seen[0]:  # views of all layers at once: slicing in every layer would cost microseconds each time
            self._seen = self.views(0, self._end)
        return self._seen[0][layer], self._seen[1][layer]

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values ``[B, kv_heads, capacity, head_dim]``; the next layer's lie behind them."""
        ((keys, values),) = self._parts  # on one device
        return keys[layer], values[layer]

    def views(self, first: int, end: int) -> Views:
        """Each layer's keys and values ``[B, kv_heads, end - first, head_dim]`` of some slots."""
        keys: tuple[Tensor, ...] = ()
        values: tuple[Tensor, ...] = ()
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

    def commit_first(self, counts: list[int]) -> None:
        """Keep, for batch row ``b``, the first ``counts[b]`` rows after its length, and forget the rest."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def crop(self, lengths: list[int]) -> None:
        """Forget committed rows beyond ``lengths[b]``."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)

    def copy_row(self, row: int, other: "KVCache", number: int = 0) -> None:
        """Copy batch row ``number`` of another cache into batch row ``row``."""
        end = self.lengths[row] = other.lengths[number]
        for ours, theirs in zip(self._parts, other._parts, strict=True):
            for values, others in zip(ours, theirs, strict=True):
                values[:, row, :, :end] = others[:, number, :, :end]

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the allocator from reusing the memory while ``stream`` may still work on it."""
        for tensor in itertools.chain.from_iterable(self._parts):
            tensor.record_stream(stream)

    def release(self) -> None:
        """Give up the memory, so that the next cache can have it; this cache cannot be used any more."""
        self._parts, self._slots, self.storage = [], None, None
        self._new = self._seen = self._all = ((), ())
        self._returned()

    @classmethod
    def nothing(cls) -> "KVCache":
        """A cache without room for a single row, in place of None before the first prompt."""
        return cls([], 0, 0, torch.float32, "cpu")


class CachePool:
    """Caches for captured forwards, which are bound to their memory: one that is free again is used again.

    Args:
        spare: rows that each has beyond those asked for.
        forget: called with free ones that are given up when memory is short, so that no other reference to them stays.
    """

    def __init__(self, spare: int, forget: Callable[[list[Storage]], object] = lambda storages: None) -> None:
        self._spare, self._forget = spare, forget
        self._free: dict[tuple[int, tuple[Shape, ...]], list[Storage]] = {}  # by batch and shapes

    def take(
        self,
        config: PretrainedConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: int | None = None,
    ) -> KVCache:
        """An empty cache of at least ``capacity`` rows and the spare ones, a power of two.

        The smallest free one that is large enough, since all that was captured with it is there again.

        Raises:
            ValueError: less memory than it needs.
        """
        capacity = 1 << max(capacity + self._spare - 1, 511).bit_length()
        free = self._free.setdefault((batch, tuple(config_shapes(config, layers))), [])
        fitting = [one for one in reversed(free) if one.capacity >= capacity]  # what was used last comes first
        storage = min(fitting, key=lambda one: one.capacity, default=None)
        if storage is not None:
            free.remove(storage)
        else:
            storage = self._made(config, batch, capacity, dtype, device, layers)
        storage.keys.zero_(), storage.values.zero_()
        cache = KVCache.for_config(config, batch, storage.capacity, dtype, device, layers, storage)
        returned = weakref.finalize(cache, free.append, storage)
        returned.atexit = False
        cache._returned = returned
        return cache

    def _made(self, *shape: Any) -> Storage:
        """Allocate a storage; if memory is short, give up the free ones first."""
        with torch.inference_mode(False):
            try:
                return Storage(*KVCache.for_config(*shape)._parts[0])
            except (ValueError, torch.OutOfMemoryError):
                gc.collect()  # unreachable caches: their storages become free
                if not any(self._free.values()):
                    raise
            for free in self._free.values():
                given, free[:] = free[:], []
                self._forget(given)
            del given
            collect_memory()
            return Storage(*KVCache.for_config(*shape)._parts[0])


def cache_bytes(
    config: PretrainedConfig, batch: int, capacity: int, dtype: torch.dtype, layers: int | None = None
) -> int:
    """Bytes of a cache of ``capacity`` rows of each batch row, of all layers or of ``layers``."""
    return shape_bytes(config_shapes(config, layers), batch, capacity, dtype)


def config_shapes(config: PretrainedConfig, layers: int | None = None) -> list[Shape]:
    """What each of ``layers`` (None: all) attention layers of this configuration keeps of a token."""
    kv_heads, head_dim = head_sizes(config)
    return [(kv_heads, head_dim, head_dim)] * (layers or config.num_hidden_layers)


def shape_bytes(shapes: list[Shape], batch: int, capacity: int, dtype: torch.dtype) -> int:
    """Bytes of a cache for layers of these shapes."""
    return sum(heads * (keys + values) for heads, keys, values in shapes) * batch * capacity * dtype.itemsize


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Key heads, and the width of a head."""
    heads = config.num_attention_heads
    try:
        head_dim = getattr(config, "head_dim", None)
    except RuntimeError:  # transformers' answer where it differs from layer to layer (Gemma 4)
        head_dim = None
    return getattr(config, "num_key_value_heads", None) or heads, head_dim or config.hidden_size // heads
