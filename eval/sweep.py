"""``eval.speed`` for several values of one key of its config, one after the other.

    python -m eval.sweep --config configs/sweep/X.yaml [key=value ...]

The config is a speed config and ``vary: {key: [values]}``, a dotted key such as ``max_new_tokens`` or
``prompts.consecutive``.

Every value has its own plain decoding, over which its speedups are, and its own report in ``out/<key>=<value>/``;
``out`` gets sweep.json, sweep.md and sweep.png. The target and the draft models are loaded once, and again only where
``target`` itself varies. Run again, a sweep goes on where it stopped: a value that has a report of the same config,
commit and machine is not measured again, and the one that was interrupted goes on after its last prompt.
"""

import json
from typing import Any, Self

from pydantic import Field, model_validator

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.common.wording import shortened
from drafters.config import load_config, validate
from eval import speed
from eval.measure.entries import Values, set_key


class SweepConfig(speed.SpeedConfig):
    """A speed config, and what varies in it."""

    vary: dict[str, Values] = Field(min_length=1, max_length=1, description="one key, dotted, and its values")

    @model_validator(mode="after")
    def _check_vary(self) -> Self:
        key, values = self.varied
        if key.partition(".")[0] in ("out", "vary"):
            raise ValueError(f"vary: {key} cannot vary: every value's folder is named after it")
        names = [folder_name(key, value) for value in values]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"vary: values must be different, {shortened(repeated)} is given twice")
        return self

    @property
    def varied(self) -> tuple[str, list[Any]]:
        """The key and its values."""
        return next(iter(self.vary.items()))

    def speed_configs(self) -> list[speed.SpeedConfig]:
        """A complete config for every value, each with its own folder.

        Raises:
            ValueError: no such key, or a value that it cannot have.
        """
        key, values = self.varied
        configs = []
        for value in values:
            data = self.model_dump(mode="json", exclude={"vary"}, exclude_unset=True)
            name = folder_name(key, value)
            set_key(data, key, value, "vary")
            data["out"] = str(self.out / name)
            configs.append(validate(speed.SpeedConfig, data, source=f"vary: {name}"))
            configs[-1].check_one_batch("a value of eval.sweep")
        return configs


def folder_name(key: str, value: Any) -> str:
    """``key=value``, without the slashes of a path."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{key}={text}".replace("/", "_")


def check(config: SweepConfig) -> None:
    """Check every value as far as possible before the target is loaded; raises as ``eval.speed.check``."""
    check_folder(config.out)
    for one in config.speed_configs():
        speed.check(one)


def main(arguments: list[str] | None = None) -> None:
    """Run the speed test for every value of the key that varies."""
    parsed = CommandLine("eval.sweep", __doc__, "YAML, see SweepConfig", "prompts.count=8").parse(arguments)
    config = load_config(SweepConfig, parsed.config, parsed.overrides)
    check(config)

    from eval.report.screen import make_console
    from eval.sweep_run import run

    with keeping(lambda: f"the values measured are kept in {config.out}; to go on: {command()}"):
        run(config, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)
