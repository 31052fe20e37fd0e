"""Train an EAGLE head on a feature store.

    deepspeed train/eagle.py --config configs/eagle/stdlib.yaml [--resume] [key=value ...]

As many processes as the launcher is told to start (--num_gpus N); plain `python train/eagle.py ...` is a single
one. The run folder (`out` in the config) gets the trained drafter, metrics.jsonl, TensorBoard events and the resumable
state.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from train import runtime
from train.cli import parse_arguments
from train.config import EagleConfig
from train.loop import TrainingDiverged, TrainRun
from train.setup import open_inputs, read_config
from train.tasks import EagleTask


def main() -> None:
    """Read and check everything, then train."""
    arguments = parse_arguments(__doc__)
    config = read_config(EagleConfig, arguments.config, arguments.overrides, arguments.resume)
    inputs = open_inputs(config)
    ranks = runtime.start(config)
    run = TrainRun(EagleTask(config, inputs.ends), inputs, ranks, arguments.resume, sys.argv[1:])
    run.train()
    runtime.stop()


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError, TrainingDiverged) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; --resume continues from the last checkpoint")
