"""A preallocated key/value cache with a length per row, shared by every drafter and by the target.

Two things tell it from the caches of transformers. Where new rows go is said by the caller (``KVCache.at``), not read
off a counter, so that the shallow layers of a model may run ahead of the deep ones (Kangaroo), and a rejected draft
needs no clean-up: its rows lie beyond the length and are overwritten. And after a draft *tree* was verified,
``commit`` keeps just the rows of the accepted path, wherever they lie.
"""

import torch
from transformers import PretrainedConfig

from .model_files import free_memory

_SMALL = 1 << 26  # bytes that nobody asks about


class KVCache:
    """Keys and values of ``layers`` layers, ``[layers, batch, kv_heads, capacity, head_dim]`` each.

    ``lengths[b]`` is the number of committed rows of batch row ``b``; a host-side list, because the loop learns the
    number of accepted tokens on the host anyway, once a step.

    Args:
        storage: keys and values to use, zeroed; None makes them.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        storage: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        shape = (layers, batch, kv_heads, capacity, head_dim)
        # Zeros, not empty: rows beyond a length are masked, but 0 * NaN in an attention's value product is NaN.
        self.static = storage is not None  # captured graphs are bound to these very tensors
        if storage is None:
            storage = torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = storage
        assert self.keys.shape == shape
        self.batch, self.capacity = batch, capacity
        self.lengths = [0] * batch
        self._end = 0
        self._slots: torch.Tensor | None = None  # of each new row, where batch rows differ in length
        self._new: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] = ((), ())  # each layer's, else
        self._seen: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] = ((), ())

    @classmethod
    def for_config(
        cls,
        config: PretrainedConfig,
        batch: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layers: int | None = None,
        storage: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> "KVCache":
        """A cache of the shape that ``config``'s attention layers write.

        Raises:
            ValueError: less memory than it needs.
        """
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        layers = layers or config.num_hidden_layers
        needed = 2 * layers * batch * kv_heads * capacity * head_dim * dtype.itemsize
        if storage is None and needed > _SMALL and needed > (free := free_memory(torch.device(device))):
            raise ValueError(
                f"a cache of {batch} x {capacity} rows of {layers} layers needs {needed / 1e9:.2f} GB and {device} has "
                f"{free / 1e9:.2f} GB free: lower max_new_tokens, shorten the prompts, or decode fewer at once"
            )
        return cls(layers, batch, kv_heads, capacity, head_dim, dtype, device, storage)

    def at(self, rows: int, offset: int = 0) -> "KVCache":
        """Direct the next ``update`` of every layer to the ``rows`` slots after ``lengths + offset``."""
        starts = [length + offset for length in self.lengths]
        self._end = max(starts) + rows
        assert self._end <= self.capacity, f"cache of {self.capacity} rows asked for {self._end}"
        # Views of all layers at once: slicing costs microseconds, which every layer would pay again.
        end = self._end
        self._seen = (self.keys[..., :end, :].unbind(0), self.values[..., :end, :].unbind(0))
        if starts.count(starts[0]) == len(starts):
            first = starts[0]
            self._new = (self.keys[..., first:end, :].unbind(0), self.values[..., first:end, :].unbind(0))
            self._slots = None
        else:
            own = torch.arange(rows, device=self.keys.device)
            self._slots = torch.tensor(starts, device=self.keys.device)[:, None] + own
        return self

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What an attention layer calls: write ``[B, kv_heads, rows, head_dim]``, return all up to the last row."""
        if self._slots is None:
            self._new[0][layer_idx].copy_(key_states)
            self._new[1][layer_idx].copy_(value_states)
        else:
            index = self._slots[:, None, :, None].expand_as(key_states)
            self.keys[layer_idx].scatter_(2, index, key_states)
            self.values[layer_idx].scatter_(2, index, value_states)
        return self._seen[0][layer_idx], self._seen[1][layer_idx]

    def commit(self, rows: list[list[int]]) -> None:
        """Keep, for batch row ``b``, the rows ``rows[b]`` counted from its length (ascending), and forget the rest."""
        for b, kept in enumerate(rows):
            start = self.lengths[b]
            prefix = 0  # rows that already lie where they belong
            while prefix < len(kept) and kept[prefix] == prefix:
                prefix += 1
            if prefix < len(kept):
                source = torch.tensor([start + row for row in kept[prefix:]], device=self.keys.device)
                target = slice(start + prefix, start + len(kept))
                self.keys[:, b, :, target] = self.keys[:, b].index_select(2, source)
                self.values[:, b, :, target] = self.values[:, b].index_select(2, source)
            self.lengths[b] = start + len(kept)

    def crop(self, lengths: list[int]) -> None:
        """Forget committed rows beyond ``lengths[b]``."""
        assert all(new <= old for new, old in zip(lengths, self.lengths, strict=True))
        self.lengths = list(lengths)
