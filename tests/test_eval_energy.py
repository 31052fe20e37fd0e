"""Energy from counters that are files and a module of our own: no machine of the tests has the real ones."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from drafters.common.energy import EnergyMeter, Rapl

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def domain(root: Path, folder: str, name: str, energy: int, limit: int = 1_000_000) -> Path:
    """A RAPL domain; returns the file of its counter."""
    path = root / folder
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text(f"{limit}\n")
    (path / "energy_uj").write_text(f"{energy}\n")
    return path / "energy_uj"


class NVMLError(Exception):
    """NVML's own kind of error."""


class FakeNvml(ModuleType):
    """Told what its GPU answers."""

    NVMLError = NVMLError

    def __init__(self, millijoules: list[int]) -> None:
        super().__init__("pynvml")
        self.energy = iter(millijoules)
        self.asked_for: list[str] = []

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.asked_for.append(uuid)
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        return next(self.energy)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device that tells its UUID."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234-ab"))


def test_rapl_sums_packages_and_only_packages(tmp_path: Path) -> None:
    """Catches cores counted beside the package that holds them, the platform's domain, and microjoules for joules."""
    one = domain(tmp_path, "intel-rapl:0", "package-0", 100)
    two = domain(tmp_path, "intel-rapl:1", "package-1", 500)
    others = [
        domain(tmp_path, "intel-rapl:0:0", "core", 7),
        domain(tmp_path, "intel-rapl:2", "psys", 7),
        domain(tmp_path, "intel-rapl-mmio:0", "package-0", 7),
    ]
    counter = Rapl(tmp_path)
    counter.start()
    for file in (one, two, *others):
        file.write_text(str(int(file.read_text()) + 300_000))
    assert counter.stop() == pytest.approx(0.6)
    assert "2 CPU package(s)" in counter.how


def test_rapl_wraps_around_each_package_by_itself(tmp_path: Path) -> None:
    """Catches a negative energy, or a full turn added to a package that did not wrap."""
    one = domain(tmp_path, "intel-rapl:0", "package-0", 900_000, limit=1_000_000)
    two = domain(tmp_path, "intel-rapl:1", "package-1", 100_000, limit=5_000_000)
    counter = Rapl(tmp_path)
    counter.start()
    one.write_text("50000")
    two.write_text("350000")
    assert counter.stop() == pytest.approx(0.15 + 0.25)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    """Catches a figure where nothing was measured."""
    meter = EnergyMeter(CPU, tmp_path / "none")
    with meter.measure() as reading:
        pass
    assert (reading.device, reading.host) == (None, None)
    about = meter.describe()["device"]
    assert not about["available"]
    assert "not exposed" in about["how"]
    assert "type 'mps'" in EnergyMeter(torch.device("mps")).describe()["device"]["how"]


def test_a_gpu_is_read_by_its_uuid_and_the_cpu_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: None
) -> None:
    """Catches the energy of GPU 0 where CUDA_VISIBLE_DEVICES names another, and both devices in one figure."""
    file = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    nvml = FakeNvml(millijoules=[1000, 5000, 7500])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = EnergyMeter(CUDA, tmp_path)
    with meter.measure() as reading:
        file.write_text("400000")
    assert nvml.asked_for == ["GPU-1234-ab"]
    assert (reading.device, reading.host) == (2.5, pytest.approx(0.4))
