"""Search a drafter's knobs one after the other: Ouroboros' heuristic search (Appendix B.2, Algorithm 1) for any method.

    python -m eval.tune --config configs/tune/ouroboros.yaml [key=value ...]

The config is a speed config with one drafter, one temperature and ``knobs: {option: [values]}``. The knobs are searched
in the order given, all values of one side by side in one alternating run while the others keep the value found, or, not
yet searched, one drawn at the start. ``out`` gets best.yaml (an entry for a speed config), tune.json and tune.md, and a
speed report for every knob. Run again, a search goes on where it stopped.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from drafters.config import load_config, validate
from drafters.program import command, keeping, run_program
from eval import speed
from eval.entries import check_folder


class TuneConfig(speed.SpeedConfig):
    """A speed config of one drafter at one temperature, and what to search."""

    knobs: dict[str, list[Any]] = Field(min_length=1, description="options (dots for nested ones) and their values")
    start: dict[str, Any] = Field({}, description="values to start from; a knob not named gets one of its own, drawn")
    objective: Literal["speed", "perplexity"] = Field(
        "speed", description="what is best: tokens/s, or for lossy methods the outputs' perplexity under the target"
    )
    passes: int = Field(1, ge=1, description="times all knobs are searched; Algorithm 1 has one")

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if len(self.drafters) != 1 or self.drafters[0].grid is not None or len(self.temperatures) != 1:
            raise ValueError(
                f"one drafter without a grid and one temperature are tuned at a time, found {len(self.drafters)} and "
                f"temperatures {self.temperatures}; give a config to each"
            )
        if alien := sorted(set(self.start) - set(self.knobs)):
            raise ValueError(f"start: {alien} are not among the knobs {sorted(self.knobs)}")
        for knob, values in self.knobs.items():
            if not values:
                raise ValueError(f"knobs: {knob} has no values; give two or more")
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
        return validate(speed.SpeedConfig, data, source=f"knobs: {knob}")


def check(config: TuneConfig) -> None:
    """What can be found out before the target is loaded, of every knob; raises as ``eval.speed.check``."""
    check_folder(config.out)
    for one in config.planned():
        speed.check(one)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, type=Path, help="YAML, see TuneConfig")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example prompts.count=8")
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser.parse_args(given)
    config = load_config(TuneConfig, parsed.config, parsed.overrides)
    check(config)

    from eval.speed_run import make_console
    from eval.tune_run import run

    with keeping(lambda: f"the knobs searched are kept in {config.out}; to go on: {command()}"):
        run(config, ["python", "-m", "eval.tune", *given], make_console())


if __name__ == "__main__":
    run_program(main)
