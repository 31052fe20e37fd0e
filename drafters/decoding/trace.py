"""What each step of a generation did and how long it took, and the figures derived from it.

tau, the average acceptance length, is tokens committed per target forward, bonus included: plain decoding is 1.0. The
prefill and the first token, which it gives, are timed apart and not counted.
"""

import time
from dataclasses import dataclass, field

import torch


@dataclass
class Step:
    """One step of one batch row.

    Attributes:
        drafted: nodes proposed. depth: length of the longest path among them.
        accepted: draft tokens accepted by the rule. committed: tokens kept, after EOS and limits cut them.
    """

    row: int
    drafted: int
    depth: int
    accepted: int
    committed: int


@dataclass
class Trace:
    """Steps and times (seconds) of one ``generate`` call."""

    steps: list[Step] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    other_seconds: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0

    @property
    def forwards(self) -> int:
        """Target forwards after the prefill."""
        return len(self.verify_seconds)

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
        return self.decoded_tokens / len(self.steps) if self.steps else 1.0

    def ctar(self, w: int) -> float:
        """CTAR(w): share of steps that accept more than w tokens, bonus included (Kangaroo)."""
        return sum(step.committed > w for step in self.steps) / max(len(self.steps), 1)

    def n_alpha(self, n: int) -> float | None:
        """Share of steps accepting depth n + 1 among those that accepted n and drafted deeper; None if there is none.

        For a chain it is the EAGLE paper's n-alpha; for a tree, the rate per level.
        """
        reached = [step for step in self.steps if step.accepted >= n and step.depth > n]
        return sum(step.accepted > n for step in reached) / len(reached) if reached else None


class Clock:
    """Splits a step's time into laps; on CUDA by events, so that timing adds no synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._device = device.type == "cuda", device
        self._marks: list[float | torch.cuda.Event] = [self._now()]

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lap(self) -> None:
        """End a lap."""
        self._marks.append(self._now())

    def laps(self) -> list[float]:
        """Seconds of every lap; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize(self._device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [a.elapsed_time(b) / 1e3 if isinstance(a, torch.cuda.Event) else b - a for a, b in pairs]  # type: ignore[arg-type, operator]
