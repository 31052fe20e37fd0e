"""Train a Kangaroo adapter: the cross-entropy of the target's own distribution, from its shallow layers' states.

    deepspeed train/kangaroo.py --config configs/kangaroo/stdlib.yaml [--resume] [key=value ...]
    python train/kangaroo.py --config configs/kangaroo/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/kangaroo.py --config configs/kangaroo/stdlib.yaml --overfit 8    # is the pipeline sound?

Processes and files are as train/eagle.py says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from drafters.config import Layers
from train.cli import program
from train.core.config import TrainConfig
from train.core.task import Task

if TYPE_CHECKING:  # torch is imported within functions: see train/core/task.py
    from collections.abc import Callable

    from torch import Tensor, nn

    from drafters.model.ends import FrozenEnds
    from train.data.packing import Batch


class KangarooConfig(TrainConfig):
    """The keys of a Kangaroo run beside those of every run."""

    drafter: ClassVar[str] = "kangaroo"

    exit_layer: Layers = Field(ge=1, description="the adapter reads the hidden state after this many decoder layers")
    ffn: bool = Field(False, description="an adapter with an MLP, as the paper's Table 2 tries: larger, and no better")
    own_lm_head: bool = Field(False, description="an LM head of its own, which begins as the target's; Table 2, too")

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.exit_layer,)

    @property
    def trains_lm_head(self) -> bool:
        return self.own_lm_head

    @model_validator(mode="after")
    def _keeps_its_lm_head_whole(self) -> Self:
        if self.own_lm_head and self.zero_stage == 3:
            raise ValueError("zero_stage is 3, which would split the adapter's own LM head; set 0, 1 or 2")
        return self


class KangarooTask(Task):
    """Section 3.2 of the paper (Liu et al. 2024): L = - sum_i sum_x p_i(x) log q_i(x), q of the adapter and p of the
    target. At index i the adapter sees the shallow layers' states up to i; p_i and q_i are those of token_{i+1}.
    """

    schema = KangarooConfig
    config: KangarooConfig
    ahead = 1

    def __init__(self, config: KangarooConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        if config.own_lm_head:
            head: Any = self.module.lm_head
            head.weight.data.copy_(ends.lm_head.weight)
            self.own, self.lm_heads = [head], ("lm_head.weight",)
            self.lm_head_products += 1  # its weight's gradient

    @property
    def draft_lm_head(self) -> nn.Linear:
        return self.own[0] if self.own else super().draft_lm_head

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        return module(batch.taps[self.config.exit_layer], batch.position_ids, batch.attention())

    def drafter_config(self) -> dict[str, Any]:
        parts = {key: True for key in ("ffn", "own_lm_head") if getattr(self.config, key)}
        return {"exit_layer": self.config.exit_layer} | parts


if __name__ == "__main__":
    program("kangaroo")
