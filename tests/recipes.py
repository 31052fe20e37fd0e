"""The estimates that the recipes in configs/ carry as comments: read them, or rewrite them with

    python tests/recipes.py

after a change of the training code or of a recipe. A test holds them to what their own command says.
"""

import os
import shlex
from pathlib import Path

from drafters.config import load_config
from train.configs import schema_of, trained_methods
from train.preflight.command import parse_arguments
from train.preflight.dry_run import Report, dry_run

ROOT = Path(__file__).resolve().parents[1]
KINDS = trained_methods()
PREFIX = "#   "


def recipes() -> list[Path]:
    """The run configs that say what they take."""
    files = sorted(file for kind in KINDS for file in (ROOT / "configs" / kind).glob("*.yaml"))
    return [file for file in files if "--dry-run" in file.read_text()]


def lines_of(file: Path) -> tuple[list[str], int, int]:
    """The lines of a recipe, and where its estimate begins and ends: the comment after the command."""
    lines = file.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if "--dry-run" in line)
    while lines[start].endswith("\\"):
        start += 1
    end = next(number for number in range(start + 1, len(lines)) if not lines[number].startswith(PREFIX))
    return lines, start + 1, end


def estimate(file: Path) -> tuple[Report, list[str]]:
    """Run the recipe's own command; its report, and the comment that follows from it."""
    text = file.read_text()
    command = text[text.index(f"python train/{file.parent.name}.py") :].partition("\n#   drafter")[0]
    words = shlex.split(command.replace("\\\n#", ""))
    assert words[1] == f"train/{file.parent.name}.py", words
    arguments = parse_arguments(None, words[2:])
    assert arguments.config == str(file.relative_to(ROOT)), f"{file} names {arguments.config}"
    config = load_config(schema_of(file.parent.name), ROOT / arguments.config, arguments.overrides)
    report = dry_run(config, arguments)
    return report, [PREFIX + part for part in report.short]


def main() -> None:
    """Rewrite all estimates."""
    os.chdir(ROOT)
    for file in recipes():
        lines, start, end = lines_of(file)
        _, new = estimate(file)
        file.write_text("\n".join([*lines[:start], *new, *lines[end:]]) + "\n")
        print(file.relative_to(ROOT), "changed" if lines[start:end] != new else "as it was")


if __name__ == "__main__":
    main()
