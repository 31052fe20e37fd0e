"""The clock of a generation: laps, and the part of each that forward passes took, which report to it."""

import threading
import time
from itertools import pairwise
from typing import Any

import torch

Mark = float | torch.cuda.Event


class Clock:
    """Splits a step's time into laps, and notes the part of each that forward passes took.

    On CUDA by events, so that timing adds no synchronisation. A thread has one clock at a time: the newest.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._marks: list[Mark] = [self.now()]
        self._models: list[list[tuple[Mark, Mark]]] = [[]]
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
        self._models.append([])

    def note_model(self, start: Mark, end: Mark) -> None:
        """Count a forward pass towards the current lap."""
        self._models[-1].append((start, end))

    def laps(self) -> tuple[list[float], list[float]]:
        """Seconds of every lap, and of the forward passes in it; waits for the device."""
        if _running.clock is self:
            _running.clock = None
        if self._cuda:
            torch.cuda.synchronize(self._device)
        laps = [_seconds(a, b) for a, b in pairwise(self._marks)]
        return laps, [sum(_seconds(a, b) for a, b in passes) for passes in self._models[: len(laps)]]


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
            self._clock.note_model(self._start, self._clock.now())
