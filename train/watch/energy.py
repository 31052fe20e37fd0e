"""The energy of a training run: the GPUs of all ranks, by their counters."""

from contextlib import ExitStack
from typing import Any

import torch

from drafters.common.energy import EnergyMeter
from train.core.runtime import Ranks


class TrainingEnergy:
    """Joules since training began.

    Each rank reads its GPU. A counter covers the whole device, with idle power and other processes. ``joules``: sum of
    all ranks at the last ``total``, or of the run before it was resumed; None if a device was not counted all the time.
    """

    def __init__(self, device: torch.device, ranks: Ranks, joules: float | None) -> None:
        self._ranks, self._device, self.joules = ranks, device, joules
        self._meter = EnergyMeter(device)
        self._open = ExitStack()
        self._reading = self._open.enter_context(self._meter.measure())

    @property
    def how(self) -> dict[str, Any]:
        """How the first rank's device is counted, or why it is not; for run.json."""
        return dict(self._meter.describe()["device"])

    def total(self) -> float | None:
        """``joules`` up to now; a collective."""
        self._open.close()
        since, missing = self._reading.device or 0.0, self._reading.device is None
        self._reading = self._open.enter_context(self._meter.measure())
        joules, uncounted = self._ranks.total(torch.tensor([since, missing], dtype=torch.float64, device=self._device))
        self.joules = None if uncounted or self.joules is None else self.joules + float(joules)
        return self.joules

    def close(self) -> None:
        """Stop counting."""
        self._open.close()
