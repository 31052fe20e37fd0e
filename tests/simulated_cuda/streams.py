"""Which work of one stream comes after which of another's: by events, by waiting streams, by a host that waits."""

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .trees import tensors_in

MOST_KNOWN = 50_000  # pieces of memory; those that are gone are forgotten then
Memory = torch.Tensor | torch.UntypedStorage
Ticks = dict[int, int]  # of each stream, how many of its launches are known to be over


def storages_written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operation's arguments that it writes to."""
    written = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written += tensors_in(value)
    return written


class Streams:
    """The order of work. ``current`` is the number of the stream that work is launched on; 0 is the default one.
    ``queued``: of each stream, the launches since the host last waited for it.

    Raises (``launch``):
        RuntimeError: memory is used that another stream's unordered work writes, or written that it uses.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self.queued: dict[int, int] = {}
        self.known: dict[int, Ticks] = {0: {}}
        self.host: Ticks = {}
        self.numbers = itertools.count(1)
        self._writes: dict[int, tuple[StorageWeakRef, int, int, Any]] = {}
        self._reads: dict[int, Ticks] = {}

    @property
    def current(self) -> int:
        """The stream that this thread's work is launched on."""
        return getattr(self._own, "current", 0)

    @current.setter
    def current(self, number: int) -> None:
        self._own.current = number

    def new(self) -> int:
        """The number of a new stream."""
        number = next(self.numbers)
        self.known[number] = {}
        return number

    def launch(self, name: Any, read: Iterable[Memory], written: Iterable[Memory], made: Iterable[Memory] = ()) -> None:
        """Work on the current stream."""
        stream, known = self.current, self.known[self.current]
        known[stream] = tick = known.get(stream, 0) + 1
        self.queued[stream] = self.queued.get(stream, 0) + 1
        for storage in map(_storage, read):
            self._after_write(storage, name, stream, known)
            self._reads.setdefault(storage._cdata, {})[stream] = tick
        for storage in map(_storage, written):
            self._after_write(storage, name, stream, known)
            for other, over in self._reads.get(storage._cdata, {}).items():
                if not self._over(other, over, stream, known):
                    raise RuntimeError(f"{name} on stream {stream} writes what stream {other} may still read: no event")
            self._write(storage, name, stream, tick)
        for storage in map(_storage, made):
            found = self._writes.get(storage._cdata)
            if found is None or found[0].expired():
                self._write(storage, name, stream, tick)

    def mark(self, stream: int) -> Ticks:
        """Return the launches that an event recorded now on ``stream`` waits for."""
        return dict(self.known[stream])

    def wait_for(self, stream: int, ticks: Ticks) -> None:
        """What ``stream`` is given from now on comes after ``ticks``."""
        _merge(self.known[stream], ticks)

    def everything(self) -> Ticks:
        """What a synchronisation of the device waits for."""
        return {stream: known.get(stream, 0) for stream, known in self.known.items()}

    @property
    def now(self) -> tuple[int, int]:
        """The current stream and its last launch."""
        return self.current, self.known[self.current].get(self.current, 0)

    def host_waits(self, ticks: Ticks) -> None:
        """What any stream is given from now on comes after ``ticks``."""
        _merge(self.host, ticks)
        for stream, known in self.known.items():
            if self.host.get(stream, 0) >= known.get(stream, 0):
                self.queued[stream] = 0

    def host_knows(self, ticks: Ticks) -> bool:
        """Whether the host has waited for all of ``ticks``."""
        return all(self.host.get(stream, 0) >= tick for stream, tick in ticks.items())

    def bytes_in_use(self) -> int:
        """Of all memory that the device wrote to and that is still there."""
        storages = {key: torch.UntypedStorage._new_with_weak_ptr(ref[0].cdata) for key, ref in self._writes.items()}
        return sum(storage.nbytes() for storage in storages.values() if storage is not None)

    def _over(self, other: int, tick: int, stream: int, known: Ticks) -> bool:
        return other == stream or max(known.get(other, 0), self.host.get(other, 0)) >= tick

    def _after_write(self, storage: torch.UntypedStorage, name: Any, stream: int, known: Ticks) -> None:
        found = self._writes.get(storage._cdata)
        if found is None or found[1] == stream or found[0].expired():
            return
        _, other, tick, writer = found
        if not self._over(other, tick, stream, known):
            raise RuntimeError(f"{name} on stream {stream} uses what {writer} of stream {other} may not have written")

    def _write(self, storage: torch.UntypedStorage, name: Any, stream: int, tick: int) -> None:
        found = self._writes.get(storage._cdata)
        reference = StorageWeakRef(storage) if found is None or found[0].expired() else found[0]
        self._writes[storage._cdata] = (reference, stream, tick, name)
        self._reads.pop(storage._cdata, None)
        if len(self._writes) > MOST_KNOWN:
            self._writes = {key: value for key, value in self._writes.items() if not value[0].expired()}


def _storage(memory: Memory) -> torch.UntypedStorage:
    return memory if isinstance(memory, torch.UntypedStorage) else memory.untyped_storage()


def _merge(into: Ticks, ticks: Ticks) -> None:
    for stream, tick in ticks.items():
        into[stream] = max(into.get(stream, 0), tick)
