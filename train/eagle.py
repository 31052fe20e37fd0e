"""Train an EAGLE head on a feature store.

    deepspeed train/eagle.py --config configs/eagle/stdlib.yaml [--resume] [key=value ...]
    python train/eagle.py --config configs/eagle/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/eagle.py --config configs/eagle/stdlib.yaml --overfit 8    # is the pipeline sound?

As many processes as the launcher is told to start (--num_gpus N); plain `python train/eagle.py ...` is a single
one. The run folder (`out` in the config) gets the trained drafter, metrics.jsonl, TensorBoard events and the resumable
state.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from train.cli import program
from train.config import EagleConfig

if TYPE_CHECKING:
    from train.tasks import Task


def task() -> "type[Task]":
    """What is trained; imported once the command line and the config are read, since torch comes with it."""
    from train.tasks import EagleTask

    return EagleTask


if __name__ == "__main__":
    program(__doc__, EagleConfig, task)
