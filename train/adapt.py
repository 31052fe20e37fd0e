"""Adapt a drafter to served traffic, and accept the new one only if it is better in the decoding loop.

    python -m train.adapt --drafter HEAD --target MODEL --traffic log.jsonl --out runs/adapted [--guard SUITE]

Writes configs and run.sh into --out and runs it: split the log by conversation and time, measure the present head on
held-out conversations and on the guard, compute the target's states, test that the answers are its own, train (all
weights at a low rate, or --lora), measure again. The new head is accepted if the 95% interval over conversations is
above 0 on the traffic and above -2% (--most-loss) on the guard; then come the test of losslessness, the model card and,
with --push, the Hub. Otherwise the present head stays, the exit status is 1, and gate/gate.md says why. After a kill
the same command continues. Formats of the log, and what leaves the machine: docs/adapting.md.
"""

import argparse
import os
import sys
from pathlib import Path

from huggingface_hub import get_token

from data_prep.dialogues.reader import check_source
from drafters.cli.program import CommandLine, command, keeping, positive, run_program
from drafters.common.paths import check_model
from drafters.config import validate
from train.configs import START_SCRIPT, AdaptConfig

GUARDS = (".jsonl", ".json", ".gz", ".yaml", ".yml")  # files of prompts, and of suites


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    defaults = {name: field.default for name, field in AdaptConfig.model_fields.items()}
    parser = CommandLine("train.adapt", __doc__)
    parser.add_argument("--drafter", required=True, help="the present head: folder or Hub repository")
    parser.add_argument("--target", required=True, help="folder or Hub repository of the model that answered")
    parser.add_argument("--traffic", required=True, help="the server's log: JSON lines, gzipped or not")
    parser.add_argument("--out", required=True, help="folder of all results")
    parser.add_argument("--guard", help="suite of configs/suites, or file of prompts, on which tau must not fall")
    parser.add_argument("--most-loss", type=float, default=defaults["most_loss"], help="percent, on the guard (2)")
    parser.add_argument("--lora", action="store_true", help="train low-rank matrices instead of all weights")
    parser.add_argument("--epochs", type=positive, default=defaults["epochs"], help="passes over the traffic (4)")
    most = defaults["conversations"]
    parser.add_argument("--conversations", type=positive, default=most, help=f"most, the newest ({most})")
    parser.add_argument(
        "--max-length", type=positive, default=defaults["max_length"], help="most tokens of a training dialogue (2048)"
    )
    parser.add_argument("--chat-template", help="file with the template that the server used, if not the model's own")
    parser.add_argument("--push", dest="hub", metavar="USER/NAME", help="push an accepted head to this repository")
    return parser.parse(arguments)


def check_guard(guard: str | None) -> None:
    """Raise ValueError if the guard is no file of prompts, and no suite's YAML file or name."""
    suites = Path(__file__).parents[1] / "configs" / "suites"
    known = sorted(file.stem for file in suites.glob("*.yaml"))
    if guard is None or guard in known or (guard.endswith(GUARDS) and Path(guard).is_file()):
        return
    raise ValueError(
        f"--guard: {guard} is no file of prompts; give one ({', '.join(GUARDS)}), or a suite: {', '.join(known)}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Write the configs and the script of an adaptation, and run it."""
    parsed = parse(arguments)
    given = {key: getattr(parsed, key) for key in AdaptConfig.model_fields}
    config = validate(AdaptConfig, given, source="the command line")
    check_model(config.target, "--target")
    check_model(config.drafter, "--drafter")
    check_source(config.traffic)
    if config.chat_template is not None and not Path(config.chat_template).is_file():
        raise ValueError(f"--chat-template: no file {config.chat_template}")
    check_guard(config.guard)
    before = config.is_written()

    from train.plan.adapt import plan
    from train.plan.write import write_files

    if not before:
        with keeping(lambda: f"nothing was begun. To start again: {command()}"):
            write_files(config, plan(config, parsed.command))
    if config.hub is not None and not get_token():
        print(f"no Hub token: run `hf auth login` before the push to {config.hub}, the last step")
    sys.stdout.flush()  # in place of this process, so that Ctrl-C reaches the running step and no memory stays in use
    os.execvp("bash", ["bash", str(config.out / START_SCRIPT), *([config.hub] if config.hub else [])])


if __name__ == "__main__":
    run_program(main)
