"""The page of eval.gpu: its parts, its goals, the measured figures; without torch."""

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from drafters.cli.program import command
from drafters.common.wording import json_object, shortened
from drafters.config import Config, validate
from eval.report.tables import table


@dataclass(frozen=True)
class Section:
    """One part: a few commands in a row.

    Attributes:
        name: also the name of its folder in the output folder. about: its purpose.
        commands: run from the checkout's root; ``{out}`` is the part's folder. The last command measures.
        result: the JSON file that it writes into its folder.
        seconds: its time limit.
        needs: modules that not every part needs. files: files and folders that must exist.
        remakes: folders that are deleted before the part begins.
    """

    name: str
    about: str
    commands: list[list[str]]
    result: str
    seconds: int
    needs: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    remakes: tuple[str, ...] = ()

    @property
    def shown(self) -> list[str]:
        """The commands as parts.json and the page have them: the same for every folder, OUT, and path of Python."""
        named = {sys.executable: "python"}
        return [shlex.join(named.get(word, word).replace("{out}", "OUT") for word in line) for line in self.commands]


@dataclass(frozen=True)
class Goal:
    """A figure of a part and its bound; with ``bound`` None it is only reported."""

    part: str
    text: str
    figure: Callable[[dict[str, Any]], float | None]
    bound: float | None = None
    at_least: bool = True
    form: str = "{:.2f}"

    def met(self, value: float | None) -> bool | None:
        """Return whether the value reaches the bound; None without a value or bound."""
        if value is None or self.bound is None:
            return None
        return value >= self.bound if self.at_least else value <= self.bound


class Ending(Config):
    """How a part ended: "done", "failed", "out of time" or "skipped", and why."""

    model_config = ConfigDict(strict=True)
    ended: str
    reason: str = ""
    seconds: float = 0.0
    commands: list[str] = []


def read_endings(file: Path) -> dict[str, Ending]:
    """Return the endings in a parts.json by part, none without the file; ValueError if it is damaged."""
    wrong = f"{file} is damaged, delete it to run all parts again"
    stored = json_object(file, f"{wrong}: it") if file.is_file() else {}
    return {name: validate(Ending, ending, f"{wrong}: {name}") for name, ending in stored.items()}


def judge(goal: Goal, parts: Sequence[Section], out: Path, outcomes: dict[str, Ending]) -> tuple[str, str]:
    """Return the measured figure, and whether the goal is met."""
    outcome = outcomes.get(goal.part)
    if outcome is None:
        return "", "not run yet"
    result = next(part.result for part in parts if part.name == goal.part)
    file = out / goal.part / result
    if outcome.ended != "done" or not file.is_file():
        return "", f"not measured: {outcome.ended}, {outcome.reason}"
    value, why = None, ""
    try:
        value = goal.figure(json_object(file, result))
    except (LookupError, TypeError, AttributeError, ValueError, ZeroDivisionError) as error:
        why = f" ({type(error).__name__}: {error})"
    if value is not None and not isinstance(value, int | float):
        value, why = None, f" (found {shortened(value)} instead of a number)"
    if value is None:
        return "", f"not measured: {result} does not hold it{why}"
    met = goal.met(value)
    return goal.form.format(value), "" if met is None else "yes" if met else "**no**"


def page(parts: Sequence[Section], goals: Sequence[Goal], out: Path, outcomes: dict[str, Ending]) -> str:
    """Return a table of the goals and a table of the parts."""
    rows = []
    for goal in goals:
        bound = "" if goal.bound is None else f"{'≥' if goal.at_least else '≤'} {goal.form.format(goal.bound)}"
        rows.append([goal.part, goal.text, bound, *judge(goal, parts, out, outcomes)])
    reached, wanted = sum(row[-1] == "yes" for row in rows), sum(goal.bound is not None for goal in goals)
    lines = ["# Goals on a GPU", "", f"`{command()}`", ""]
    lines += [*table(["part", "figure", "goal", "measured", "met"], rows, 2), ""]
    lines += [f"{reached} of {wanted} goals met.", ""]
    rows = []
    for part in parts:
        outcome = outcomes.get(part.name, Ending(ended="not run yet"))
        ended = f"{outcome.ended}: {outcome.reason}" if outcome.reason else outcome.ended
        last = f"`{outcome.commands[-1]}`" if outcome.commands else ""
        rows.append([part.name, part.about, ended, last, f"{outcome.seconds:.0f}"])
    lines += table(["part", "what", "ended", "command (OUT: the part's folder)", "seconds"], rows, 4)
    return "\n".join(lines) + "\n"
