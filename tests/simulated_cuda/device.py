"""A CUDA device for machines without one: ``with simulated_cuda() as gpu:``.

Tensors on it carry a logical device, "cuda:0", and live in CPU memory with real values. What CUDA refuses is refused
(operands on two devices, a generator of another device, NumPy), and what costs time there is written down with the line
of the code that asked for it: copies between host and device, and waiting for the device. Copies to or from pinned
memory with ``non_blocking=True`` are late, as they may be there: what they bring to the host is there after the next
synchronisation and not before. Work of two streams must be ordered by events. runtime.py replaces ``torch.cuda``,
graphs.py the capture of graphs, calls.py the calls that name a device or leave it.

How: ``CudaTensor`` is a subclass of ``torch.Tensor`` on CPU memory. A function mode sees every call with its ``device``
arguments; a dispatch mode sees every operation that remains of it, checks and counts, and lets the CPU compute it.
"""

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from .graphs import Capture
from .streams import Streams, Ticks, storages_written
from .trees import tensors_in, with_tensors

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
HERE = f"{Path(__file__).resolve().parent}/"
OURS = tuple(f"{ROOT / room}/" for room in ("drafters", "train", "data_prep", "eval", "tests"))
aten = torch.ops.aten

# Operations that give the host a number, or a tensor whose size depends on values: all earlier work must end first.
READS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.equal,
    aten._unique2,
    aten.unique_dim,
    aten.unique_consecutive,
    aten.bincount,
}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
# Operations beside the pointwise ones that take a host tensor without dimensions as a number.
TAKE_NUMBERS = {aten.fill_, aten.masked_fill, aten.masked_fill_, aten.where, aten._foreach_mul_, aten._foreach_div_}


class CudaTensor(torch.Tensor):
    """CPU memory that says it is on the GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda, is_cpu = property(lambda self: True), property(lambda self: False)

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory is never reused while it is in use here."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SimulatedCuda.active is None:
            raise RuntimeError(f"{func} on a tensor of a simulated GPU that is gone")
        return SimulatedCuda.active.dispatch(func, args, kwargs or {})


@dataclass(frozen=True)
class Event:
    """Something that the host and the device did together.

    Attributes:
        kind: "read" (device to host, the host waits), "upload" (host to device from pageable memory, the host waits),
            "late read" and "late upload" (non-blocking, through pinned memory), "wait" (synchronisation that was asked
            for), "capture", "replay".
        what: the operation. where: the line of this project that asked for it.
        queued: operations that the stream was given since the host last waited for it.
    """

    kind: str
    what: str
    where: str
    queued: int


class OfThread(threading.local):
    """What each thread has for itself.

    Attributes:
        capture: the graph that it is capturing.
        placing: where a call that names no tensor puts what it makes.
        filling: a number is being written into a tensor.
    """

    capture: Capture | None = None
    placing: torch.device = HOST
    filling: bool = False


@dataclass
class SimulatedCuda:
    """The device.

    Attributes:
        log: what happened, in order.
        streams: the order of work.
        own: what each thread has for itself.
        captured_on: the number of the stream that each graph was captured on.
        sync_debug: "warn", 1: warns of operations that wait for the device.
        grouped: dtypes that have a kernel for grouped products; in others the host reads the sizes of the groups.
    """

    log: list[Event] = field(default_factory=list)
    streams: Streams = field(default_factory=Streams)
    own: OfThread = field(default_factory=OfThread)
    lock: Any = field(default_factory=threading.RLock)
    active: ClassVar["SimulatedCuda | None"] = None
    captured_on: list[int] = field(default_factory=list)
    sync_debug: int | str = 0
    grouped: set[torch.dtype] = field(default_factory=lambda: {torch.bfloat16})
    generators: set[int] = field(default_factory=set)  # those of the device
    special: dict[Any, Callable[..., Any]] = field(default_factory=dict)  # calls.py
    _late: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _pinned: dict[int, Any] = field(default_factory=dict)

    # What happened

    def note(self, kind: str, what: str) -> None:
        """Write an event down."""
        self.log.append(Event(kind, what, where(), self.streams.queued.get(self.streams.current, 0)))

    def count(self, kind: str) -> int:
        """How many events of a kind there were."""
        return sum(event.kind == kind for event in self.log)

    def places(self, *kinds: str) -> Counter[str]:
        """How often each line caused an event of these kinds."""
        return Counter(event.where for event in self.log if event.kind in kinds)

    def wait(self, kind: str, what: str, ticks: Ticks | None = None) -> None:
        """The host waits for the current stream, or for ``ticks``."""
        if self.own.capture is not None:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        if self.sync_debug in ("warn", 1) and kind != "wait":
            warnings.warn(f"called a synchronizing CUDA operation ({what})", stacklevel=2)
        with self.lock:
            self.note(kind, what)
            self.settle(self.streams.mark(self.streams.current) if ticks is None else ticks)

    def settle(self, ticks: Ticks) -> None:
        """Let late copies among ``ticks`` arrive."""
        self.streams.host_waits(ticks)
        late, self._late = self._late, []
        for stream, tick, arrive in late:
            if self.streams.host.get(stream, 0) >= tick:
                arrive()
            else:
                self._late.append((stream, tick, arrive))

    # Pinned memory

    def pin(self, value: torch.Tensor) -> torch.Tensor:
        """Note that a host tensor's memory is pinned."""
        if self.own.capture is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing (pinning memory)")
        storage = value.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return value

    def is_pinned(self, value: torch.Tensor) -> bool:
        """Whether a host tensor's memory is pinned."""
        found = self._pinned.get(value.untyped_storage()._cdata)
        return found is not None and not found.expired()

    # Copies

    def move(self, value: torch.Tensor, to: torch.device, non_blocking: bool) -> Any:
        """``value`` on the other device, in new memory."""
        source = plain(value)
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            made = torch.empty_like(source, memory_format=torch.preserve_format)
        if to == CUDA:
            made = on_device(made)
        if to == HOST and non_blocking:
            self.pin(made)
        if self.own.capture is not None and to == CUDA:
            self.own.capture.made(made)
        self.transfer(made, value, non_blocking)
        return made

    def transfer(self, into: torch.Tensor, value: torch.Tensor, non_blocking: bool) -> None:
        """Copy between the devices."""
        with self.lock:
            self._transfer(into, value, non_blocking)

    def _transfer(self, into: torch.Tensor, value: torch.Tensor, non_blocking: bool) -> None:
        target, source = plain(into), plain(value)
        down = isinstance(value, CudaTensor)
        late = non_blocking and self.is_pinned(target if down else source)
        name = f"{'cuda:0 to cpu' if down else 'cpu to cuda:0'}, {list(source.shape)} {source.dtype}"
        if self.own.capture is not None and not late:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing (copy {name})")
        if self.own.capture is None:
            self.streams.launch(f"copy {name}", [value] if down else [], [] if down else [into])
        kind = ("late read" if down else "late upload") if late else ("read" if down else "upload")
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            if not late:
                self.wait(kind, name)
                target.copy_(source)
                return
            self.note(kind, name)
            if self.own.capture is not None:
                self.own.capture.before([target])
                self.own.capture.record(aten.copy_.default, (target, source), {}, target)
                return
            taken = source.clone()
            if down:
                spoil(target)
                self._late.append((*self.streams.now, lambda: _copy(target, taken)))
            else:
                target.copy_(source)
                self._late.append((*self.streams.now, lambda: _unchanged(source, taken, name)))

    # Operations

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation: check it, count it, compute it."""
        with self.lock, torch._C.DisableTorchFunction():
            if torch.is_inference_mode_enabled():  # torch does not decompose operations without autograd
                with Operations(self):
                    made = func.decompose(*args, **kwargs)
                if made is not NotImplemented:
                    return made
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        tensors = tensors_in((args, kwargs))
        placing = self.own.placing
        if (named := kwargs.get("device")) is not None and named.type == "cuda":  # of torch's own Python code
            placing, kwargs = CUDA, {**kwargs, "device": HOST}
        there = any(isinstance(tensor, CudaTensor) for tensor in tensors) or (not tensors and placing == CUDA)
        pinned = kwargs.pop("pin_memory", None)
        generator = kwargs.get("generator")
        if generator is not None and there != (generator._cdata in self.generators):
            wanted, found = ("cuda", "cpu") if there else ("cpu", "cuda")
            raise RuntimeError(f"Expected a '{wanted}' device type for generator but found '{found}'")
        if not there:
            made = func(*args, **kwargs)
            return self.pin(made) if pinned else made
        packet = func.overloadpacket
        if packet is aten.copy_ and isinstance(args[0], CudaTensor) != isinstance(args[1], CudaTensor):
            if not (isinstance(args[0], CudaTensor) and self.own.filling and args[1].dim() == 0):
                self.transfer(args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
                return args[0]
        elif not _known_to_cuda(func):
            raise NotImplementedError(f"Could not run '{func}' with arguments from the 'CUDA' backend.")
        else:
            self._one_device(func, args, tensors)
        if packet in READS or self._reads(packet, args) or _sized_by_values(packet, func, args, kwargs):
            self.wait("read", str(func))
        if self.own.capture is not None:
            return self._captured(func, args, kwargs, tensors)
        with torch._C._DisableTorchDispatch():
            made = func(*args, **kwargs)
        wrapped = with_tensors(on_device, made)
        self._launched(func, args, kwargs, tensors, wrapped)
        return wrapped

    def _captured(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        assert self.own.capture is not None
        self.own.capture.check(func, kwargs.get("generator"))
        written = storages_written(func, args, kwargs)
        self.own.capture.before(written)
        given = with_tensors(plain, (args, kwargs))
        with torch._C._DisableTorchDispatch():
            made = func(*args, **kwargs)
        wrapped = with_tensors(on_device, made)
        kept = with_tensors(plain, wrapped)
        self.own.capture.record(func, *given, kept)
        self._launched(func, args, kwargs, tensors, wrapped)
        return wrapped

    def _reads(self, packet: Any, args: Any) -> bool:
        """Whether the host reads an argument: of a histogram without a range, of a grouped product without a kernel."""
        if packet is aten.histc:
            return len(args) < 4 or args[2] == args[3]
        return packet is aten._grouped_mm and args[0].dtype not in self.grouped

    def _launched(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], made: Any) -> None:
        if not func.is_view and self.own.capture is None:  # nothing of a capture runs
            self.streams.launch(func, tensors, storages_written(func, args, kwargs), tensors_in(made))

    def _one_device(self, func: Any, args: Any, tensors: list[torch.Tensor]) -> None:
        """Raise RuntimeError where operands lie on two devices; index tensors of the host are uploaded."""
        strangers = [tensor for tensor in tensors if not isinstance(tensor, CudaTensor)]
        if not strangers:
            return
        packet = func.overloadpacket
        if packet in INDEXING:
            if not isinstance(args[0], CudaTensor):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            for index in args[1]:
                if index is not None and not isinstance(index, CudaTensor):
                    self.wait("upload", f"index {list(index.shape)}")
            strangers = [t for t in args[2:3] if not isinstance(t, CudaTensor)]
        numbers = torch.Tag.pointwise in func.tags or packet in TAKE_NUMBERS or packet in INDEXING
        if strangers and not (numbers and all(tensor.dim() == 0 for tensor in strangers)):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({func})"
            )

    # Calls

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One call of torch's Python interface."""
        if getattr(func, "__name__", "") == "__get__" or func is torch.Tensor.untyped_storage:
            return func(*args, **kwargs)
        if (special := self.special.get(func)) is not None:
            return special(self, func, args, kwargs)
        named = kwargs.get("device")
        if named is not None:
            placing = as_device(named)
            if placing.type == "cuda":
                placing, kwargs = CUDA, {**kwargs, "device": HOST}
        else:
            placing = CUDA if any(isinstance(leaf, CudaTensor) for leaf in tensors_in((args, kwargs))) else HOST
        before, self.own.placing = self.own.placing, placing
        try:
            return func(*args, **kwargs)
        finally:
            self.own.placing = before


def as_device(named: Any) -> torch.device:
    """A device as torch takes it: a name, a number (of a GPU) or itself."""
    return CUDA if isinstance(named, int) else torch.device(named)


def where() -> str:
    """The innermost line of this project's code that is running, as ``drafters/x.py:12 in propose``."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(OURS) and not file.startswith(HERE):
            return f"{Path(file).relative_to(ROOT)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _sized_by_values(packet: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the size of the result, or how much is written, hangs on values: a mask as index, a tensor of repeats."""
    if packet in INDEXING:
        masks = sum(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        filled = len(args) > 2 and masks == 1 and len(args[1]) == 1 and args[2].numel() == 1  # masked_fill, in effect
        return masks > 0 and not filled
    return packet is aten.repeat_interleave and func._overloadname == "Tensor" and kwargs.get("output_size") is None


def _known_to_cuda(func: Any) -> bool:
    """Whether CUDA has such an operation. (Of attention the CPU's own kernel is used, for its values.)"""
    if "_for_cpu" in func._schema.name and "attention" not in func._schema.name:
        return False
    return func.namespace in ("aten", "prim", "prims")


def on_device(value: torch.Tensor) -> CudaTensor:
    """The same memory as a tensor of the device."""
    if isinstance(value, CudaTensor):
        return value
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return torch.Tensor._make_subclass(CudaTensor, value)  # type: ignore[return-value]


def plain(value: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the host: for the simulation's own use."""
    with torch._C._DisableTorchDispatch(), torch.no_grad(), torch._C.DisableTorchFunction():
        made = torch.empty(0, dtype=value.dtype)
        return made.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def spoil(value: torch.Tensor) -> None:
    """Fill memory whose contents have not arrived with values that no test can expect."""
    if value.is_floating_point():
        value.fill_(float("nan"))
    elif value.dtype is not torch.bool:
        value.fill_(torch.iinfo(value.dtype).max - 5)


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    with torch._C._DisableTorchDispatch(), torch.inference_mode():
        target.copy_(value)


def _unchanged(source: torch.Tensor, taken: torch.Tensor, name: str) -> None:
    with torch._C._DisableTorchDispatch():
        if not torch.equal(source.contiguous().view(torch.uint8), taken.contiguous().view(torch.uint8)):
            raise RuntimeError(f"pinned memory was written to while a copy from it was under way ({name})")


class Operations(TorchDispatchMode):
    """Sees every operation that is left of a call."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # which costs its import, of seconds
        return False

    def __init__(self, gpu: SimulatedCuda) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu.dispatch(func, args, dict(kwargs or {}))
