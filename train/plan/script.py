"""The plan as one script of plain commands, and as a table."""

import shlex
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from drafters.common.wording import size_text
from train.plan.steps import Plan


def script(plan: Plan, command: list[str]) -> str:
    """``run.sh``: a finished step leaves ``.done`` in its folder and does not run again."""
    total = sum(step.seconds for step in plan.steps)
    lines = [
        "#!/usr/bin/env bash",
        f"# Written by: {shlex.join(command)}",
        f"# About {minutes(total)} in all. A finished step leaves .done in its folder and does not run again; an",
        "# interrupted step continues. If you change a config, delete the folders made with the old one.",
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))}",
        f'export PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH"',
    ]
    for number, step in enumerate(plan.steps, start=1):
        done = shlex.quote(f"{step.done}/.done")
        sizes = {"disk": step.disk, "memory": step.memory}
        needed = "".join(f", {size_text(size)} of {what}" for what, size in sizes.items() if size)
        lines += [
            "",
            f"# {number}. {step.name}: about {minutes(step.seconds)}{needed}",
            f"# ({step.how})",
            f"if [ ! -e {done} ]; then",
            f'  echo "== $(date +%H:%M) {number} of {len(plan.steps)}: {step.name}, about {minutes(step.seconds)}"',
            *(f"  {line}" for line in step.commands),
            f"  touch {done}",
            "fi",
        ]
    return "\n".join([*lines, "", f'echo "== $(date +%H:%M) finished: {plan.report}"', ""])


def minutes(seconds: float) -> str:
    """Time in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def show(plan: Plan, console: Console) -> None:
    """The table of the steps."""
    table = Table("step", "minutes", "disk", "memory", "estimated from")
    for column in table.columns[1:4]:
        column.justify, column.no_wrap = "right", True
    for step in plan.steps:
        sizes = [size_text(size) if size else "" for size in (step.disk, step.memory)]
        table.add_row(step.name, f"{step.seconds / 60:.1f}", *sizes, step.how)
    total = sum(step.seconds for step in plan.steps) / 60
    disk = sum(step.disk for step in plan.steps)
    table.add_section()
    table.add_row("all", f"{total:.1f}", size_text(disk), size_text(max(step.memory for step in plan.steps)), "")
    console.print(table)
    for note in plan.notes:
        console.print(note, style="yellow")
