"""Train a Kangaroo adapter on a feature store.

    deepspeed train/kangaroo.py --config configs/kangaroo/stdlib.yaml [--resume] [key=value ...]

As many processes as the launcher is told to start (--num_gpus N); plain `python train/kangaroo.py ...` is a single
one. The run folder (`out` in the config) gets the trained drafter, metrics.jsonl, TensorBoard events and the resumable
state.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from train import runtime
from train.cli import parse_arguments
from train.config import KangarooConfig
from train.loop import TrainingDiverged, TrainRun
from train.setup import open_inputs, read_config
from train.tasks import KangarooTask


def main() -> None:
    """Read and check everything, then train."""
    arguments = parse_arguments(__doc__)
    config = read_config(KangarooConfig, arguments.config, arguments.overrides, arguments.resume)
    inputs = open_inputs(config, config.exit_layer)
    ranks = runtime.start(config)
    run = TrainRun(KangarooTask(config, inputs.ends), inputs, ranks, arguments.resume, sys.argv[1:])
    run.train()
    runtime.stop()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, TrainingDiverged) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; --resume continues from the last checkpoint")
