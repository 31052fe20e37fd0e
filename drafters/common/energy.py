"""Energy in joules, from hardware counters: NVML's for an NVIDIA GPU, RAPL's for a CPU.

If a counter does not exist or may not be read, the report says why: energy is never estimated. A counter measures the
whole device: it includes idle power and the work of other processes.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

POWERCAP = Path("/sys/class/powercap")


class UnavailableError(RuntimeError):
    """This machine has no such counter, or it cannot be read; the message is the reason."""


class Counter(Protocol):
    """Energy from ``start`` to ``stop``; ``how`` describes the counter in the report."""

    how: str

    def start(self) -> None:
        """Begin to measure."""

    def stop(self) -> float:
        """Joules since ``start``."""


class Rapl:
    """Energy counters of all CPU packages, in microjoules; they wrap around.

    Only packages are read: they include their sub-domains (cores, memory controllers), and the platform domain of some
    machines includes them.

    Args:
        root: the kernel's power-capping folder.

    Raises:
        UnavailableError: no package has a counter, or one may not be read.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        domains = [path for path in sorted(root.glob("intel-rapl:*")) if re.fullmatch(r"intel-rapl:\d+", path.name)]
        packages = [path for path in domains if _text(path / "name").startswith("package")]
        if not packages:
            raise UnavailableError(f"this CPU's energy counters (RAPL) are not exposed: no package under {root}")
        self._files = [path / "energy_uj" for path in packages]
        self._ranges = [int(_text(path / "max_energy_range_uj")) for path in packages]
        self.how = f"RAPL counters of {len(packages)} CPU package(s), read before and after every call"
        self.start()

    def start(self) -> None:
        self._before = [int(_text(file)) for file in self._files]

    def stop(self) -> float:
        now = [int(_text(file)) for file in self._files]
        moved = zip(self._before, now, self._ranges, strict=True)
        return sum(after - before + (span if after < before else 0) for before, after, span in moved) / 1e6


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError as error:
        fix = f"; let its owner allow it: chmod a+r {file}" if isinstance(error, PermissionError) else ""
        raise UnavailableError(f"{file}: {error.strerror or error}{fix}") from None


class Nvml:
    """The energy counter of the GPU with this UUID, in millijoules.

    Raises:
        UnavailableError: NVML is missing or does not know the GPU, or the GPU has no counter (older than Volta, or a
            partition of a GPU).
    """

    how = "NVML's energy counter of the GPU, read before and after every call"

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml
        except ImportError:
            raise UnavailableError("the package nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
            self.start()
        except pynvml.NVMLError as error:
            raise UnavailableError(f"NVML tells no energy of this GPU: {error}") from None

    def start(self) -> None:
        self._before = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)

    def stop(self) -> float:
        return (self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - self._before) / 1e3


@dataclass
class Reading:
    """Joules of one call; None if not available."""

    device: float | None = None
    host: float | None = None


class EnergyMeter:
    """Joules of the device that decodes and, if that is a GPU, of the CPU.

    A counter that fails is not read again, and the report says why.

    Args:
        powercap: the kernel's folder of RAPL.
        shared: True if other ranks use the same CPU, so that its counters do not measure this process.
    """

    def __init__(self, device: torch.device, powercap: Path = POWERCAP, shared: bool = False) -> None:
        self._counters: dict[str, Counter] = {}
        self._how: dict[str, str] = {}  # "device" or "host" -> how it is measured, or why not
        if device.type in ("cpu", "cuda"):
            self._open("device" if device.type == "cpu" else "host", lambda: _own_cpu(powercap, shared))
        if device.type == "cuda":
            self._open("device", lambda: Nvml(str(torch.cuda.get_device_properties(device).uuid)))
        elif device.type != "cpu":
            self._how["device"] = f"there is no energy counter for devices of type {device.type!r}"

    def _open(self, place: str, make: Callable[[], Counter]) -> None:
        try:
            self._counters[place] = counter = make()
            self._how[place] = counter.how
        except Exception as error:  # it must not end a measurement of speed
            self._how[place] = str(error)

    @contextmanager
    def measure(self) -> Iterator[Reading]:
        """Measure what runs inside the ``with`` block; the reading is filled in at its end."""
        reading = Reading()
        self._each(lambda place, counter: counter.start())
        try:
            yield reading
        finally:
            self._each(lambda place, counter: setattr(reading, place, counter.stop()))

    def _each(self, do: Callable[[str, Counter], None]) -> None:
        for place, counter in list(self._counters.items()):
            try:
                do(place, counter)
            except Exception as error:
                self._how[place] = f"{counter.how}: failed ({type(error).__name__}: {error})"
                del self._counters[place]

    def describe(self) -> dict[str, Any]:
        """For the report: how the energy of the device and the host is measured, or why it is not."""
        return {place: {"available": place in self._counters, "how": how} for place, how in self._how.items()}


def _own_cpu(powercap: Path, shared: bool) -> Rapl:
    if shared:
        raise UnavailableError("several processes share the CPU")
    return Rapl(powercap)
