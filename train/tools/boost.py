"""Boost-tune several draft models (SpecInfer), each on the rows that the earlier ones miss, and show their coverage.

    python -m train.tools.boost --config configs/draft_model/boost.yaml [key=value ...]

Each model is a run of train/draft_model.py in its own folder below `out`; the list of folders is for specinfer's
`draft_models:`. Started again, it continues. The table at its end (and `coverage.json`) shows, for the first 1 to n
models, the share of held-out steps at which any is right, beside the same number of models trained on everything.
"""

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.common.paths import check_model
from drafters.config import load_config
from train.configs import BoostConfig, DraftModelConfig
from train.preflight.command import check as check_run


def main(argv: list[str] | None = None) -> None:
    """The command line in the module's docstring."""
    parser = CommandLine("train.tools.boost", __doc__, "YAML of the list", "keep=0.2")
    args = parser.parse(argv)
    config = load_config(BoostConfig, args.config, args.overrides)
    run = load_config(DraftModelConfig, config.run, [f"draft_model={config.draft_models[0]}"])
    for number, name in enumerate(config.draft_models):
        check_model(name, f"draft_models[{number}]")
    check_folder(config.out)
    check_run(run)
    if run.features == "online":
        raise ValueError(f"{config.run}: features is online, and what is covered is told by a feature store; give one")

    from train.run.boosting import boost

    with keeping(lambda: f"the runs are saved in {config.out}; to continue: {command()}"):
        boost(config, run)


if __name__ == "__main__":
    run_program(main)
