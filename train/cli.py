"""The command line that train/eagle.py and train/kangaroo.py share."""

import argparse
import os
import signal
import sys
from typing import Any

from data_prep.ranks import find_rank
from train import runtime
from train.config import TrainConfig
from train.endings import farewell, finished_at
from train.loop import TrainingDiverged, TrainRun
from train.setup import check_run_disk, open_inputs, read_config
from train.tasks import Task


def program(description: str | None, schema: type[TrainConfig], make: type[Task]) -> None:
    """What a training script does, with errors that a user can mend in one line in place of a stack trace."""
    # Slurm and launchers end a run with SIGTERM: as with Ctrl-C, the summary is still written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = main(description, schema, make)
    except (ValueError, OSError, TrainingDiverged) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; --resume continues from the last checkpoint")
    runtime.leave(status)


def main(description: str | None, schema: type[TrainConfig], make: type[Task], argv: list[str] | None = None) -> int:
    """Read and check everything, then train; or only check it (--dry-run), or overfit (--overfit). The exit status."""
    arguments = parse_arguments(description, argv)
    if arguments.dry_run:
        return _dry_run(arguments, schema, make)
    if arguments.overfit:
        from train.overfit import overfit

        return overfit(schema, make, arguments)
    config = read_config(schema, arguments.config, arguments.overrides, arguments.resume)
    runtime.check_devices(config)
    inputs = open_inputs(config, getattr(config, "exit_layer", None))
    if arguments.resume and (step := finished_at(config, inputs.train)) is not None:
        if find_rank(None, None).index == 0:
            print(farewell(config, step, inputs.heldout, inputs.ends, already=True))
        return 0
    task = make(config, inputs.ends)
    check_run_disk(config.out, task.module)
    ranks = runtime.start(config)
    run = TrainRun(task, inputs, ranks, arguments.resume, sys.argv[1:])
    run.train()
    if ranks.is_first:
        print(farewell(config, run.progress.step, inputs.heldout, inputs.ends))
    runtime.stop()
    return 0


def parse_arguments(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    """``--config F [--resume] [key=value ...]``; also takes the ``--local_rank`` that DeepSpeed's launcher appends."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in `out` from its last checkpoint")
    parser.add_argument(
        "--overfit", type=_positive, metavar="N", help="train and evaluate on N dialogues: is the pipeline sound?"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the config")
    dry = parser.add_argument_group("--dry-run", "check everything, estimate memory, disk and time, and train nothing")
    dry.add_argument("--dry-run", action="store_true", help="exit status 1 if the run could not start")
    dry.add_argument("--tokens", type=_positive, metavar="N", help="training tokens, where there are no features yet")
    dry.add_argument("--data", metavar="FILE", help="ShareGPT file to estimate the tokens from")
    dry.add_argument("--target-config", metavar="JSON", help="a Hugging Face config.json, where there is no target yet")
    dry.add_argument("--max-length", type=_positive, default=2048, help="longest dialogue, without features")
    dry.add_argument("--ranks", type=_positive, default=int(os.environ.get("WORLD_SIZE", "1")), help="processes")
    dry.add_argument("--device", metavar="NAME", help="a GPU's name (as H200), for its peak; default: what is here")
    dry.add_argument("--mfu", type=float, default=0.4, help="share of the peak that is assumed (0.4)")
    dry.add_argument("--tokens-per-second", type=float, metavar="X", help="of all ranks together")
    dry.add_argument("--measure", action="store_true", help="train a few steps on random numbers for the speed")
    return parser.parse_intermixed_args(argv)


def _dry_run(arguments: argparse.Namespace, schema: type[TrainConfig], make: type[Task]) -> int:
    from drafters.config import load_config
    from train.dry_run import Assumptions, dry_run

    config = load_config(schema, arguments.config, arguments.overrides)
    names = Assumptions.__dataclass_fields__
    given: dict[str, Any] = {name: value for name, value in vars(arguments).items() if name in names}
    report = dry_run(make, config, arguments.resume, Assumptions(**given))
    if find_rank(None, None).index == 0:
        print(report.text())
    return 1 if report.problems else 0


def _positive(text: str) -> int:
    value = int(text.replace("_", "").replace(",", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value
