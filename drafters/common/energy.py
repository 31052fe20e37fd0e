"""Energy in joules, from NVML's counter of an NVIDIA GPU.

If the counter does not exist or may not be read, the report says why: energy is never estimated. The counter measures
the whole GPU: it includes idle power and the work of other processes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


class Nvml:
    """The energy counter of the GPU with this UUID, in millijoules.

    Raises:
        RuntimeError: NVML is missing or does not know the GPU, or the GPU has no counter (older than Volta, or a
            partition of a GPU).
    """

    how = "NVML's energy counter of the GPU, read before and after every call"

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError:
            raise RuntimeError("the package nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            self.read()
        except pynvml.NVMLError as error:
            raise RuntimeError(f"NVML tells no energy of this GPU: {error}") from None

    def read(self) -> float:
        """Joules since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3


@dataclass
class Reading:
    """Joules of one call; None if not available."""

    device: float | None = None


class EnergyMeter:
    """Joules of the GPU that decodes. A counter that fails is not read again, and the report says why."""

    def __init__(self, device: torch.device) -> None:
        self._counter: Nvml | None = None
        if device.type != "cuda":
            self._how = f"there is no energy counter for devices of type {device.type!r}"
            return
        try:
            self._counter = Nvml(str(torch.cuda.get_device_properties(device).uuid))
            self._how = Nvml.how
        except Exception as error:  # it must not end a measurement of speed
            self._how = str(error)

    @contextmanager
    def measure(self) -> Iterator[Reading]:
        """Measure what runs inside the ``with`` block; the reading is filled in at its end."""
        reading, before = Reading(), self._read()
        try:
            yield reading
        finally:
            after = self._read()
            if before is not None and after is not None:
                reading.device = after - before

    def _read(self) -> float | None:
        try:
            return None if self._counter is None else self._counter.read()
        except Exception as error:
            self._how = f"{Nvml.how}: failed ({type(error).__name__}: {error})"
            self._counter = None
            return None

    def describe(self) -> dict[str, Any]:
        """For the report: how the energy of the device is measured, or why it is not."""
        return {"device": {"available": self._counter is not None, "how": self._how}}
