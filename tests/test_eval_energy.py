"""Energy from a counter that is a module of our own: no machine of the tests has the real one."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from drafters.common.energy import EnergyMeter

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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


def test_a_machine_without_counters_says_so() -> None:
    """Catches a figure where nothing was measured."""
    meter = EnergyMeter(CPU)
    with meter.measure() as reading:
        pass
    assert reading.device is None
    assert meter.describe() == {
        "device": {"available": False, "how": "there is no energy counter for devices of type 'cpu'"}
    }


def test_a_gpu_is_read_by_its_uuid(monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    """Catches the energy of GPU 0 where CUDA_VISIBLE_DEVICES names another, and millijoules for joules."""
    nvml = FakeNvml(millijoules=[1000, 5000, 7500])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with EnergyMeter(CUDA).measure() as reading:
        pass
    assert nvml.asked_for == ["GPU-1234-ab"]
    assert reading.device == 2.5
