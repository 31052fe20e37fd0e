"""Boost-tune several draft models (SpecInfer): each on what those before it miss. And show what they cover together.

    python -m train.boost --config configs/draft_model/boost.yaml [key=value ...]

Each model is a training of train/draft_model.py, in a folder of its own below `out`; the list of folders is for
specinfer's `draft_models:`. Started again, it goes on where it was. The table at its end (and `coverage.json`) has, for
the first 1 to n of them, the share of held-out steps at which any is right, beside as many models that were trained on
everything.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model
from drafters.config import Config, DraftSize, load_config
from train.cli import check as check_run
from train.draft_model import DraftModelConfig


class BoostConfig(Config):
    """A list of draft models and what they have in common."""

    run: Path = Field(description="config of train/draft_model.py; its draft_model, boost, seed and out are set here")
    draft_models: list[str] = Field(min_length=2, description="what each begins as; the same one may stand there twice")
    out: Path = Field(description="folder of the trainings: 1, boosted-2, boosted-3, ... and seed-2, seed-3, ...")
    length: DraftSize = Field(1, ge=1, description="tokens of a speculation, which all have to be right")
    keep: float = Field(0.0, ge=0, le=1, description="of what is covered already, so much is trained on all the same")
    seeds: bool = Field(True, description="train as many on everything, to compare with")


def main(argv: list[str] | None = None) -> None:
    """The command line in the module's docstring."""
    parser = CommandLine("train.boost", __doc__, "YAML of the list", "keep=0.2")
    args = parser.parse(argv)
    config = load_config(BoostConfig, args.config, args.overrides)
    run = load_config(DraftModelConfig, config.run, [f"draft_model={config.draft_models[0]}"])
    for number, name in enumerate(config.draft_models):
        check_model(name, f"draft_models[{number}]")
    check_folder(config.out)
    check_run(run)
    if run.features == "online":
        raise ValueError(f"{config.run}: features is online, and what is covered is told by a feature store; give one")

    from train.boost_run import run as train_all

    with keeping(lambda: f"the trainings are kept in {config.out}; to go on: {command()}"):
        train_all(config, run)


if __name__ == "__main__":
    run_program(main)
