"""Train a Kangaroo adapter: the cross-entropy of the target's own distribution, from its shallow layers' states.

    deepspeed train/kangaroo.py --config configs/kangaroo/stdlib.yaml [--resume] [key=value ...]
    python train/kangaroo.py --config configs/kangaroo/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/kangaroo.py --config configs/kangaroo/stdlib.yaml --overfit 8    # can it learn 8 dialogues?

Processes and files are those of train/eagle.py.
"""

import sys
from pathlib import Path
from typing import Any, ClassVar, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import model_validator

from drafters.heads.kangaroo.shape import KangarooShape
from train.core.config import TrainConfig
from train.preflight.command import program


class KangarooConfig(TrainConfig):
    """The keys of a Kangaroo run."""

    drafter: ClassVar[str] = "kangaroo"

    head: KangarooShape

    @property
    def trains_lm_head(self) -> bool:
        return self.head.own_lm_head

    @model_validator(mode="after")
    def _keeps_its_lm_head_whole(self) -> Self:
        if self.head.own_lm_head and self.zero_stage == 3:
            raise ValueError("zero_stage is 3, which would split the adapter's own LM head; set 0, 1 or 2")
        return self


if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(KangarooConfig, __doc__)

from collections.abc import Callable

from torch import Tensor

from drafters.model.ends import FrozenEnds
from train.core.task import Task
from train.data.packing import Batch


class KangarooTask(Task):
    """Section 3.2 of the paper (Liu et al. 2024): L = - sum_i sum_x p_i(x) log q_i(x), q of the adapter and p of the
    target. At index i the adapter sees the shallow layers' states up to i; p_i and q_i are those of token_{i+1}.
    """

    schema = KangarooConfig
    config: KangarooConfig
    ahead = 1

    def __init__(self, config: KangarooConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        if config.head.own_lm_head:
            head: Any = self.module.lm_head
            head.weight.data.copy_(ends.lm_head.scaled)
            self.heads.drafter_heads, self.lm_heads = [head], ("lm_head.weight",)

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        return module(batch.taps[self.config.head.exit_layer], batch.position_ids, batch.attention())


TASK = KangarooTask
