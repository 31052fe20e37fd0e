"""Search a drafter's knobs one after the other: Ouroboros' heuristic search (Appendix B.2, Algorithm 1) for any method.

    python -m eval.tune --config configs/tune/ouroboros.yaml [key=value ...]
    python -m eval.tune --config configs/tune [key=value ...]

The config is a speed config with one drafter, one temperature and ``knobs: {option: [values]}``. Knobs are searched in
the order given: all values of one alternate in one run, while the others keep the value found, or one drawn at the
start. ``out`` gets best.yaml (an entry for a speed config), tune.json, tune.md and a speed report for every knob. For a
folder, all configs are searched in order, and tuned.yaml, in the folder that holds their ``out``, lists the results.
The same command resumes a search.

Tune on prompts that are not measured afterwards. Lossy methods lose quality: ``max_perplexity`` is the bound.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.config import load_config
from eval.configs import TuneConfig, common_folder


def load_searches(path: Path, overrides: list[str]) -> dict[Path, TuneConfig]:
    """Return the search of a file, or all searches in a folder, by file in order."""
    files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--config {path} is a folder without .yaml files; name a config, or a folder of configs")
    configs = {file: load_config(TuneConfig, file, overrides) for file in files}
    taken: dict[Path, Path] = {}
    for file, config in configs.items():
        if (other := taken.setdefault(config.out, file)) != file:
            raise ValueError(f"{other} and {file} both write to {config.out}: give each its own out")
    return configs


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("eval.tune", __doc__, "YAML, see TuneConfig; or a folder of such files", "prompts.count=8")
    parsed = parser.parse(arguments)
    configs = load_searches(parsed.config, parsed.overrides)
    for config in configs.values():
        config.check_paths()

    from eval.report.search import tune_all
    from eval.report.tables import make_console

    where = common_folder(configs)
    with keeping(lambda: f"the knobs searched are kept in {where}; to resume: {command()}"):
        tune_all(configs, parsed.overrides, make_console())


if __name__ == "__main__":
    run_program(main)
