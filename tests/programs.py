"""Running programs as a user does."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafters.cli.program import Failure


def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than most reports of tests."""
    monkeypatch.setattr("eval.report.measured.speedups", lambda report: None)
    monkeypatch.setattr("eval.report.measured.save", lambda figure, path: path.write_bytes(b""))
    monkeypatch.setattr("eval.report.charts.speedups", lambda report: None)
    monkeypatch.setattr("eval.report.html.picture", lambda name, figure: "")


def status(main: Callable[[list[str]], int | None], *arguments: Any) -> int:
    """The exit status of a program's ``main``, its error on stderr as ``run_program`` prints it; in this process."""
    try:
        return main([str(argument) for argument in arguments]) or 0
    except (ValueError, OSError, Failure) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(main: Callable[[list[str]], int | None], config: dict[str, Any], *arguments: Any) -> int:
    """The exit status of a program of eval with ``config``, which is written beside its ``out``."""
    path = Path(config["out"]).parent / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return status(main, "--config", path, *arguments)


def refused(message: str) -> Any:
    """A context in which a ValueError must be raised with this message, a regular expression."""
    return pytest.raises(ValueError, match=message)
