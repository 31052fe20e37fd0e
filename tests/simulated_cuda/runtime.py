"""Replacements of ``torch.cuda``: streams, events, graphs, generators, memory, properties."""

import itertools
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest import mock

import torch

from .device import CUDA, SimulatedCuda
from .graphs import Capture
from .streams import Ticks

TOTAL = 80 << 30  # bytes
HostGenerator = torch.Generator


def _gpu() -> SimulatedCuda:
    if SimulatedCuda.active is None:
        raise RuntimeError("the simulated GPU is gone")
    return SimulatedCuda.active


class Generator(HostGenerator):
    """``torch.Generator(device)``, whose numbers are those of the CPU's with the same seed."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls, "cpu")
        made._where = CUDA if torch.device(device).type == "cuda" else torch.device("cpu")
        if made._where == CUDA:  # operations are given another object of the same generator
            generators = _gpu().generators
            generators.add(made._cdata)
            weakref.finalize(made, generators.discard, made._cdata).atexit = False
        return made

    def __init__(self, device: Any = "cpu") -> None:
        """torch's own is made by ``__new__``."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._where


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self.number = _gpu().streams.new() if number is None else number
        self.device, self.stream_id, self.cuda_stream = CUDA, self.number, self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        _gpu().streams.wait_for(self.number, event.ticks)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _gpu().wait("wait", "Stream.synchronize", _gpu().streams.mark(self.number))

    def __enter__(self) -> None:
        self._before, _gpu().streams.current = _gpu().streams.current, self.number

    def __exit__(self, *exception: object) -> None:
        _gpu().streams.current = self._before


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.timing, self.at = enable_timing, 0.0
        self.ticks: Ticks = {}

    def record(self, stream: Stream | None = None) -> None:
        streams = _gpu().streams
        self.ticks = streams.mark(stream.number if stream is not None else streams.current)
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        _gpu().wait("wait", "Event.synchronize", self.ticks)

    def query(self) -> bool:
        """Whether the host has waited for it: the device is as slow as can be."""
        _refuse_in_capture("Event.query")
        return _gpu().streams.host_knows(self.ticks)

    def elapsed_time(self, end: "Event") -> float:
        if not (self.timing and end.timing and self.query() and end.query()):
            raise RuntimeError("CUDA error: the time between these events is not known")
        return 1e3 * (end.at - self.at)


def _refuse_in_capture(what: str) -> None:
    if _gpu().own.capture is not None:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")


class CUDAGraph:
    """``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.captured: Capture | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpu = _gpu()
        if gpu.own.capture is not None:
            raise RuntimeError("CUDA error: a graph is being captured already")
        if gpu.streams.current == 0:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        gpu.own.capture = Capture()

    def capture_end(self) -> None:
        gpu = _gpu()
        assert gpu.own.capture is not None
        self.captured, gpu.own.capture = gpu.own.capture, None
        self.captured.end()
        gpu.note("capture", f"{len(self.captured.operations)} operations")

    def replay(self) -> None:
        gpu = _gpu()
        if self.captured is None:
            raise RuntimeError("CUDAGraph.replay without a preceding successful capture")
        if gpu.own.capture is not None:
            _refuse_in_capture("replay")
        gpu.note("replay", f"{len(self.captured.operations)} operations")
        self.captured.replay()
        gpu.streams.launch("a graph", self.captured.reads, self.captured.writes)


class graph:  # noqa: N801  # as torch names it
    """``torch.cuda.graph``."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph, self._pool, self._stream = cuda_graph, pool, stream or Stream()

    def __enter__(self) -> None:
        gpu = _gpu()
        gpu.wait("wait", "torch.cuda.graph", gpu.streams.everything())
        self._stream.__enter__()
        gpu.captured_on.append(self._stream.number)
        self._graph.capture_begin(self._pool)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        gpu = _gpu()
        if error is None:
            self._graph.capture_end()
        elif gpu.own.capture is not None:
            gpu.own.capture.end()
            gpu.own.capture = None
        self._stream.__exit__()


_pools = itertools.count(1)


def graph_pool_handle() -> tuple[int, int]:
    """``torch.cuda.graph_pool_handle``."""
    return (0, next(_pools))


def current_stream(device: Any = None) -> Stream:
    """``torch.cuda.current_stream``."""
    return Stream(number=_gpu().streams.current)


@contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """``torch.cuda.stream``."""
    if chosen is None:
        yield
        return
    with chosen:
        yield


def synchronize(device: Any = None) -> None:
    """``torch.cuda.synchronize``."""
    gpu = _gpu()
    gpu.wait("wait", "torch.cuda.synchronize", gpu.streams.everything())


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="Simulated GPU", uuid="0" * 8, total_memory=TOTAL, major=9, minor=0, multi_processor_count=132
    )


@contextmanager
def _device(device: Any) -> Iterator[None]:
    yield


@contextmanager
def replaced_cuda(gpu: SimulatedCuda) -> Iterator[None]:
    """``torch.cuda`` and ``torch.Generator`` are those of the simulation."""
    used = {"peak": 0}

    def allocated(device: Any = None) -> int:
        used["peak"] = max(used["peak"], gpu.streams.bytes_in_use())
        return gpu.streams.bytes_in_use()

    def peak(device: Any = None) -> int:
        allocated()
        return used["peak"]

    def set_sync_debug_mode(mode: int | str) -> None:
        warnings.warn("Synchronization debug mode does not yet detect all synchronizing operations", stacklevel=2)
        gpu.sync_debug = mode

    def nothing() -> Any:  # one each: torch.compile's tables know functions by their identity
        return lambda *given, **named: None

    replaced = {
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": graph_pool_handle,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(number=0),
        "stream": stream,
        "device": _device,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: gpu.own.capture is not None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": nothing(),
        "init": nothing(),
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing(),
        "get_device_name": lambda device=None: "Simulated GPU",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": _properties,
        "is_bf16_supported": lambda *given: True,
        "mem_get_info": lambda device=None: (TOTAL - allocated(), TOTAL),
        "memory_allocated": allocated,
        "memory_reserved": lambda device=None: allocated(),
        "max_memory_allocated": peak,
        "max_memory_reserved": lambda device=None: peak(),
        "memory_stats": lambda device=None: defaultdict(int, {"allocated_bytes.all.current": allocated()}),
        "reset_peak_memory_stats": lambda device=None: used.update(peak=0),
        "get_sync_debug_mode": lambda: gpu.sync_debug,
        "set_sync_debug_mode": set_sync_debug_mode,
        "empty_cache": lambda: _refuse_in_capture("empty_cache"),
        "manual_seed": nothing(),  # the default generator is the host's, which torch.manual_seed has seeded
        "manual_seed_all": nothing(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    }
    with ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", lambda: True))
        yield
