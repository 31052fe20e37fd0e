"""Energy in joules, from hardware counters: NVML's for an NVIDIA GPU, RAPL's for a CPU.

If a counter does not exist or may not be read, the report says why: energy is never estimated. A counter measures the
whole device: it includes idle power and the work of other processes.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")
SAMPLE_SECONDS = 0.025


class UnavailableError(RuntimeError):
    """This machine has no such counter, or it cannot be read; the message is the reason."""


class Counter:
    """Energy from ``start`` to ``stop``; ``how`` describes the counter in the report."""

    how: str
    _before: Any = None

    def start(self) -> None:
        """Begin to measure."""
        self._before = self._read()

    def stop(self) -> float:
        """Joules since ``start``."""
        raise NotImplementedError

    def _read(self) -> Any:
        raise NotImplementedError


class Rapl(Counter):
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
        self.start()
        self.how = (
            f"RAPL counters of {len(packages)} CPU package(s), which advance about once a millisecond, read before and "
            "after every call"
        )

    def stop(self) -> float:
        moved = zip(self._before, self._read(), self._ranges, strict=True)
        return sum(after - before + (span if after < before else 0) for before, after, span in moved) / 1e6

    def _read(self) -> list[int]:
        return [int(_text(file)) for file in self._files]


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except PermissionError:
        raise UnavailableError(
            f"{file} may be read by root only: run as root, or give read permission (chmod a+r {file})"
        ) from None
    except OSError as error:
        raise UnavailableError(f"{file}: {error.strerror or error}") from None


class NvmlEnergy(Counter):
    """A GPU's own energy counter, in millijoules.

    Raises:
        Exception: an error of NVML, if the GPU has no such counter (older than Volta, or a partition of a GPU).
    """

    how = (
        "NVML's energy counter of the GPU, which advances every few tens of milliseconds, read before and after every "
        "call"
    )

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.start()

    def stop(self) -> float:
        return (self._read() - self._before) / 1e3

    def _read(self) -> int:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)


class NvmlPower(Counter):
    """A GPU's power, sampled in a thread and integrated by trapezia, for GPUs without an energy counter.

    Raises:
        Exception: an error of NVML, if it does not report the GPU's power either.
    """

    how = f"the GPU's power from NVML, sampled every {SAMPLE_SECONDS * 1e3:.0f} ms and integrated by trapezia"

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._read()
        self._samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._samples, self._error = [self._read()], None
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        assert self._thread is not None
        self._ended.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return integrate([*self._samples, self._read()])

    def _run(self) -> None:
        try:
            while not self._ended.wait(SAMPLE_SECONDS):
                self._samples.append(self._read())
        except Exception as error:  # without all samples the energy is wrong
            self._error = error

    def _read(self) -> tuple[float, float]:
        """Seconds and watts."""
        watts = self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3
        return time.perf_counter(), watts


def integrate(samples: list[tuple[float, float]]) -> float:
    """Joules of samples (seconds, watts), by the trapezoidal rule."""
    pairs = zip(samples, samples[1:], strict=False)
    return sum((after - before) * (first + second) / 2 for (before, first), (after, second) in pairs)


def gpu_counter(uuid: str) -> Counter:
    """The energy counter of the GPU with this UUID, or its sampled power if it has no counter.

    Raises:
        UnavailableError: NVML is missing, does not know the GPU, or gets no figure from it.
    """
    try:
        import pynvml
    except ImportError:
        raise UnavailableError("the package nvidia-ml-py is not installed (pip install nvidia-ml-py)") from None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        try:
            return NvmlEnergy(pynvml, handle)
        except pynvml.NVMLError:
            return NvmlPower(pynvml, handle)
    except pynvml.NVMLError as error:
        raise UnavailableError(f"NVML tells no energy of this GPU: {error}") from None


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
        if device.type in ("cpu", "cuda") and shared:
            self._how["device" if device.type == "cpu" else "host"] = "several processes share the CPU"
        elif device.type == "cpu":
            self._open("device", lambda: Rapl(powercap))
        elif device.type == "cuda":
            self._open("host", lambda: Rapl(powercap))
        if device.type == "cuda":
            self._open("device", lambda: gpu_counter(str(torch.cuda.get_device_properties(device).uuid)))
        elif device.type != "cpu":
            self._how["device"] = f"there is no energy counter for devices of type {device.type!r}"

    def _open(self, place: str, make: Callable[[], Counter]) -> None:
        try:
            self._counters[place] = make()
            self._how[place] = self._counters[place].how
        except UnavailableError as error:
            self._how[place] = str(error)
        except Exception as error:  # an error of NVML must not end a measurement of speed
            self._how[place] = f"{type(error).__name__}: {error}"

    @contextmanager
    def measure(self) -> Iterator[Reading]:
        """Measure what runs inside the ``with`` block; the reading is filled in at its end."""
        reading = Reading()
        for place in list(self._counters):
            self._ask(place, methodcaller("start"))
        try:
            yield reading
        finally:
            for place in list(self._counters):
                setattr(reading, place, self._ask(place, methodcaller("stop")))

    def _ask(self, place: str, what: Callable[[Counter], float | None]) -> float | None:
        try:
            return what(self._counters[place])
        except Exception as error:
            self._how[place] = f"{self._counters.pop(place).how}: failed ({type(error).__name__}: {error})"
            return None

    def describe(self) -> dict[str, Any]:
        """For the report: how the energy of the device and the host is measured, or why it is not."""
        return {place: {"available": place in self._counters, "how": how} for place, how in self._how.items()}
