"""How far a run is, where it ends (steps, epochs, minutes), and the learning rate, which follows from both."""

import math
import time
from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from train.core.config import TrainConfig
from train.core.runtime import Ranks


@dataclass
class Progress:
    """The part of a saved state beside weights and Adam's moments."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    joules: float | None = 0.0
    taus: list[tuple[int, float]] = field(default_factory=list)  # (step, tau) of the measurements after the first step


class Limits:
    """The limits of one run, and its clock, which counts training only.

    Args:
        last_step: last step by ``steps`` or ``epochs``; None if only ``minutes`` ends the run.
    """

    def __init__(
        self, config: TrainConfig, progress: Progress, last_step: int | None, ranks: Ranks, device: torch.device
    ) -> None:
        self.config, self.progress, self.last_step = config, progress, last_step
        self._ranks, self._device = ranks, device
        self.start()

    def start(self) -> None:
        """Let the clock go on from the seconds of ``progress``."""
        self._began = time.monotonic() - self.progress.seconds

    def skip(self, seconds: float) -> None:
        """Take ``seconds`` off the clock."""
        self._began += seconds

    def elapsed(self) -> float:
        """Seconds of training so far, of all starts of the run."""
        return time.monotonic() - self._began

    def finished(self) -> bool:
        """Whether the run is at a limit; a collective, because one rank's clock decides for all."""
        if self.last_step is not None and self.progress.step >= self.last_step:
            return True
        if self.config.minutes is None:
            return False
        ended = self._total(self.elapsed() >= 60 * self.config.minutes) > 0
        if ended:  # as the state has to say, or a resumed run would take one step more
            self.progress.seconds = max(self.progress.seconds, 60 * self.config.minutes)
        return ended

    def done(self) -> float:
        """Share of the run so far, after the warm-up, by steps, epochs or minutes; a collective."""
        config, progress = self.config, self.progress
        by_step = by_clock = 0.0
        if self.last_step is not None:
            by_step = (progress.step - config.warmup_steps) / max(1, self.last_step - config.warmup_steps)
        if config.minutes:
            by_clock = progress.seconds / (60 * config.minutes)
            by_clock = self._total(by_clock) / self._ranks.count if self._ranks.count > 1 else by_clock
        return min(1.0, max(0.0, by_step, by_clock))

    def learning_rate(self, done: float) -> float:
        """Linear warm-up from 0, then the schedule; ``done``: share of the run so far."""
        config, step = self.config, self.progress.step
        if step + 1 < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        if config.schedule == "constant":
            return config.learning_rate
        left = 0.5 * (1 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
        return config.learning_rate * left

    def _total(self, value: float) -> float:
        return float(self._ranks.total(torch.tensor([value], dtype=torch.float64, device=self._device)))

    def text(self) -> str:
        """The limits as text to print after the step's number: " of 500, 3.0 of 10 minutes"."""
        steps, minutes = f" of {self.last_step:,}" if self.last_step is not None else "", self.config.minutes
        return steps + (f", {self.progress.seconds / 60:.1f} of {minutes:g} minutes" if minutes else "")

    def time_left(self) -> str:
        """Time until the first limit."""
        progress, left = self.progress, []
        if self.last_step is not None and progress.step:
            left.append(progress.seconds / progress.step * (self.last_step - progress.step))
        if self.config.minutes:
            left.append(60 * self.config.minutes - progress.seconds)
        return str(tqdm.format_interval(max(0, min(left))))
