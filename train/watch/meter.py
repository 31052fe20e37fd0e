"""The cost of a run's steps: tokens/s, MFU, the share of time spent waiting for data, peak memory."""

import time
from collections.abc import Generator
from contextlib import closing
from typing import Any

import torch

from drafters.common.machine import peak_memory_bytes
from train.core.task import Task
from train.data.packing import Batch, StepData
from train.watch.flops import TrainingCost, peak_tflops


class Meter:
    """Sums over the steps from one log line to the next, without evaluations and checkpoints in between.

    ``mfu``: FLOPs of this rank's share of a step (train/watch/flops.py), over its time and the device's bf16 peak. The
    first rank logs; its figures represent all ranks, because the data is split evenly by tokens.
    """

    def __init__(self, task: Task, costs: tuple[TrainingCost, TrainingCost], device: torch.device) -> None:
        self.task, self.costs, self.device = task, costs, device
        self.peak = task.config.peak_tflops or peak_tflops(device)
        self._began, self._tokens_before = 0.0, 0
        self._clear()

    def watch(self, steps: Generator[StepData, None, None], tokens: int) -> Generator[StepData, None, None]:
        """The same steps, with the wait for each and its work noted. ``tokens``: trained on so far, over all ranks."""
        self._tokens_before = tokens
        with closing(steps):
            while True:
                self._began = time.monotonic()
                data = next(steps)
                self._waited += time.monotonic() - self._began
                yield data

    def step_done(self, batches: list[Batch]) -> None:
        """Count the step that ``watch`` gave last, which trained on ``batches``."""
        rows = sum(len(batch.rows) for batch in batches)
        whole, first = self.costs
        cost = first if self.task.one_pass else whole
        self._flops += cost.of([span.length for batch in batches for span in batch.spans], rows)
        self._seconds += time.monotonic() - self._began

    def figures(self, tokens: int) -> dict[str, float]:
        """Since the last call; ``tokens``: trained on so far, over all ranks.

        ``tokens_per_second`` (all ranks), ``data_wait`` (share of the time), ``peak_memory_gb`` (1e9 bytes, since the
        process began: the device's, on a CPU the process's), and ``mfu`` where the device's peak is known.
        """
        seconds = max(self._seconds, 1e-9)
        memory = peak_memory_bytes(self.device)
        figures: dict[str, Any] = {
            "tokens_per_second": round((tokens - self._tokens_before) / seconds, 1),
            "data_wait": round(self._waited / seconds, 4),
            "peak_memory_gb": round((memory["device"] or memory["host"] or 0) / 1e9, 3),
        }
        if self.peak:
            figures["mfu"] = round(self._flops / seconds / (self.peak * 1e12), 4)
        self._tokens_before = tokens
        self._clear()
        return figures

    def _clear(self) -> None:
        self._seconds = self._waited = self._flops = 0.0
