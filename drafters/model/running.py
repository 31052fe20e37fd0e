"""Running states: the convolution windows and recurrent states that some layers keep (gated DeltaNet, Mamba, LFM2).

Such a layer has one state per sequence, from which no token can be taken away. So a pass over a chain notes what each
layer was called with and what its linear projections gave. When a part of the chain is accepted, the layer runs again
over that part, from its state before the pass. It reads the noted projections, not their weights.

A cache, ``RunningCache``, has these states beside keys and values. A batch needs no padding rule: tokens behind a
sequence's own are taken back like rejected ones.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from drafters.model.cache import KVCache, Shape
from drafters.model.runner import model_time
from drafters.model.variants import variant

CHAINS_ONLY = "has layers with a running state, which verify chains only, no trees and no scratch rows"
HELD, EMPTY = -1, -2  # in place of a pass: the state of the committed tokens, the state before any token
ALL = -1  # tokens of a pass


class LayerState(LinearAttentionCacheLayerMixin):
    """Windows and recurrent states of one layer, ``[B, ...]`` each. A pass puts new tensors in place of the old ones."""

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

    def fresh(self, count: int) -> "LayerState":
        """Return a copy for a pass over ``count`` tokens; transformers changes tensors in place if there is one token."""
        return self.map(torch.clone if count == 1 else lambda value: value)

    def of(self, rows: list[int] | None) -> "LayerState":
        """Return the state of some sequences; None: of all."""
        return self if rows is None else self.map(lambda value: value[rows])


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

    def __init__(self, cache: KVCache, layers: list[Any] | None = None) -> None:
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


class _Tape(threading.local):
    """Outputs of linear layers ``[B, R, ...]``, noted or read in this thread; ``cut`` takes a part of one."""

    outputs: dict[int, Tensor] | None = None
    cut: Callable[[Tensor], Tensor] | None = None


_tape = _Tape()


@contextmanager
def _taped(outputs: dict[int, Tensor] | None, cut: Callable[[Tensor], Tensor] | None = None) -> Iterator[None]:
    _tape.outputs, _tape.cut = outputs, cut
    try:
        yield
    finally:
        _tape.outputs = _tape.cut = None


class _Linear(nn.Module):
    """A linear layer of a mixer, whose outputs are noted, and read when the mixer runs again."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = (linear,)  # in a tuple: not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.linear[0], name)

    def forward(self, values: Tensor, *args: Any, **named: Any) -> Tensor:
        key, outputs, cut = id(self), _tape.outputs, _tape.cut
        if outputs is not None and cut is not None and key in outputs:
            return cut(outputs[key])
        output: Tensor = self.linear[0](values, *args, **named)
        if outputs is not None and cut is None and output.shape[:2] == values.shape[:2]:
            outputs[key] = output
        return output


class Mixer(nn.Module):
    """Stands for the module with a running state, in a variant of the body.

    Attributes:
        layer: its number in the cache.
        from_zero: True if its pass over several tokens begins without a state; then it runs over one after the other.
    """

    def __init__(self, module: nn.Module, layer: int, from_zero: bool) -> None:
        super().__init__()
        self.from_zero = from_zero
        linears = [part for part in module.modules() if hasattr(part, "in_features")]
        self.inner, self.layer = (variant(module, {id(part): _Linear(part) for part in linears}),), layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner[0], name)

    def forward(self, *args: Any, **named: Any) -> Any:
        for value in (*args, *named.values()):
            if isinstance(value, LayerCache):
                assert isinstance(value.rows, RunningCache)
                return value.rows.run(self, args, named)
        return self.inner[0](*args, **named)


def call(
    mixer: Mixer, state: LayerState, args: Any, named: Any, cut: Callable[[Tensor], Tensor] = lambda value: value
) -> Any:
    """Call a mixer with ``state`` as its layer's state, and ``cut(tensor)`` for each tensor of its arguments."""

    def changed(value: Any) -> Any:
        if isinstance(value, LayerCache):
            return LayerCache(value.rows, [state] * (mixer.layer + 1))
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        return cut(value) if isinstance(value, Tensor) else value

    return mixer.inner[0](*map(changed, args), **{name: changed(value) for name, value in named.items()})


def cutter(total: int, tokens: slice, batch: int = 0, rows: list[int] | None = None) -> Callable[[Tensor], Tensor]:
    """Return a function that takes ``tokens`` of the ``total`` ones, and ``rows`` of the batch, out of ``[B, R, ...]``."""

    def cut(value: Tensor) -> Tensor:
        if value.dim() < 2 or value.shape[1] != total:
            return value
        return (value if rows is None or value.shape[0] != batch else value[rows])[:, tokens]

    return cut


@dataclass
class Pass:
    """One forward of a layer.

    Attributes:
        starts: tokens of each sequence before the new ones. counts: new tokens of each sequence that ``after`` has.
        call: the mixer, its arguments, and the outputs of its linear layers; None where no part of it is asked for.
    """

    starts: list[int]
    counts: list[int]
    before: LayerState
    after: LayerState
    call: tuple[Mixer, Any, Any, dict[int, Tensor]] | None

    def again(self, count: int, rows: list[int] | None) -> LayerState:
        """Return the state of ``rows`` (None: all) after the first ``count`` new tokens, by running them again."""
        assert self.call is not None
        mixer, args, named, outputs = self.call
        state = self.before.of(rows).fresh(count)
        cut = cutter(self.counts[0], slice(count), len(self.starts), rows)
        with _taped(outputs, cut):
            call(mixer, state, args, named, cut)
        return state


class RunningCache(KVCache):
    """A KV cache with the running states of the layers ``mixers``; other arguments are ``KVCache``'s.

    Attributes:
        rewinds: True if ``crop`` may take back what was committed since the last crop (draft models); else only what
            the commit after a pass rejects can be taken back.
    """

    def __init__(self, mixers: Sequence[int], shapes: list[Shape], batch: int, *rest: Any) -> None:
        super().__init__(shapes, batch, *rest)
        self.states: dict[int, LayerState] = {layer: LayerState() for layer in mixers}  # after ``_held`` tokens
        self._passes: dict[int, list[Pass]] = {layer: [] for layer in mixers}
        self._layers, self._held, self._offset = len(shapes), [0] * batch, 0
        self._announced: list[int] | None = None
        self._counts: list[int] | None = None

    def expect(self, counts: list[int]) -> None:
        self._announced = list(counts)

    def at(self, rows: int, offset: int = 0) -> Self:
        super().at(rows, offset)
        self._offset, self._counts, self._announced = offset, self._announced, None
        return self

    def for_layers(self) -> LayerCache:
        """Return the cache as transformers' layers see it in the next forward."""
        return LayerCache(self, [LayerState() for _ in range(self._layers)])

    def run(self, mixer: Mixer, args: Any, named: Any) -> Any:
        """Run a mixer over the new tokens, from the state before them, and note what taking tokens back needs."""
        passes, count = self._passes[mixer.layer], self._rows
        starts = [length + self._offset for length in self.lengths]
        while passes and all(old >= new for old, new in zip(passes[-1].starts, starts, strict=True)):
            passes.pop()  # of tokens that were not committed
        before = passes[-1].after if self._offset else self.states[mixer.layer]
        if mixer.from_zero and count > 1 and any(before.has_previous_state.values()):
            results = []
            for token in range(count):
                after = before.fresh(1)
                results.append(call(mixer, after, args, named, cutter(count, slice(token, token + 1))))
                passes.append(Pass([start + token for start in starts], [1] * self.batch, before, after, None))
                before = after
            return torch.cat(results, dim=1)
        after, outputs = before.fresh(count), dict[int, Tensor]()
        partly = count > 1 and not (self._counts and min(self._counts) == count)
        with _taped(outputs if partly else None):
            result = call(mixer, after, args, named)
        taken = (mixer, args, named, outputs) if partly else None
        passes.append(Pass(starts, [count] * self.batch, before, after, taken))
        if self._counts and partly:
            ends = [start + kept for start, kept in zip(starts, self._counts, strict=True)]
            passes[-1] = Pass(starts, self._counts, before, self._state(mixer.layer, ends), None)
        return result

    def commit(self, rows: list[list[int]]) -> None:
        if any(slots != [*range(len(slots))] for slots in rows):
            raise ValueError(f"the accepted tokens are slots {rows} of a draft, and the target {CHAINS_ONLY}")
        self.commit_first([len(slots) for slots in rows])

    def commit_first(self, counts: list[int]) -> None:
        super().commit_first(counts)
        self._hold(forget=not self.rewinds)

    def crop(self, lengths: list[int]) -> None:
        super().crop(lengths)
        self._hold(forget=True)

    def copy_row(self, row: int, other: KVCache, number: int = 0) -> None:
        super().copy_row(row, other, number)
        assert isinstance(other, RunningCache)
        others = [each for each in range(self.batch) if each != row]
        for layer, state in self.states.items():
            parts = [(others, state.of(others)), ([row], other.states[layer].of([number]))]
            self.states[layer] = joined(parts, self.batch)
        self._held[row] = self.lengths[row]

    def keep_last(self, count: int) -> None:
        raise NotImplementedError("a running state has no first tokens to give up")

    def release(self) -> None:
        super().release()
        self.states, self._passes = {}, {}

    def _hold(self, forget: bool) -> None:
        """Make the states those after ``lengths`` tokens; ``forget``: no earlier ones will be asked for."""
        with torch.no_grad(), model_time():
            states = {layer: self._state(layer, self.lengths) for layer in self.states}
        self.states, self._held = states, list(self.lengths)
        if forget:
            for passes in self._passes.values():
                passes.clear()

    def _state(self, layer: int, lengths: list[int]) -> LayerState:
        """Return a layer's state after ``lengths[b]`` tokens of sequence ``b``."""
        groups: dict[tuple[int, int], list[int]] = {}  # sequences by pass, and by number of its tokens
        for row, length in enumerate(lengths):
            groups.setdefault(self._place(layer, row, length), []).append(row)
        if len(groups) == 1:
            return self._after(layer, *next(iter(groups)), None)
        return joined([(rows, self._after(layer, *place, rows)) for place, rows in groups.items()], self.batch)

    def _place(self, layer: int, row: int, length: int) -> tuple[int, int]:
        """Return where the state after ``length`` tokens is: the pass (or HELD, EMPTY), and tokens of it (or ALL)."""
        if length == self._held[row]:
            return HELD, 0
        passes = self._passes[layer]
        for number in reversed(range(len(passes))):
            count = length - passes[number].starts[row]
            if count >= 0:
                kept = passes[number].counts[row]
                if count not in (0, kept) and (count > kept or passes[number].call is None):
                    break
                return number, ALL if count == kept else count
        if length:
            raise ValueError(f"the running state after {length} tokens of sequence {row} is not kept")
        return EMPTY, 0

    def _after(self, layer: int, number: int, count: int, rows: list[int] | None) -> LayerState:
        """Return the state of ``rows`` (None: all) at a place."""
        if number in (HELD, EMPTY):
            return self.states[layer].of(rows) if number == HELD else LayerState()
        one = self._passes[layer][number]
        if count in (0, ALL):
            return (one.after if count else one.before).of(rows)
        return one.again(count, rows)


class _Probe(LayerCache):
    """Notes what layers keep: the modules with a running state, and the shapes of keys and values."""

    def __init__(self, layers: int) -> None:
        super().__init__(KVCache.nothing(), [_ProbeState(self, number) for number in range(layers)])
        self.mixers: dict[int, nn.Module] = {}
        self.shapes: list[Shape] = [(0, 0, 0)] * layers

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = keys.shape[1], keys.shape[3], values.shape[3]
        return keys, values


class _ProbeState(LayerState):
    """Tells the probe which module updates a state: the first one among the callers."""

    def __init__(self, probe: _Probe, layer: int) -> None:
        super().__init__()
        self.probe, self.layer = probe, layer

    def note(self) -> None:
        frame = sys._getframe(2)
        while not isinstance(frame.f_locals.get("self"), nn.Module):
            assert frame.f_back is not None
            frame = frame.f_back
        self.probe.mixers[self.layer] = frame.f_locals["self"]

    def update_conv_state(self, *args: Any, **named: Any) -> Tensor:
        self.note()
        return super().update_conv_state(*args, **named)

    def update_recurrent_state(self, *args: Any, **named: Any) -> Tensor:
        self.note()
        return super().update_recurrent_state(*args, **named)


@torch.no_grad()
def probe(body: Any, layers: int, device: torch.device) -> tuple[dict[int, nn.Module], list[Shape]]:
    """Return the modules with a running state, by layer, and the shapes of keys and values, by a forward of two tokens."""
    found, tokens = _Probe(layers), torch.zeros(1, 2, dtype=torch.long, device=device)
    body(input_ids=tokens, use_cache=False, **{cache_argument(body): found})
    return found.mixers, found.shapes


def cache_argument(body: Any) -> str:
    """Return the name under which a model's forward takes its cache."""
    return "cache_params" if "cache_params" in inspect.signature(body.forward).parameters else "past_key_values"
