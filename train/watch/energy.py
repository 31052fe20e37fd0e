"""The energy of a training run: the devices of all ranks, by hardware counters."""

import time
from contextlib import ExitStack
from typing import Any

import torch

from drafters.common.energy import EnergyMeter
from train.core.runtime import Ranks, local_rank

EVERY = 10.0  # seconds


class TrainingEnergy:
    """Joules since training began.

    Each rank reads its GPU; a machine's first rank reads its CPU packages. A counter covers the whole device, with idle
    power and other processes. ``joules``: sum of all ranks at the last ``total``, or of the run before it was resumed;
    None if a device was not counted all the time.
    """

    def __init__(self, device: torch.device, ranks: Ranks, joules: float | None) -> None:
        self._ranks, self._device, self.joules = ranks, device, joules
        self._another_counts = device.type == "cpu" and local_rank() > 0
        # A GPU's host is not counted, because each of its ranks would count it.
        self._meter = EnergyMeter(device, shared=device.type != "cpu" or self._another_counts)
        self._since = 0.0  # of this rank since the last total
        self._counted = True
        self._last = time.monotonic()
        self._open = ExitStack()
        self._reading = self._open.enter_context(self._meter.measure())

    @property
    def how(self) -> dict[str, Any]:
        """How the first rank's device is counted, or why it is not; for run.json."""
        return dict(self._meter.describe()["device"])

    def tick(self) -> None:
        """Read the counters regularly, because those of a CPU wrap around within minutes."""
        if time.monotonic() - self._last >= EVERY:
            self.lap()

    def lap(self) -> None:
        """Read the counters."""
        self._last = time.monotonic()
        self._open.close()
        if self._reading.device is None:
            self._counted = self._another_counts
        else:
            self._since += self._reading.device
        self._reading = self._open.enter_context(self._meter.measure())

    def total(self) -> float | None:
        """``joules`` up to now; a collective."""
        self.lap()
        values = torch.tensor([self._since, not self._counted], dtype=torch.float64, device=self._device)
        joules, missing = self._ranks.total(values).tolist()
        self._since = 0.0
        self.joules = None if missing or self.joules is None else self.joules + joules
        return self.joules

    def close(self) -> None:
        """Stop counting."""
        self._open.close()
