"""The one way to run layers: an engine, chosen once, for ranges of a target's layers and for learned heads.

An engine makes its own of transformers' modules, and runs a ``Part`` of them over a cache. Here is "fused";
"graphs" and "compiled" are in graphs.py, and "stock", which runs a target whole, in stock.py.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedModel

from drafters.config import Engine
from drafters.model import backend
from drafters.model.cache import KVCache, Shape, StorageRows, config_shapes
from drafters.model.fused import FusedLayer, FusedNorm, signed, why_not
from drafters.model.linear import Product
from drafters.model.rows import CHAIN, EVERYTHING, BufferedRows, Placed, Rope, Rows, Scope, additive

if TYPE_CHECKING:
    from drafters.model.target import TargetModel

# (hidden states [B, R, H], angles, mask or bias, cache, its layer) -> hidden states
Layer = Callable[[Tensor, Any, Tensor | None, Any, int], Tensor]
Transform = Callable[[Tensor], Tensor]
Taps = dict[int, Tensor]
Mark = float | torch.cuda.Event


# Of attention on CUDA. Not cuDNN's, which torch prefers on Hopper from 2.11 on: it makes a plan for every new length,
# and in decoding every step has one.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """Context in which attention on CUDA goes through ``KERNELS``; nothing changes on other devices."""
    return sdpa_kernel(KERNELS) if device.type == "cuda" else nullcontext()


def identity(value: Any) -> Any:
    """Return ``value`` unchanged."""
    return value


class PartLayer(NamedTuple):
    """A layer as an engine runs it, its number in the cache, what it attends to, its device if layers are spread."""

    layer: Layer
    number: int
    scope: Scope = EVERYTHING
    device: torch.device | None = None


@dataclass(eq=False)
class Part:
    """What one forward runs: ``leave(layers(enter(*inputs)))``.

    Attributes:
        enter: inputs ``[B, R, ...]`` each -> hidden states ``[B, R, H]``. leave: transform of the last layer's output.
        scopes: scopes of its layers. groups: query heads per key head, for the bias's shape.
        few_rows: number of new tokens that need no bias to be causal, for sequences of any length (``FusedAttention``).
        rope: RoPE of its layers; None: the target's.
        captured: captured forwards of fixed shape. uncaptured: why none can be captured; None while they can.
        joined: layers by taps, as ``backend.join_layers`` returns them; cleared when a layer is quantised.
    """

    layers: list[PartLayer]
    enter: Callable[..., Tensor] = identity
    leave: Transform = identity
    rope: Rope | None = None
    captured: dict[Any, Any] = field(default_factory=dict)
    uncaptured: str | None = None
    joined: dict[tuple[int, ...], Sequence[PartLayer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scopes = frozenset(layer.scope for layer in self.layers)
        self.groups: int = getattr(self.layers[0].layer, "groups", 1)
        self.few_rows: int = getattr(self.layers[0].layer, "few_rows", 0)

    def through(
        self, hidden: Tensor, angles: Any, masks: dict[Scope, Tensor | None], cache: Any, taps: tuple[int, ...]
    ) -> tuple[Tensor, Taps]:
        """Run the layers, then ``leave``: ``[B, R, H]``, and the taps (tap l is what enters layer l)."""
        collected: Taps = {}
        layers: Sequence[PartLayer] = self.layers
        if cache is None or isinstance(cache, KVCache):
            if taps not in self.joined:
                self.joined[taps] = backend.join_layers(layers, taps)
            layers = self.joined[taps]
        for layer, number, scope, device in layers:
            if number in taps:
                collected[number] = hidden
            if device is not None and hidden.device != device:
                hidden, angles = hidden.to(device), tuple(part.to(device) for part in angles)
                masks = {each: None if mask is None else mask.to(device) for each, mask in masks.items()}
            hidden = layer(hidden, angles, masks[scope], cache, number)
        if (last := self.layers[-1].number + 1) in taps:
            collected[last] = hidden
        return self.leave(hidden), collected


class StockLayer:
    """One of transformers' own decoder layers."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, hidden: Tensor, angles: Any, mask: Tensor | None, cache: KVCache | None, index: int) -> Tensor:
        """``[B, R, H]`` -> ``[B, R, H]``; ``angles``: cos, sin and positions."""
        states: Tensor = self.layer(
            hidden,
            attention_mask=mask,
            position_ids=angles[2],
            past_key_values=cache,
            use_cache=cache is not None,
            position_embeddings=angles[:2],
        )
        return states


class Rotary(NamedTuple):
    """A learned head's own RoPE: its module, and the configuration of its layers."""

    module: nn.Module
    config: PretrainedConfig


class Runner:
    """Runs parts, of fused layers where the layers allow it: the engine "fused".

    Args:
        model: owner of the kind of attention that all parts share, and of the angles of parts without their own.

    Attributes:
        rewrites: True if it runs a target's layers one by one, rewritten; else it runs the model's own forward.
        norm, linear: functions that make the engine's own of a norm, a linear layer.
        mixers: numbers of the target's layers with a running state.
    """

    engine: Engine = "fused"
    mixers: Sequence[int] = ()
    rewrites: ClassVar[bool] = True
    norm: Callable[[Any], Transform] = FusedNorm
    linear: Callable[[Any], Transform] = staticmethod(lambda linear: Product(linear.weight, linear.bias))

    def __init__(self, model: PreTrainedModel) -> None:
        # Looked up once: an attribute of a config costs a microsecond or more, and this is wanted in every forward.
        self._adds = model.config._attn_implementation == "eager"
        self.model = model

    @cached_property
    def rope(self) -> Rope:
        """The target's RoPE, for fused layers."""
        return self._rope_of(None, True)

    def _rope_of(self, rotary: Rotary | None, fused: bool) -> Rope:
        model: Any = self.model
        module, config = rotary or (model.model.rotary_emb, model.config)
        return Rope(module, config, signed if fused else identity, model.get_input_embeddings().weight)

    def shapes(self) -> list[Shape]:
        """What each of the target's layers keeps of a token."""
        return config_shapes(self.model.config)

    def new_cache(self, *shape: Any) -> KVCache:
        """An empty cache of at least that capacity; arguments and errors are ``KVCache``'s."""
        return KVCache(*shape)

    def part(
        self,
        layers: Sequence[nn.Module],
        enter: Callable[..., Tensor] = identity,
        leave: Transform = identity,
        rotary: Rotary | None = None,
        scopes: Sequence[Scope] | None = None,
    ) -> Part:
        """A learned head's part: its layers, over a cache of their own, and what comes before and after them.

        ``scopes``: what each layer attends to; by default all tokens before.
        """
        config = self.model.config if rotary is None else rotary.config
        fused = not any(why_not(layer, config) for layer in layers)
        kind = FusedLayer if fused else StockLayer
        pairs = zip(layers, scopes or [EVERYTHING] * len(layers), strict=True)
        part_layers = [PartLayer(kind(layer), number, scope) for number, (layer, scope) in enumerate(pairs)]
        rope = self._rope_of(rotary, fused)
        if not rope.by_length:
            rope.table(1)  # an error comes here, not in the first step
        return Part(part_layers, enter, leave, rope)

    def forward(
        self,
        target: "TargetModel",
        inputs: Tensor,
        cache: KVCache | None,
        rows: Rows = CHAIN,
        taps: tuple[int, ...] = (),
        start: int = 0,
        stop: int | None = None,
    ) -> tuple[Tensor, Taps]:
        """As ``TargetModel.run``; with ``stop``, the states after that many layers."""
        return self.run(target.part(start, stop), [inputs], cache, rows, taps)

    def run(
        self,
        part: Part,
        inputs: Sequence[Tensor],
        cache: KVCache | None,
        rows: Rows = CHAIN,
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, Taps]:
        """Run R new tokens through a part.

        Args:
            inputs: ``[B, R, ...]`` each, inputs of the part.
            cache: cache for the tokens' keys and values, from slot ``length + offset`` on; None attends within the R
                tokens.
            taps: hidden states to hand out, by the number of layers before them.

        Returns:
            ``[B, R, H]`` and the taps, which later calls leave alone.
        """
        batch, count = inputs[0].shape[:2]
        lengths = cache.lengths if cache is not None else [0] * batch
        with model_time():
            return self._run(
                part,
                inputs,
                cache,
                Placed(rows, lengths, count, inputs[0].device, cache.dropped if cache is not None else None),
                taps,
            )

    def _run(
        self, part: Part, inputs: Sequence[Tensor], cache: KVCache | None, rows: Placed, taps: tuple[int, ...]
    ) -> tuple[Tensor, Taps]:
        if cache is not None:
            cache.at(rows.count, rows.offset)
        with attention_kernels(rows.device):
            hidden, collected = self.operations(part, inputs, cache, rows, taps)
        if hidden.device != rows.device:  # output on the input's device
            hidden = hidden.to(rows.device)
        return hidden, {index: tap.to(rows.device) for index, tap in collected.items()}

    def operations(
        self,
        part: Part,
        inputs: Sequence[Tensor],
        cache: KVCache | StorageRows | None,
        rows: Placed | BufferedRows,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Taps]:
        """Run a part over a cache directed at the new tokens' slots. With buffers, it can be captured."""
        hidden = part.enter(*inputs)
        angles: tuple[Tensor, ...] = (part.rope or self.rope)(rows)
        masks: dict[Scope, Tensor | None]
        if isinstance(part.layers[0].layer, StockLayer):
            angles = (*angles, rows.text_positions())
            masks = {scope: self._mask(rows, scope, hidden.dtype, self._adds) for scope in part.scopes}
        else:
            causal = cache is not None and rows.count <= part.few_rows
            masks = {scope: rows.bias(scope, part.groups, hidden.dtype, causal) for scope in part.scopes}
        return part.through(hidden, angles, masks, cache, taps)

    def _mask(self, rows: Placed | BufferedRows, scope: Scope, dtype: torch.dtype, always: bool) -> Tensor | None:
        """The mask of a layer of transformers': added under eager attention, which takes no other."""
        mask = rows.mask(scope, always)
        return additive(mask, 1, dtype, torch.finfo(dtype).min) if mask is not None and self._adds else mask


class Clock:
    """Splits a step's time into laps, and notes the part of each that forward passes took.

    On CUDA by events, so that timing adds no synchronisation. A thread has one clock at a time: the newest.

    ``models``: beginning and end of each forward pass, by lap.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._marks: list[Mark] = [self.now()]
        self.models: list[list[tuple[Mark, Mark]]] = [[]]
        _running.clock = self

    def now(self) -> Mark:
        """The time, or an event that will tell it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lap(self) -> None:
        """End the current lap and begin the next."""
        self._marks.append(self.now())
        self.models.append([])

    def laps(self) -> tuple[list[float], list[float]]:
        """Seconds of every lap, and of the forward passes in it; waits for the device."""
        if _running.clock is self:
            _running.clock = None
        if self._cuda:
            torch.cuda.synchronize(self._device)
        laps = [_seconds(a, b) for a, b in pairwise(self._marks)]
        return laps, [sum(_seconds(a, b) for a, b in passes) for passes in self.models[: len(laps)]]


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


class _Running(threading.local):
    clock: Clock | None = None


_running = _Running()


class model_time:  # noqa: N801  # a class, for a generator's context manager takes ten times as long
    """``with model_time():`` counts what runs inside as a forward pass, if a clock is running in this thread."""

    __slots__ = ("_clock", "_start")

    def __enter__(self) -> None:
        self._clock = _running.clock
        if self._clock is not None:
            self._start = self._clock.now()

    def __exit__(self, *exception: object) -> None:
        if self._clock is not None:
            self._clock.models[-1].append((self._start, self._clock.now()))
