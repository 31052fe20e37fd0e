"""Capture of a graph and its replay, as CUDA has them.

While a graph is captured nothing takes effect: memory from outside is put back as it was, memory made inside holds no
values. A replay runs the recorded operations on the same memory, with nothing of Python in between.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from .trees import tensors_in

# Operations that torch refuses in a capture, beside those that read: they allocate or synchronise beyond its pool.
REFUSED = ("aten::_pin_memory", "aten::record_stream", "aten::_resize_output_")


@dataclass
class Operation:
    """One recorded operation; its tensors are aliases, which keep memory alive and nothing else.

    ``fresh``: which of its results lie in memory of their own, by their number.
    """

    func: Any
    args: Any
    kwargs: Any
    made: list[torch.Tensor]
    fresh: list[int]


@dataclass
class Capture:
    """What a graph consists of.

    Attributes:
        reads, writes: all the memory that a replay does.
    """

    operations: list[Operation] = field(default_factory=list)
    reads: list[torch.UntypedStorage] = field(default_factory=list)
    writes: list[torch.UntypedStorage] = field(default_factory=list)
    _held: list[tuple[torch.UntypedStorage, int]] = field(default_factory=list)  # outside memory, our uses of it
    _before: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _inside: dict[int, torch.Tensor] = field(default_factory=dict)  # memory made in the capture

    def check(self, func: Any, generator: torch.Generator | None) -> None:
        """Raise RuntimeError for what no graph can hold."""
        if generator is not None:
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode: register it first")
        if func._schema.name in REFUSED:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({func})")

    def before(self, written: list[torch.Tensor]) -> None:
        """Remember what outside memory held that is about to be written to."""
        for tensor in written:
            key = tensor.untyped_storage()._cdata
            if key not in self._inside and key not in self._before:
                memory = _bytes_of(tensor)
                self._before[key] = (memory, memory.clone())

    def made(self, tensor: torch.Tensor) -> None:
        """A tensor was made."""
        self._inside.setdefault(tensor.untyped_storage()._cdata, _bytes_of(tensor))

    def record(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        """Keep an operation that was run."""
        known = {leaf.untyped_storage()._cdata for leaf in tensors_in((args, kwargs))}
        results = tensors_in(made)
        fresh = [number for number, leaf in enumerate(results) if leaf.untyped_storage()._cdata not in known]
        for number in fresh:
            self.made(results[number])
        if not func.is_view:
            self.operations.append(Operation(func, args, kwargs, results, fresh))

    def end(self) -> None:
        """Nothing has happened yet: outside memory is as it was, inside memory holds nothing."""
        with torch._C._DisableTorchDispatch(), torch.inference_mode():
            for memory, old in self._before.values():
                memory.copy_(old)
            for memory in self._inside.values():
                memory.fill_(0xFF)  # of floating point numbers, NaN
        self.writes = [memory.untyped_storage() for memory in self._inside.values()]
        self.writes += [memory.untyped_storage() for memory, _ in self._before.values()]
        self._before.clear()
        uses: dict[int, int] = {}
        outside = {}
        for operation in self.operations:
            aliases = tensors_in((operation.args, operation.kwargs, operation.made))
            for leaf in {id(leaf): leaf for leaf in aliases}.values():
                storage = leaf.untyped_storage()
                if storage._cdata not in self._inside:
                    outside[storage._cdata] = storage
                    uses[storage._cdata] = uses.get(storage._cdata, 0) + 1
        self.reads = list(outside.values())
        self._held = [(storage, uses[key] + 1) for key, storage in outside.items()]

    def replay(self) -> None:
        """Run the operations.

        Raises:
            RuntimeError: memory that the graph was captured with has been freed since.
        """
        # A graph knows memory by its address alone: somebody else must have kept it.
        for storage, ours in self._held:
            if torch._C._storage_Use_Count(storage._cdata) <= ours:
                size = storage.nbytes()
                raise RuntimeError(f"a graph was replayed after {size} bytes that it was captured with were freed")
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.inference_mode():
            for operation in self.operations:
                made = operation.func(*operation.args, **operation.kwargs)
                if operation.fresh:
                    found = tensors_in(made)
                    for number in operation.fresh:
                        operation.made[number].copy_(found[number])


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
