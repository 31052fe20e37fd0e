"""Running states: the convolution windows and recurrent states that some layers keep (gated DeltaNet, Mamba, LFM2).

Such a layer has one state per sequence, from which no token can be taken away. So it reads a chain token by token, and
the cache keeps the state after each: the commit chooses one per sequence. What needs no state is done for all tokens at
once: the layer's projections of its input, its output projection, and the rest of the model.

Prompts are read in one pass, whose end is announced (``expect``). Sequences of unequal length are read apart there, so
that no padding gets into a state.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from drafters.model.cache import KVCache, Shape, StorageRows
from drafters.model.runner import model_time

if TYPE_CHECKING:
    from drafters.model.mixers import Mixer

CHAINS_ONLY = "verifies chains only, because some of its layers keep a running state"
EMPTY = -1  # in place of the number of a kept state: the one before any token


class LayerState(LinearAttentionCacheLayerMixin):
    """Windows and recurrent states of one layer, ``[B, ...]`` each. A pass puts in new tensors."""

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states=number_of_states)
        self.record_past = True  # without it, transformers' layers change a window in place

    def lazy_initialization(self, *args: Any, **named: Any) -> None:
        """Nothing to do: the first update sets a state."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **named: Any
    ) -> Tensor:
        """Append inputs ``[B, C, R]`` to a window; return the window before them and the inputs, ``[B, C, ...]``."""
        before = self.conv_states[state_idx]
        seen = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        size = conv_kernel_size or conv_states.shape[-1]
        self.conv_states[state_idx] = F.pad(seen, (max(size - seen.shape[-1], 0), 0))[..., -size:].clone()
        self.has_previous_state[state_idx] = True
        return seen

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **named: Any) -> Tensor:
        """Set a recurrent state."""
        self.recurrent_states[state_idx], self.has_previous_state[state_idx] = recurrent_states, True
        return recurrent_states

    def map(self, change: Callable[[Tensor], Tensor]) -> "LayerState":
        """Return a layer state of ``change(tensor)`` for each tensor."""
        new = LayerState(self.number_of_states)
        for ours, theirs in ((self.conv_states, new.conv_states), (self.recurrent_states, new.recurrent_states)):
            theirs.update({index: None if value is None else change(value) for index, value in ours.items()})
        new.has_previous_state = dict(self.has_previous_state)
        return new

    @property
    def is_empty(self) -> bool:
        """True before the first token."""
        return not any(self.has_previous_state.values())

    def fresh(self, count: int) -> "LayerState":
        """Return a copy for a pass over ``count`` tokens; transformers changes the tensors in place for one token."""
        return self.map(torch.clone if count == 1 else lambda value: value)

    def of(self, rows: list[int]) -> "LayerState":
        """Return the state of some sequences."""
        return self.map(lambda value: value[rows])


def joined(parts: list[tuple[list[int], LayerState]], batch: int) -> LayerState:
    """Return the state of a batch from those of its sequences; zeros where a part has no state yet."""
    new = LayerState(max(state.number_of_states for _, state in parts))
    for name in ("conv_states", "recurrent_states"):
        for index in range(new.number_of_states):
            known = [(rows, value) for rows, state in parts if (value := getattr(state, name).get(index)) is not None]
            if known:
                whole = known[0][1].new_zeros(batch, *known[0][1].shape[1:])
                for rows, value in known:
                    whole[rows] = value
                getattr(new, name)[index], new.has_previous_state[index] = whole, True
    return new


class LayerCache(Cache):
    """A ``KVCache`` as transformers' layers see it in one forward; ``layers``: states of those that have one."""

    def __init__(self, cache: KVCache | StorageRows, layers: list[Any] | None = None) -> None:
        super().__init__(layers=layers or [])
        self.rows = cache

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens; return all up to the last."""
        return self.rows.update(keys, values, layer_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the new ones; some models ask for it, though they are given positions."""
        return max(self.rows.lengths, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the numbers of keys, and of those before the cache's; asked for only without tokens before."""
        return query_length, 0

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the recurrent state, as MiniMax asks for it."""
        state: Tensor | None = self.layers[layer_idx].recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Set the recurrent state, as MiniMax does."""
        self.layers[layer_idx].update_recurrent_state(linear_cache)


class RunningCache(KVCache):
    """A KV cache with the running states of the layers ``mixers``; other arguments are ``KVCache``'s.

    Keys and values of a rejected token are overwritten. A state is replaced by the one that had read fewer tokens.
    """

    def __init__(self, mixers: Sequence[int], shapes: list[Shape], batch: int, *rest: Any) -> None:
        super().__init__(shapes, batch, *rest)
        # By layer: states, each with the number of tokens of each sequence that it has read. First the committed one.
        self._kept: dict[int, list[tuple[list[int], LayerState]]] = {}
        for layer in mixers:
            self._kept[layer] = [([0] * batch, LayerState())]
        self._layers, self._offset = len(shapes), 0
        self._announced: list[int] | None = None  # what the commit after the next pass keeps

    def expect(self, counts: list[int]) -> None:
        self._announced = list(counts)

    def at(self, rows: int, offset: int = 0) -> Self:
        super().at(rows, offset)
        self._offset = offset
        return self

    def for_layers(self) -> LayerCache:
        """Return the cache as transformers' layers see it in the next forward."""
        return LayerCache(self, [LayerState() for _ in range(self._layers)])

    def run(self, mixer: "Mixer", args: Any, named: Any) -> Any:
        """Run a mixer over the new tokens, from the state before them; keep the states that a commit may ask for."""
        kept, count = self._kept[mixer.layer], self._rows
        starts = [length + self._offset for length in self.lengths]
        while len(kept) > 1 and all(end > start for end, start in zip(kept[-1][0], starts, strict=True)):
            kept.pop()  # of tokens that were not committed
        before = kept[-1][1]
        counts = self._announced if count > 1 else [1] * self.batch
        if counts is None and before.is_empty:
            counts = [count] * self.batch
        if counts is not None and (before.is_empty or count == 1 or not mixer.from_zero):
            after, result = mixer.read_whole(before, args, named, count, counts)
            kept.append(([start + new for start, new in zip(starts, counts, strict=True)], after))
        else:
            states, result = mixer.read_chain(before, args, named, count)
            kept += [([start + new for start in starts], state) for new, state in enumerate(states, 1)]
        return result

    def commit(self, rows: list[list[int]]) -> None:
        if any(slots != [*range(len(slots))] for slots in rows):
            raise ValueError(f"the accepted tokens are slots {rows} of a draft, and the target {CHAINS_ONLY}")
        self.commit_first([len(slots) for slots in rows])

    def commit_first(self, counts: list[int]) -> None:
        super().commit_first(counts)
        self._choose()

    def crop(self, lengths: list[int]) -> None:
        super().crop(lengths)
        self._choose()

    def copy_row(self, row: int, other: KVCache, number: int = 0) -> None:
        super().copy_row(row, other, number)
        assert isinstance(other, RunningCache)
        others = [each for each in range(self.batch) if each != row]
        for layer, kept in self._kept.items():
            parts = [(others, kept[-1][1].of(others)), ([row], other._kept[layer][-1][1].of([number]))]
            kept[:] = [(list(self.lengths), joined(parts, self.batch))]

    def keep_last(self, count: int) -> None:
        raise NotImplementedError("a running state has no first tokens to give up")

    def release(self) -> None:
        super().release()
        self._kept = {}

    def _choose(self) -> None:
        """Choose the states that have read ``lengths`` tokens, and keep the ``rewinds`` ones before them."""
        self._announced = None
        with torch.no_grad(), model_time():
            for kept in self._kept.values():
                state = self._after(kept, self.lengths)
                while kept and all(end > length for end, length in zip(kept[-1][0], self.lengths, strict=True)):
                    kept.pop()
                if not kept or kept[-1][1] is not state:
                    kept.append((list(self.lengths), state))
                del kept[: -1 - self.rewinds]

    def _after(self, kept: list[tuple[list[int], LayerState]], lengths: list[int]) -> LayerState:
        """Return the state after ``lengths[b]`` tokens of sequence ``b``."""
        places: dict[int, list[int]] = {}  # sequences by the number of the kept state
        for row, length in enumerate(lengths):
            numbers = [number for number, (ends, _) in enumerate(kept) if ends[row] == length]
            if not numbers and length:
                raise ValueError(
                    f"the state after {length} tokens of sequence {row} is not kept; call cache.expect(counts) before "
                    "a prompt's pass, and set cache.rewinds before passes that crop takes back"
                )
            places.setdefault(numbers[-1] if numbers else EMPTY, []).append(row)
        if len(places) == 1:
            (place,) = places
            return LayerState() if place == EMPTY else kept[place][1]
        return joined([(rows, kept[at][1].of(rows)) for at, rows in places.items() if at != EMPTY], self.batch)
