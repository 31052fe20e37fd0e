"""From a model's name and dialogues to a measured drafter: the configs, and one script of plain commands.

    python -m train.start --target MODEL [--data FILE] --out runs/mine [--minutes 120] [--hub user/repo] [--run]

It inspects the model, the dialogues and this machine, measures the target's speed for about a minute, and writes into
--out a config for every step and run.sh: hold dialogues out, let the target answer the others, compute its features,
train, compare with methods that need no training, test losslessness, write the model card (with --hub: push). Without
--data the target also asks the questions. It prints an estimate for each step. --run runs the script; after a kill the
same command continues, as bash run.sh does. You may change the configs before: they are not written again.
"""

import argparse
import os
import sys

from data_prep.dialogues.reader import check_source
from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.paths import check_model
from drafters.config import validate
from train.configs import START_SCRIPT, StartConfig, started_methods


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = CommandLine("train.start", __doc__)
    parser.add_argument("--target", required=True, help="folder or Hub repository of a chat model")
    parser.add_argument(
        "--data", help="ShareGPT .json, .jsonl or .gz file, or a Hub dataset; without it the target asks itself"
    )
    parser.add_argument("--out", required=True, help="folder of all results")
    parser.add_argument("--method", choices=started_methods(), default="eagle")
    parser.add_argument("--minutes", type=float, default=120.0, help="of all steps together (default 120)")
    parser.add_argument("--hub", metavar="USER/NAME", help="push the drafter to this repository at the end")
    parser.add_argument("--run", action="store_true", help="run the script, too")
    return parser.parse(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Write the configs and the script of a start, and perhaps run it."""
    parsed = parse(arguments)
    given = {key: getattr(parsed, key) for key in StartConfig.model_fields}
    config = validate(StartConfig, given, source="the command line")
    check_model(config.target, "--target")
    if config.data is not None:
        check_source(config.data)
    before = config.is_written()

    from train.plan.write import write

    if not before:
        with keeping(lambda: f"nothing was begun. To start again: {command()}"):
            write(config, parsed.command, parsed.run)
    else:
        print(f"{config.out} holds this start already: its configs and {START_SCRIPT} stay as they are")
    if parsed.run:  # in place of this process, so that Ctrl-C reaches the running step and no memory stays in use
        sys.stdout.flush()
        os.execvp("bash", ["bash", str(config.out / START_SCRIPT)])


if __name__ == "__main__":
    run_program(main)
