"""The command line that all of train/<method>.py share."""

import argparse
import os
import sys
from pathlib import Path

from data_prep.dialogues.reader import check_source
from drafters.cli.program import keeping, leave, positive, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model
from drafters.config import load_config
from train.core.config import TrainConfig
from train.core.task import task_class
from train.run.files import check_run_folder


def program(method: str) -> None:
    """What ``train/<method>.py`` does."""
    run_program(lambda: leave(main(method)))


def main(method: str, argv: list[str] | None = None) -> int:
    """Read and check everything; then train, report (--dry-run) or overfit (--overfit). Returns the exit status."""
    task = task_class(method)
    arguments = parse_arguments(sys.modules[task.__module__].__doc__, argv)
    config = load_config(task.schema, arguments.config, arguments.overrides)
    if not arguments.dry_run:  # which lists all that is missing
        check(config)
        if not arguments.overfit:  # which has a folder of its own
            config = check_run_folder(config, arguments.resume)

    from train.cli_run import dry_run, kept, settle_precision, train
    from train.preflight.overfit import overfit

    if not arguments.dry_run:
        config = settle_precision(config)
    run = dry_run if arguments.dry_run else overfit if arguments.overfit else train
    with keeping(lambda: kept(config, arguments)):
        return run(config, arguments)


def check(config: TrainConfig) -> None:
    """Raise ValueError where target, features or dialogues are not there, or ``out`` cannot be a folder."""
    check_folder(config.out)
    check_model(config.target, "target", config.revision)
    for key, name in config.other_models.items():
        check_model(name, key)
    if config.data is not None:
        check_source(config.data.train)
        check_source(config.data.heldout)
    elif not Path(config.features).is_dir():
        make = "python -m data_prep.features --config F"
        raise ValueError(f"features: there is no folder {config.features}; make it with {make}")


def parse_arguments(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    """``--config F [--resume] [key=value ...]``; also takes the ``--local_rank`` that DeepSpeed's launcher appends."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in `out` from its last checkpoint")
    parser.add_argument("--overfit", type=positive, metavar="N", help="train and judge on N dialogues: is all sound?")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the config")
    dry = parser.add_argument_group("--dry-run", "check everything, estimate memory, disk and time, and train nothing")
    dry.add_argument("--dry-run", action="store_true", help="exit status 1 if the run could not start")
    dry.add_argument("--tokens", type=positive, metavar="N", help="training tokens, where there are no features yet")
    dry.add_argument("--data", metavar="FILE", help="ShareGPT file to estimate the tokens from")
    dry.add_argument("--target-config", metavar="JSON", help="a Hugging Face config.json, where there is no target yet")
    dry.add_argument("--max-length", type=positive, default=2048, help="longest dialogue, without features")
    dry.add_argument("--ranks", type=positive, default=int(os.environ.get("WORLD_SIZE", "1")), help="processes")
    dry.add_argument("--device", metavar="NAME", help="a GPU's name (as H200), for its peak; default: what is here")
    dry.add_argument("--mfu", type=float, default=0.4, help="share of the peak that is assumed (0.4)")
    dry.add_argument("--tokens-per-second", type=float, metavar="X", help="of all ranks together")
    dry.add_argument("--measure", action="store_true", help="train a few steps on random numbers for the speed")
    return parser.parse_intermixed_args(argv)
