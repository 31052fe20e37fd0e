"""What each step of a generation did and how long it took, and the figures derived from it.

tau, the average acceptance length, is tokens committed per target forward, bonus included: plain decoding is 1.0. The
prefill and the first token, which it gives, are timed apart and not counted.
"""

import threading
import time
from dataclasses import dataclass, field
from itertools import pairwise

import torch


@dataclass
class Step:
    """One step of one batch row.

    Attributes:
        drafted: nodes proposed. depth: length of the longest path among them.
        accepted: draft tokens accepted by the rule. committed: tokens kept, after EOS and limits cut them.
        forwards: target forwards it took: the loop's one, and those that a drafter spent on its draft (MJGD).
    """

    row: int
    drafted: int
    depth: int
    accepted: int
    committed: int
    forwards: int = 1


@dataclass
class Trace:
    """Steps and times (seconds) of one ``generate`` call.

    A step's draft, verify and other seconds are all of it; ``model_seconds`` is the part of it that went into forward
    passes, of the target, draft models and trained heads alike. The rest is overhead: pools, trees, masks, rules.
    """

    steps: list[Step] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    other_seconds: list[float] = field(default_factory=list)
    model_seconds: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0

    def read(self, clock: "Clock") -> None:
        """Take over a finished clock's times: the prefill's lap, then three laps a step."""
        laps, models = clock.laps()
        self.prefill_seconds = laps[0]
        self.draft_seconds, self.verify_seconds, self.other_seconds = laps[1::3], laps[2::3], laps[3::3]
        self.model_seconds = [sum(models[i : i + 3]) for i in range(1, len(models), 3)]

    @property
    def forwards(self) -> int:
        """Target forwards after the prefill (of the longest row of a batch)."""
        by_row: dict[int, int] = {}
        for step in self.steps:
            by_row[step.row] = by_row.get(step.row, 0) + step.forwards
        return max(by_row.values(), default=0)

    @property
    def overhead(self) -> float | None:
        """Share of the time after the prefill that went into no forward pass; None where nothing was decoded."""
        total = self.decode_seconds
        return 1.0 - sum(self.model_seconds) / total if self.model_seconds and total > 0 else None

    @property
    def decode_seconds(self) -> float:
        """Everything after the prefill."""
        return sum(self.draft_seconds) + sum(self.verify_seconds) + sum(self.other_seconds)

    @property
    def decoded_tokens(self) -> int:
        """Tokens committed after the prefill's."""
        return sum(step.committed for step in self.steps)

    @property
    def tau(self) -> float:
        """Average acceptance length; 1.0 where no step was needed."""
        return self.decoded_tokens / sum(step.forwards for step in self.steps) if self.steps else 1.0

    def ctar(self, w: int) -> float:
        """CTAR(w): share of steps that accept more than w tokens, bonus included (Kangaroo)."""
        return sum(step.committed > w for step in self.steps) / max(len(self.steps), 1)

    def n_alpha(self, n: int) -> float | None:
        """Share of steps accepting depth n + 1 among those that accepted n and drafted deeper; None if there is none.

        For a chain it is the EAGLE paper's n-alpha; for a tree, the rate per level.
        """
        reached = [step for step in self.steps if step.accepted >= n and step.depth > n]
        return sum(step.accepted > n for step in reached) / len(reached) if reached else None


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
        """End a lap."""
        self._marks.append(self.now())
        self._models.append([])

    def note_model(self, start: Mark, end: Mark) -> None:
        """A forward pass of this lap."""
        self._models[-1].append((start, end))

    def laps(self) -> tuple[list[float], list[float]]:
        """Seconds of every lap, and of the forward passes in it; waits for the device."""
        if _running.clock is self:
            _running.clock = None
        if self._cuda:
            torch.cuda.synchronize(self._device)
        laps = [_seconds(a, b) for a, b in pairwise(self._marks)]
        return laps, [sum(_seconds(a, b) for a, b in passes) for passes in self._models[: len(laps)]]


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float) and isinstance(end, float)
    return end - start


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
