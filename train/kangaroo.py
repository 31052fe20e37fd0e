"""Train a Kangaroo adapter on a feature store.

    deepspeed train/kangaroo.py --config configs/kangaroo/stdlib.yaml [--resume] [key=value ...]
    python train/kangaroo.py --config configs/kangaroo/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/kangaroo.py --config configs/kangaroo/stdlib.yaml --overfit 8    # is the pipeline sound?

As many processes as the launcher is told to start (--num_gpus N); plain `python train/kangaroo.py ...` is a single
one. The run folder (`out` in the config) gets the trained drafter, metrics.jsonl, TensorBoard events and the resumable
state.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from train.cli import program
from train.config import KangarooConfig

if TYPE_CHECKING:
    from train.tasks import Task


def task() -> "type[Task]":
    """What is trained; imported once the command line and the config are read, since torch comes with it."""
    from train.tasks import KangarooTask

    return KangarooTask


if __name__ == "__main__":
    program(__doc__, KangarooConfig, task)
