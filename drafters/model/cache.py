"""A preallocated key/value cache with a length per sequence, shared by every drafter and by the target.

It differs from the caches of transformers in two ways. The caller says which slots new tokens get (``KVCache.at``);
they are not read off a counter. So the shallow layers of a model may run ahead of the deep ones (Kangaroo), and a
rejected draft needs no clean-up: its slots are beyond the length and are overwritten. And after a draft *tree* was
verified, ``commit`` keeps only the slots of the accepted path, in any order.
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from drafters.common.wording import size_text
from drafters.model.files import free_memory

SMALL = 1 << 26  # bytes up to which free memory is not checked
Shape = tuple[int, int, int]  # of a layer: key heads, the width of a key, the width of a value


@dataclass(eq=False)
class Storage:
    """Keys and values that captured forwards are bound to.

    ``parts``: keys and values ``[layers, batch, kv_heads, capacity, width]`` of successive layers of one shape.
    """

    parts: list[tuple[Tensor, ...]]

    def __post_init__(self) -> None:
        self.keys: list[Tensor] = [layer for keys, _ in self.parts for layer in keys]
        self.values: list[Tensor] = [layer for _, values in self.parts for layer in values]

    @property
    def capacity(self) -> int:
        """Slots of each sequence."""
        return self.keys[0].shape[2]


@dataclass
class StorageRows:
    """What the attention layers of a captured forward use as their cache: new tokens go to ``slots [B, R]``, the first
    ``seen`` slots are read."""

    storage: Storage
    slots: Tensor
    seen: int
    lengths: ClassVar[list[int]] = []  # on the device only; models are given positions

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write ``[B, kv_heads, R, width]`` to ``slots``; return the first ``seen`` slots."""
        index = self.slots[:, None, :, None]
        all_keys, all_values = self.storage.keys[layer], self.storage.values[layer]
        all_keys.scatter_(2, index.expand_as(keys), keys)
        all_values.scatter_(2, index.expand_as(values), values)
        return all_keys[:, :, : self.seen], all_values[:, :, : self.seen]


class KVCache:
    """Keys and values of some layers.

    ``lengths[b]`` is the number of committed slots of sequence ``b``; a host-side list, because the loop reads the
    number of accepted tokens on the host anyway, once a step.

    Args:
        shapes: shape of each layer. device: device of all layers, or a list with each layer's.
        storage: memory to use, zeroed; None allocates it.

    Attributes:
        keys, values: each layer's ``[batch, kv_heads, capacity, width]``; the layers of one shape on one device are
            contiguous.
        storage: memory that captured forwards are bound to; None for a cache that is not made for them.
        dropped: number of tokens of each sequence before those of the cache, whose slots were given up.
        positions: most positions of a sequence, if more than the capacity.
        ends: ``[batch]`` on the host, slots of each sequence in use with those that ``at`` gave to new tokens.
        rewinds: most committed tokens that ``crop`` takes back, beyond which running states are not kept.

    Raises:
        ValueError: less memory than it needs.
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
        devices = device if isinstance(device, list) else [torch.device(device)] * len(shapes)
        needed = cache_bytes(shapes, batch, capacity, dtype)
        if storage is None and needed > SMALL and needed > (free := sum(map(free_memory, set(devices)))):
            raise ValueError(
                f"a cache of {batch} x {capacity} rows of {len(shapes)} layers needs {size_text(needed)} and "
                f"{', '.join(map(str, set(devices)))} has {size_text(free)} free: lower max_new_tokens, shorten the "
                "prompts, or decode fewer at once"
            )
        self.storage, self.batch, self.capacity = storage, batch, capacity
        # The layers of one shape and device are one tensor, so that ``commit`` moves the slots of all of them at once.
        if storage is None:
            runs = [(kind, len(list(run))) for kind, run in itertools.groupby(zip(shapes, devices, strict=True))]
            # Zeros, not empty: slots beyond a length are masked, but 0 * NaN in an attention's value product is NaN.
            self._parts: list[tuple[Tensor, ...]] = [
                tuple(torch.zeros(n, batch, heads, capacity, width, dtype=dtype, device=at) for width in widths)
                for ((heads, *widths), at), n in runs
            ]
        else:
            self._parts = storage.parts
        whole = storage or Storage(self._parts)
        self.keys, self.values = whole.keys, whole.values
        self.lengths, self.dropped, self.positions = [0] * batch, [0] * batch, capacity
        self.ends = torch.zeros(batch, dtype=torch.long)
        self._returned: Callable[[], object] = lambda: None  # called where the memory was lent

    rewinds = 0

    def expect(self, counts: list[int]) -> None:
        """Announce that the commit after the next forward keeps the first ``counts[b]`` tokens (running states)."""

    def at(self, rows: int, offset: int = 0) -> "KVCache":
        """Direct the next ``update`` of every layer to the ``rows`` slots after ``lengths + offset``."""
        starts = [length + offset for length in self.lengths]
        self._end = max(starts) + rows
        assert self._end <= self.capacity, f"cache of {self.capacity} rows asked for {self._end}"
        self.ends = torch.tensor([start + rows for start in starts])
        self._rows = rows
        self._index: Tensor | None = None
        if starts.count(starts[0]) < len(starts):  # sequence and slot of each new token
            slots = torch.tensor(starts)[:, None] + torch.arange(rows)
            self._index = torch.stack([torch.arange(self.batch)[:, None].expand(-1, rows), slots])  # [2, B, R]
        return self

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """What an attention layer calls: write ``[B, kv_heads, rows, width]``, return all up to the last new slot."""
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self._index is None:
            keys[:, :, self._end - self._rows : self._end] = key_states
            values[:, :, self._end - self._rows : self._end] = value_states
        else:  # not scatter_: in bf16 on a CPU that takes a hundred times as long, for it copies the whole cache
            self._index = self._index.to(keys.device)
            keys.transpose(1, 2)[tuple(self._index)] = key_states.transpose(1, 2)
            values.transpose(1, 2)[tuple(self._index)] = value_states.transpose(1, 2)
        return keys[:, :, : self._end], values[:, :, : self._end]

    def commit(self, rows: list[list[int]]) -> None:
        """Keep slots ``rows[b]`` of sequence ``b``, counted from its length (ascending), and forget the others."""
        for b, slots in enumerate(rows):
            start = self.lengths[b]
            prefix = 0  # slots that are already where they belong
            while prefix < len(slots) and slots[prefix] == prefix:
                prefix += 1
            if prefix < len(slots):
                moved = torch.tensor([start + slot for slot in slots[prefix:]])
                target = slice(start + prefix, start + len(slots))
                for keys, values in self._parts:
                    source = moved.to(keys.device)
                    keys[:, b, :, target] = keys[:, b].index_select(2, source)
                    values[:, b, :, target] = values[:, b].index_select(2, source)
            self.lengths[b] = start + len(slots)

    def commit_first(self, counts: list[int]) -> None:
        """Keep the first ``counts[b]`` slots of sequence ``b`` after its length, and forget the others."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def crop(self, lengths: list[int]) -> None:
        """Forget committed slots beyond ``lengths[b]``."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)

    def keep_last(self, count: int) -> None:
        """Give up the committed rows before the last ``count`` of each sequence."""
        for b, length in enumerate(self.lengths):
            if (first := length - count) > 0:
                for keys, values in self._parts:
                    keys[:, b, :, :count] = keys[:, b, :, first:length].clone()
                    values[:, b, :, :count] = values[:, b, :, first:length].clone()
                self.lengths[b], self.dropped[b] = count, self.dropped[b] + first

    def copy_row(self, row: int, other: "KVCache", number: int = 0) -> None:
        """Copy sequence ``number`` of another cache into sequence ``row``."""
        end = self.lengths[row] = other.lengths[number]
        self.dropped[row] = other.dropped[number]
        for ours, theirs in zip(self._parts, other._parts, strict=True):
            for values, others in zip(ours, theirs, strict=True):
                values[:, row, :, :end] = others[:, number, :, :end]

    def release(self) -> None:
        """Give up the memory, so that the next cache can have it; this cache cannot be used any more."""
        self._parts, self.keys, self.values, self.storage = [], [], [], None
        self._returned()

    @classmethod
    def nothing(cls) -> "KVCache":
        """A cache without a slot, in place of None before the first prompt."""
        return cls([], 0, 0, torch.float32, "cpu")


class CachePool:
    """Caches for captured forwards, which are bound to their memory: one that is free again is used again.

    Args:
        spare: slots that each has beyond those asked for.
    """

    def __init__(self, spare: int) -> None:
        self._spare = spare
        self._free: dict[tuple[int, tuple[Shape, ...]], list[Storage]] = {}  # by batch and shapes

    def take(self, shapes: list[Shape], batch: int, capacity: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """An empty cache of at least ``capacity`` slots and the spare ones, a power of two.

        The smallest free one that is large enough, since all that was captured with it is there again.

        Raises:
            ValueError: less memory than it needs.
        """
        capacity = 1 << max(capacity + self._spare - 1, 511).bit_length()
        free = self._free.setdefault((batch, tuple(shapes)), [])
        fitting = [one for one in reversed(free) if one.capacity >= capacity]  # what was used last comes first
        storage = min(fitting, key=lambda one: one.capacity, default=None)
        if storage is None:
            with torch.inference_mode(False):
                storage = Storage(KVCache(shapes, batch, capacity, dtype, device)._parts)
        else:
            free.remove(storage)
            for keys, values in storage.parts:
                keys.zero_(), values.zero_()
        cache = KVCache(shapes, batch, storage.capacity, dtype, device, storage)
        returned = weakref.finalize(cache, free.append, storage)
        returned.atexit = False
        cache._returned = returned
        return cache

    def give_up(self) -> list[Storage]:
        """Hand over all free storages, so that their memory can be freed."""
        gc.collect()  # storages of unreachable caches become free
        storages = []
        for free in self._free.values():
            storages += free
            free.clear()
        return storages


def config_shapes(config: PretrainedConfig, layers: int | None = None) -> list[Shape]:
    """What each of ``layers`` (None: all) attention layers of this configuration keeps of a token."""
    count = layers or config.num_hidden_layers
    if getattr(config, "kv_lora_rank", None) is not None:  # latent attention keeps a latent, and a key for RoPE
        return [(1, config.kv_lora_rank, config.qk_rope_head_dim)] * count
    kv_heads, head_dim = head_sizes(config)
    return [(kv_heads, head_dim, head_dim)] * count


def cache_bytes(shapes: list[Shape], batch: int, capacity: int, dtype: torch.dtype) -> int:
    """Bytes of a cache of ``capacity`` slots per sequence."""
    return sum(heads * (keys + values) for heads, keys, values in shapes) * batch * capacity * dtype.itemsize


def head_sizes(config: PretrainedConfig) -> tuple[int, int]:
    """Key heads, and the width of a head."""
    heads = config.num_attention_heads
    try:
        head_dim = getattr(config, "head_dim", None)
    except RuntimeError:  # transformers' answer where it differs from layer to layer (Gemma 4)
        head_dim = None
    return getattr(config, "num_key_value_heads", None) or heads, head_dim or config.hidden_size // heads
