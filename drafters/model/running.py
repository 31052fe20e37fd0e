"""Running states: the convolution windows and recurrent states that some layers keep (gated DeltaNet, Mamba, LFM2).

Such a layer has one state per sequence, from which no token can be taken away. So it reads a chain token by token, and
the cache keeps the state after each: the commit chooses one per sequence. What needs no state is done for all tokens at
once: the layer's projections of its input, its output projection, and the rest of the model.

Prompts are read in one pass, whose end is announced (``expect``). Sequences of unequal length are read apart there, so
that no padding gets into a state.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Cache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from drafters.model.cache import KVCache, Shape
from drafters.model.runner import identity, model_time
from drafters.model.variants import variant

CHAINS_ONLY = "has layers with a running state, which verify chains only, no trees and no scratch rows"
HELD, EMPTY = -1, -2  # in place of a pass: the state of the committed tokens, the state before any token


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

    def fresh(self, count: int) -> "LayerState":
        """Return a copy for a pass over ``count`` tokens; transformers changes the tensors in place for one token."""
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


class _Chain(threading.local):
    """What a mixer's linear layers share while it reads a chain token by token, in this thread.

    Attributes:
        inputs: inputs of the mixer: the part for the present token and all tokens ``[B, R, ...]``, by the part's id.
        outputs: outputs of linear layers for all tokens, by the layer. token: number of the present one.
        last: the layer whose outputs are the mixer's; it is called for all tokens afterwards. latest: what it gave.
    """

    inputs: dict[int, tuple[Tensor, Tensor]]
    outputs: dict["_Linear", Tensor]
    token: int | None = None
    last: "_Linear | None" = None
    latest: "tuple[_Linear, Tensor] | None" = None


_chain = _Chain()


class _Linear(nn.Module):
    """A linear layer of a mixer. While the mixer reads a chain, it reads its weights once for all tokens if it can."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = (linear,)  # in a tuple: not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.linear[0], name)

    def forward(self, values: Tensor, *args: Any, **named: Any) -> Tensor:
        if _chain.token is None:
            return self.linear[0](values, *args, **named)
        if self is _chain.last:
            return values
        if self not in _chain.outputs and id(values) in _chain.inputs:
            _chain.outputs[self] = self.linear[0](_chain.inputs[id(values)][1], *args, **named)
        if self in _chain.outputs:
            return _chain.outputs[self][:, _chain.token : _chain.token + 1]
        output: Tensor = self.linear[0](values, *args, **named)
        _chain.latest = self, output
        return output


class Mixer(nn.Module):
    """Stands for the module with a running state, in a variant of the body.

    Attributes:
        layer: its number in the cache. last: the linear layer whose outputs are its own; None where not known.
        from_zero: True if its pass over several tokens begins without a state, as transformers' Mamba 1 does.
    """

    def __init__(self, module: nn.Module, layer: int, from_zero: bool) -> None:
        super().__init__()
        linears = [part for part in module.modules() if hasattr(part, "in_features")]
        self.inner, self.layer = (variant(module, {id(part): _Linear(part) for part in linears}),), layer
        self.from_zero, self.last = from_zero, (None,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner[0], name)

    def forward(self, *args: Any, **named: Any) -> Any:
        for value in (*args, *named.values()):
            if isinstance(value, LayerCache):
                assert isinstance(value.rows, RunningCache)
                return value.rows.run(self, args, named)
        return self.inner[0](*args, **named)

    def call(self, state: LayerState, args: Any, named: Any, cut: Callable[[Tensor], Tensor] = identity) -> Any:
        """Call it with ``state`` as its layer's state, and with ``cut(tensor)`` for each tensor of its arguments."""

        def changed(value: Any) -> Any:
            if isinstance(value, LayerCache):
                return LayerCache(value.rows, [state] * (self.layer + 1))
            if isinstance(value, tuple):
                return tuple(map(changed, value))
            return cut(value) if isinstance(value, Tensor) else value

        return self.inner[0](*map(changed, args), **{name: changed(value) for name, value in named.items()})

    def read_chain(self, state: LayerState, args: Any, named: Any, count: int) -> tuple[list[LayerState], Any]:
        """Call it over ``count`` tokens one by one; return the state after each, and its result for all."""
        states, results = [state], []
        _chain.outputs, _chain.last = {}, self.last[0]
        try:
            for token in range(count):
                inputs: dict[int, tuple[Tensor, Tensor]] = {}

                def cut(value: Tensor, token: int = token, inputs: Any = inputs) -> Tensor:
                    if value.dim() < 2 or value.shape[1] != count:
                        return value
                    part = value[:, token : token + 1]
                    inputs[id(part)] = part, value
                    return part

                _chain.token, _chain.inputs = token, inputs
                states.append(states[-1].fresh(1))
                results.append(self.call(states[-1], args, named, cut))
        finally:
            _chain.token = None
        output = torch.cat([first(result) for result in results], dim=1)
        if self.last[0] is not None:
            output = self.last[0](output)
        elif _chain.latest is not None and _chain.latest[1] is first(results[-1]):
            self.last = (_chain.latest[0],)
        _chain.latest, _chain.outputs = None, {}
        return states, with_first(results[-1], output)


def first(result: Any) -> Tensor:
    """Return a mixer's output; some hand over more."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def with_first(result: Any, output: Tensor) -> Any:
    """Return a mixer's result with another output."""
    return (output, *result[1:]) if isinstance(result, tuple) else output


@dataclass
class Pass:
    """One pass of a layer over new tokens.

    Attributes:
        starts: tokens of each sequence before the new ones.
        ends: tokens of each sequence that ``after`` has read.
    """

    starts: list[int]
    ends: list[int]
    before: LayerState
    after: LayerState


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

    def run(self, mixer: Mixer, args: Any, named: Any) -> Any:
        """Run a mixer over the new tokens, from the state before them; keep the states that a commit may ask for."""
        passes, count = self._passes[mixer.layer], self._rows
        starts = [length + self._offset for length in self.lengths]
        while passes and all(old >= new for old, new in zip(passes[-1].starts, starts, strict=True)):
            passes.pop()  # of tokens that were not committed
        before = passes[-1].after if self._offset else self.states[mixer.layer]
        begun = any(before.has_previous_state.values())
        counts = [count] * self.batch if count == 1 or not begun else None
        if self._announced is not None and not (mixer.from_zero and begun):
            counts = self._announced
        if counts is not None:  # whole: nothing of them will be rejected
            after, result = self._read(mixer, before, counts, args, named)
            passes.append(
                Pass(starts, [start + kept for start, kept in zip(starts, counts, strict=True)], before, after)
            )
            return result
        states, result = mixer.read_chain(before, args, named, count)
        for token, (before, after) in enumerate(pairwise(states)):
            ends = [start + token + 1 for start in starts]
            passes.append(Pass([end - 1 for end in ends], ends, before, after))
        return result

    def _read(
        self, mixer: Mixer, before: LayerState, counts: list[int], args: Any, named: Any
    ) -> tuple[LayerState, Any]:
        """Call a mixer over the first ``counts[b]`` new tokens, for sequences of each length apart."""
        if min(counts) == self._rows:
            after = before.fresh(self._rows)
            return after, mixer.call(after, args, named)
        parts, output, result = [], None, None
        for count in sorted(set(counts)):
            rows = [row for row, each in enumerate(counts) if each == count]
            state = before.of(rows).fresh(count)
            parts.append((rows, state))
            if count:
                result = mixer.call(state, args, named, cutter(self._rows, self.batch, rows, count))
                if output is None:
                    output = first(result).new_zeros(self.batch, self._rows, *first(result).shape[2:])
                output[rows, :count] = first(result)
        assert output is not None
        return joined(parts, self.batch), with_first(result, output)

    def commit(self, rows: list[list[int]]) -> None:
        if any(slots != [*range(len(slots))] for slots in rows):
            raise ValueError(f"the accepted tokens are slots {rows} of a draft, and the target {CHAINS_ONLY}")
        self.commit_first([len(slots) for slots in rows])

    def commit_first(self, counts: list[int]) -> None:
        super().commit_first(counts)
        self._announced = None
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
        groups: dict[tuple[int, bool], list[int]] = {}  # sequences by the place of their state
        for row, length in enumerate(lengths):
            groups.setdefault(self._place(layer, row, length), []).append(row)
        if len(groups) == 1:
            return self._after(layer, *next(iter(groups)), None)
        return joined([(rows, self._after(layer, *place, rows)) for place, rows in groups.items()], self.batch)

    def _place(self, layer: int, row: int, length: int) -> tuple[int, bool]:
        """Return the pass (or HELD, EMPTY) beside which the state after ``length`` tokens is; True for after it."""
        if length == self._held[row]:
            return HELD, True
        for number, one in reversed(list(enumerate(self._passes[layer]))):
            if length in (one.ends[row], one.starts[row]):
                return number, length == one.ends[row]
        if length:
            raise ValueError(
                f"the running state after {length} tokens of sequence {row} is not kept; announce what a prompt's pass "
                "keeps with cache.expect(counts), and set cache.rewinds before passes that crop takes back"
            )
        return EMPTY, True

    def _after(self, layer: int, number: int, after: bool, rows: list[int] | None) -> LayerState:
        """Return the state of ``rows`` (None: all) at a place."""
        if number in (HELD, EMPTY):
            return self.states[layer].of(rows) if number == HELD else LayerState()
        one = self._passes[layer][number]
        return (one.after if after else one.before).of(rows)


def cutter(total: int, batch: int, rows: list[int], count: int) -> Callable[[Tensor], Tensor]:
    """Return a function that takes ``rows`` and the first ``count`` of ``total`` tokens out of ``[B or 1, R, ...]``."""

    def cut(value: Tensor) -> Tensor:
        if value.dim() < 2 or value.shape[1] != total:
            return value
        return (value[rows] if value.shape[0] == batch else value)[:, :count]

    return cut


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
    """Return the modules with a running state, by layer, and the shapes of keys and values: by a short forward."""
    found, tokens = _Probe(layers), torch.zeros(1, 2, dtype=torch.long, device=device)
    body(input_ids=tokens, use_cache=False, **{cache_argument(body): found})
    return found.mixers, found.shapes


def cache_argument(body: Any) -> str:
    """Return the name under which a model's forward takes its cache."""
    return "cache_params" if "cache_params" in inspect.signature(body.forward).parameters else "past_key_values"
