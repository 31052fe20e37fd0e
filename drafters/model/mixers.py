"""The modules with a running state, and how they read prompts and chains (``drafters/model/running.py``).

A ``Mixer`` replaces such a module in a variant of the body. Its code is transformers' own; only the states are
handed to it, and its linear layers are called for all tokens of a chain at once.
"""

import inspect
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drafters.model.cache import KVCache, Shape
from drafters.model.runner import identity
from drafters.model.running import LayerCache, LayerState, RunningCache, joined
from drafters.model.variants import variant


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
    """Replaces a module with a running state, in a variant of the body.

    Attributes:
        layer: its number in the cache. last: the linear layer whose outputs are its own; None where not known.
        from_zero: True if its pass over several tokens begins without a state, as transformers' Mamba 1 does.
    """

    def __init__(self, module: nn.Module, layer: int, from_zero: bool) -> None:
        super().__init__()
        linears = [part for part in module.modules() if hasattr(part, "in_features")]
        self.inner, self.layer = (variant(module, {id(part): _Linear(part) for part in linears}),), layer
        self.from_zero = from_zero
        self.last: tuple[_Linear | None] = (None,)  # in a tuple: not a submodule

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

    def read_whole(
        self, before: LayerState, args: Any, named: Any, total: int, counts: list[int]
    ) -> tuple[LayerState, Any]:
        """Call it over the first ``counts[b]`` of ``total`` tokens, for sequences of each length apart.

        Returns:
            The state after them, and its result for all tokens, zeros for the others.
        """
        if min(counts) == total:
            after = before.fresh(total)
            return after, self.call(after, args, named)
        parts, output, result = [], None, None
        for count in sorted(set(counts) - {0}):
            rows = [row for row, each in enumerate(counts) if each == count]
            parts.append((rows, before.of(rows).fresh(count)))
            result = self.call(
                parts[-1][1], args, named, partial(cut_rows, total=total, batch=len(counts), rows=rows, count=count)
            )
            if output is None:
                output = first(result).new_zeros(len(counts), total, *first(result).shape[2:])
            output[rows, :count] = first(result)
        assert output is not None
        return joined(parts, len(counts)), with_first(result, output)

    def read_chain(self, state: LayerState, args: Any, named: Any, count: int) -> tuple[list[LayerState], Any]:
        """Call it over ``count`` tokens one by one; return the state after each, and its result for all."""
        states, results = [], []
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
                state = state.fresh(1)
                states.append(state)
                results.append(self.call(state, args, named, cut))
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


def cut_rows(value: Tensor, total: int, batch: int, rows: list[int], count: int) -> Tensor:
    """Return sequences ``rows`` and the first ``count`` of ``total`` tokens of a tensor ``[B or 1, R, ...]``."""
    if value.dim() < 2 or value.shape[1] != total:
        return value
    return (value[rows] if value.shape[0] == batch else value)[:, :count]


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
