"""From a model's name and dialogues to a measured drafter: the configs, and one script of plain commands.

    python -m train.start --target MODEL [--data FILE] --out runs/mine [--minutes 120] [--hub user/repo] [--run]

Looks at the model, the dialogues and this machine, measures for about a minute how fast the target is here, and writes
into --out a config for every step and run.sh: hold dialogues out, let the target answer the others itself, compute its
features, train, compare with what needs no training, certify, write the model card (with --hub: push). Without --data
the target asks the questions, too, some of them to be timed. Says what each step will take. --run runs it; killed, the
same command goes on where it stopped, as bash run.sh does. The configs may be changed before: they are not written
again.
"""

import argparse
import json
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from data_prep.dialogues.reader import check_source, source_digest
from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model
from drafters.common.provenance import changes
from drafters.config import Config, validate

FACTS, SCRIPT = "start.json", "run.sh"
METHODS = ("eagle", "kangaroo")


class StartConfig(Config):
    """What a start is told."""

    target: str
    data: str | None = None
    out: Path
    method: Literal["eagle", "kangaroo"] = "eagle"
    minutes: float = Field(120, gt=0, allow_inf_nan=False, description="of all steps together")
    hub: str | None = Field(None, description="repository that the drafter is pushed to")

    @field_validator("hub")
    @classmethod
    def _is_a_repository(cls, name: str | None) -> str | None:
        if name is not None:
            from huggingface_hub.utils import validate_repo_id

            validate_repo_id(name)
            if "/" not in name:
                raise ValueError("give it as user/name")
        return name

    def settings(self) -> dict[str, object]:
        """What may not change between a start and the same one again."""
        named = self.model_dump(mode="json", exclude={"out"})
        return named | {"data_digest": None if self.data is None else source_digest(self.data)}

    @property
    def asked(self) -> str:
        """The file of the questions that the target asks itself."""
        return str(self.out / "asked" / "questions.jsonl")


def written_before(config: StartConfig) -> bool:
    """Whether ``out`` holds this very start already.

    Raises:
        ValueError: it holds another one, or something else.
    """
    check_folder(config.out, "--out")
    file = config.out / FACTS
    if not file.is_file():
        if config.out.is_dir() and any(config.out.iterdir()):
            raise ValueError(f"--out {config.out} holds files that no start has written; give a new folder")
        return False
    try:
        before = dict(json.loads(file.read_text())["settings"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{file} is not what this program writes; give another --out") from None
    if changed := changes(before, config.settings()):
        raise ValueError(f"--out {config.out} holds another start: {'; '.join(changed)}; give another --out")
    return (config.out / SCRIPT).is_file()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = CommandLine("train.start", __doc__)
    parser.add_argument("--target", required=True, help="folder or Hub repository of a chat model")
    parser.add_argument(
        "--data", help="ShareGPT .json, .jsonl or .gz file, or a Hub dataset; without it the target asks itself"
    )
    parser.add_argument("--out", required=True, help="folder of all that is made")
    parser.add_argument("--method", choices=METHODS, default="eagle")
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
    before = written_before(config)

    from train.start_run import run_script, write

    if not before:
        with keeping(lambda: f"nothing was begun. To start again: {command()}"):
            write(config, parsed.command, parsed.run)
    else:
        print(f"{config.out} holds this start already: its configs and {SCRIPT} stay as they are")
    if parsed.run:
        run_script(config)


if __name__ == "__main__":
    run_program(main)
