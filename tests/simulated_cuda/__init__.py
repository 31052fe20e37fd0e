"""A CUDA device for machines without one (device.py says how)."""

from .device import CUDA, CudaTensor, Event, SimulatedCuda
from .modes import simulated_cuda

__all__ = ["CUDA", "CudaTensor", "Event", "SimulatedCuda", "simulated_cuda"]
