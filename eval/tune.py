"""Search a drafter's knobs one after the other: Ouroboros' heuristic search (Appendix B.2, Algorithm 1) for any method.

    python -m eval.tune --config configs/tune/ouroboros.yaml [key=value ...]
    python -m eval.tune --config configs/tune [key=value ...]

The config is a speed config with one drafter, one temperature and ``knobs: {option: [values]}``. The knobs are searched
in the order given, all values of one side by side in one alternating run while the others keep the value found, or, not
yet searched, one drawn at the start. ``out`` gets best.yaml (an entry for a speed config), tune.json and tune.md, and a
speed report for every knob. Of a folder all configs are searched, one after the other, and tuned.yaml, in the folder
that holds their ``out``, lists what was found. Run again, a search goes on where it stopped.

Tune on prompts that are not measured afterwards. Lossy methods buy speed with quality: ``max_perplexity`` is the bound.
"""

import os
import random
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.config import Size, load_config, validate
from eval import speed
from eval.measure.entries import Values


class TuneConfig(speed.SpeedConfig):
    """A speed config of one drafter at one temperature, and what to search."""

    knobs: dict[str, Values] = Field(min_length=1, description="options (dots for nested ones) and their values")
    start: dict[str, Any] = Field({}, description="values to start from; a knob that is not named gets a drawn one")
    objective: Literal["speed", "perplexity"] = Field(
        "speed", description="what is best: tokens/s, or for lossy methods the outputs' perplexity under the target"
    )
    max_perplexity: float | None = Field(
        None, gt=0, description="of a lossy method: most perplexity of its outputs, in times plain decoding's"
    )
    stock_generate: bool = Field(False, description="also measure transformers' own generation; nothing depends on it")
    passes: Size = Field(1, ge=1, description="times all knobs are searched; Algorithm 1 has one")

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if len(self.drafters) != 1 or self.drafters[0].grid is not None or len(self.temperatures) != 1:
            raise ValueError(
                f"one drafter without a grid and one temperature are tuned at a time, found {len(self.drafters)} and "
                f"temperatures {self.temperatures}; give a config to each"
            )
        self.check_one_batch("eval.tune")
        if self.max_perplexity is not None and self.objective != "speed":
            raise ValueError(
                f"max_perplexity is {self.max_perplexity:g} and objective {self.objective}: a bound is for the search "
                "for speed; leave one of the two out"
            )
        if alien := sorted(set(self.start) - set(self.knobs)):
            raise ValueError(f"start: {alien} are not among the knobs {sorted(self.knobs)}")
        for knob, values in self.knobs.items():
            if knob in self.start and self.start[knob] not in values:
                raise ValueError(f"start: {knob}={self.start[knob]} is not among its values {values}")
        return self

    def first_values(self) -> dict[str, Any]:
        """Where the search starts: drawn with the run's seed where ``start`` is silent (Algorithm 1's hats)."""
        draw = random.Random(self.seed)
        drawn = {knob: draw.choice(values) for knob, values in self.knobs.items()}
        return drawn | self.start

    def planned(self) -> list[speed.SpeedConfig]:
        """The stages of the first pass as they are known at the start."""
        chosen = self.first_values()
        return [self.stage(place, knob, chosen) for place, knob in enumerate(self.knobs, start=1)]

    def stage(self, number: int, knob: str, chosen: dict[str, Any]) -> speed.SpeedConfig:
        """The speed config that measures all values of ``knob``, the other knobs being as ``chosen``.

        Raises:
            ValueError: an option that the drafter does not have, or a value that it cannot have.
        """
        entry = self.drafters[0].model_dump(mode="json", exclude_unset=True)
        grid = {other: [value] for other, value in chosen.items()} | {knob: self.knobs[knob]}
        own = set(TuneConfig.model_fields) - set(speed.SpeedConfig.model_fields)
        data = self.model_dump(mode="json", exclude=own, exclude_unset=True)
        data |= {"drafters": [entry | {"grid": grid}], "out": str(self.out / f"{number}-{knob}")}
        data["stock_generate"] = self.stock_generate
        return validate(speed.SpeedConfig, data, source=f"knobs: {knob}")


def check(config: TuneConfig) -> None:
    """Check every knob as far as possible before the target is loaded; raises as ``eval.speed.check``."""
    check_folder(config.out)
    for one in config.planned():
        speed.check(one)


def load_configs(path: Path, overrides: list[str]) -> dict[Path, TuneConfig]:
    """The config of a file, or all of a folder and the folders in it, by their files in order.

    Raises:
        ValueError: no config there, one that is wrong, or two with one ``out``.
    """
    files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"--config {path} is a folder without .yaml files; name a config, or a folder of them")
    configs = {file: load_config(TuneConfig, file, overrides) for file in files}
    taken: dict[Path, Path] = {}
    for file, config in configs.items():
        if (other := taken.setdefault(config.out, file)) != file:
            raise ValueError(f"{other} and {file} both write to {config.out}: give each its own out")
    return configs


def common_folder(configs: dict[Path, TuneConfig]) -> Path:
    """The folder of one search, or the one that holds those of several."""
    return Path(os.path.commonpath([config.out for config in configs.values()]))


def main(arguments: list[str] | None = None) -> None:
    """Search the knobs of a config, or of every config in a folder."""
    parser = CommandLine("eval.tune", __doc__, "YAML, see TuneConfig; or a folder of such files", "prompts.count=8")
    parsed = parser.parse(arguments)
    configs = load_configs(parsed.config, parsed.overrides)
    for config in configs.values():
        check(config)

    from eval.report.screen import make_console
    from eval.tune_run import run_all

    where = common_folder(configs)
    with keeping(lambda: f"the knobs searched are kept in {where}; to go on: {command()}"):
        run_all(configs, parsed.overrides, make_console())


if __name__ == "__main__":
    run_program(main)
