"""The command line of every train/<method>.py: train, resume, --dry-run or --overfit."""

import argparse
import os
from pathlib import Path

from data_prep.dialogues.reader import check_source
from drafters.cli.program import above_zero, command, keeping, leave, positive, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model
from drafters.config import load_config
from train.core.config import TrainConfig
from train.run.files import check_run_folder, check_trackers


def program(schema: type[TrainConfig], page: str | None) -> None:
    """Run ``train/<method>.py`` as a program, and exit.

    The script calls this before it imports torch, so a mistake is answered at once. When the command line is checked,
    the script is imported as the module ``train.<method>``, which then does import torch.
    """
    run_program(lambda: leave(main(schema, page)))


def main(schema: type[TrainConfig], page: str | None, argv: list[str] | None = None) -> int:
    """Check the command line, the config and the paths, then train; return the exit status."""
    arguments = parse_arguments(page, argv)
    config = load_config(schema, arguments.config, arguments.overrides)
    if not arguments.dry_run:  # a dry run reports all missing paths together
        check(config)
        if not arguments.overfit:  # which has its own folder
            config = check_run_folder(config, arguments.resume)

    from train.preflight.dry_run import print_report
    from train.preflight.memory import check_size
    from train.preflight.overfit import overfit
    from train.run.training import settle, train, what_is_kept

    if not arguments.dry_run:
        config = settle(config)
        check_size(config)
    run = print_report if arguments.dry_run else overfit if arguments.overfit else train
    with keeping(lambda: what_is_kept(config.out) if run is train else f"to start again: {command()}"):
        return run(config, arguments)


def check(config: TrainConfig) -> None:
    """Raise ValueError if the target, the features, the dialogues or a tracker's package are missing, or ``out`` cannot
    be a folder."""
    check_folder(config.out)
    check_model(config.target, "target", config.revision)
    for key, name in config.other_models.items():
        check_model(name, key)
    if config.data is not None:
        check_source(config.data.train)
        check_source(config.data.heldout)
    elif not Path(config.features).is_dir():
        make = "python -m data_prep.features --config F"
        raise ValueError(f"features: no folder {config.features}; make it with {make}")
    check_trackers(config)


def parse_arguments(description: str | None, argv: list[str] | None = None) -> argparse.Namespace:
    """``--config F [--resume] [key=value ...]``; also takes the ``--local_rank`` that DeepSpeed's launcher appends."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--resume", action="store_true", help="continue the run in `out` from its last checkpoint")
    parser.add_argument(
        "--overfit", type=positive, metavar="N", help="train and judge on N dialogues: are they learnt?"
    )
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of the config")
    dry = parser.add_argument_group("--dry-run", "check everything, estimate memory, disk and time, and train nothing")
    dry.add_argument("--dry-run", action="store_true", help="exit status 1 if the run could not start")
    dry.add_argument("--tokens", type=positive, metavar="N", help="training tokens, if there are no features yet")
    dry.add_argument("--data", metavar="FILE", help="ShareGPT file to estimate the tokens from")
    dry.add_argument("--target-config", metavar="JSON", help="a Hugging Face config.json, if there is no target yet")
    dry.add_argument("--max-length", type=positive, default=2048, help="longest dialogue, without features")
    dry.add_argument("--ranks", type=positive, default=int(os.environ.get("WORLD_SIZE", "1")), help="processes")
    dry.add_argument("--device", metavar="NAME", help="a GPU's name (as H200), for its peak; default: this machine's")
    dry.add_argument("--mfu", type=above_zero, default=0.4, help="assumed share of the peak (0.4)")
    dry.add_argument("--tokens-per-second", type=above_zero, metavar="X", help="assumed speed of all ranks together")
    dry.add_argument("--measure", action="store_true", help="measure the speed: a few steps on random numbers")
    return parser.parse_intermixed_args(argv)
