"""What makes torch ask the simulated device: its modes, in every thread, for the time of a ``with``."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from .calls import SPECIAL
from .device import Operations, SimulatedCuda
from .runtime import replaced_cuda


class Functions(TorchFunctionMode):
    """Sees every call of torch's Python interface."""

    def __init__(self, gpu: SimulatedCuda) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu.call(func, args, kwargs or {})


@contextmanager
def _modes(gpu: SimulatedCuda) -> Iterator[None]:
    with Functions(gpu), Operations(gpu):
        yield


def _seen(run: Callable[[threading.Thread], None], gpu: SimulatedCuda) -> Callable[[threading.Thread], None]:
    """``Thread.run`` whose calls are seen, too: torch's modes are of one thread."""

    def run_seen(thread: threading.Thread) -> None:
        with _modes(gpu):
            run(thread)

    return run_seen


@contextmanager
def simulated_cuda() -> Iterator[SimulatedCuda]:
    """``torch.cuda`` has one device, which is simulated."""
    gpu = SimulatedCuda(special=SPECIAL)
    assert SimulatedCuda.active is None
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    with ExitStack() as stack:
        SimulatedCuda.active = gpu
        stack.callback(setattr, SimulatedCuda, "active", None)
        torch.__future__.set_swap_module_params_on_conversion(True)  # a Parameter stays itself when it moves
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swapped)
        stack.enter_context(replaced_cuda(gpu))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _seen(threading.Thread.run, gpu)))
        stack.enter_context(_modes(gpu))
        yield gpu
        gpu.settle(gpu.streams.everything())
