"""Running programs as a user does."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

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


def refused(message: str) -> Any:
    """A context in which a ValueError must be raised with this message, a regular expression."""
    return pytest.raises(ValueError, match=message)
