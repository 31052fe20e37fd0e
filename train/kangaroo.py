"""Train a Kangaroo adapter: the cross-entropy of the target's own distribution, from its shallow layers' states.

    deepspeed train/kangaroo.py --config configs/kangaroo/stdlib.yaml [--resume] [key=value ...]
    python train/kangaroo.py --config configs/kangaroo/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/kangaroo.py --config configs/kangaroo/stdlib.yaml --overfit 8    # is the pipeline sound?

Processes and files are as train/eagle.py says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field

from train.cli import program
from train.config import TrainConfig
from train.task import Task

if TYPE_CHECKING:  # torch is imported within functions: see train/task.py
    from collections.abc import Callable

    from torch import Tensor

    from train.data.packing import Batch


class KangarooConfig(TrainConfig):
    """The keys of a Kangaroo run beside those of every run."""

    drafter: ClassVar[str] = "kangaroo"

    exit_layer: int = Field(ge=1, description="the adapter reads the hidden state after so many decoder layers")
    ffn: bool = Field(False, description="an adapter with an MLP, as the paper's Table 2 tries: larger, and no better")

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.exit_layer,)


class KangarooTask(Task):
    """Section 3.2 of the paper (Liu et al. 2024): L = - sum_i sum_x p_i(x) log q_i(x), q of the adapter and p of the
    target. At index i the adapter sees the shallow layers' states up to i; p_i and q_i are those of token_{i+1}.
    """

    schema = KangarooConfig
    config: KangarooConfig
    ahead = 1

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        return module(batch.taps[self.config.exit_layer], batch.position_ids, batch.attention())

    def drafter_config(self) -> dict[str, Any]:
        return {"exit_layer": self.config.exit_layer} | ({"ffn": True} if self.config.ffn else {})


if __name__ == "__main__":
    program("kangaroo")
