"""Make a draft model of a few of the target's own layers, for targets whose family has no small model.

    python -m train.tools.shallow TARGET --layers 0-2,29 --out runs/shallow
    deepspeed train/draft_model.py --config configs/real/shallow.yaml   # align it: untrained, it is right by chance

The embedding, the norm and the LM head are the target's, too. Only these tensors are read from the target's files: four
layers of a Llama of 70B need 11 GB of memory.
"""

import argparse
from pathlib import Path

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_new_folder
from drafters.common.paths import check_model


def layer_numbers(text: str) -> list[int]:
    """``"0-2,29"`` -> ``[0, 1, 2, 29]``.

    Raises:
        ValueError: no numbers, or not rising.
    """
    try:
        parts = [[int(number) for number in part.split("-", 1)] for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers is {text!r}; give numbers from 0 on, for example 0-2,29") from None
    numbers = [number for part in parts for number in range(part[0], part[-1] + 1)]
    if not numbers or numbers != sorted(set(numbers)):
        raise ValueError(f"--layers {text} gives {numbers}; name layers once, in their order, for example 0-2,29")
    return numbers


def main(arguments: list[str] | None = None) -> None:
    """Write the folder."""
    parser = CommandLine("train.tools.shallow", __doc__)
    parser.add_argument("target", help="folder or Hub name of the target")
    parser.add_argument("--layers", required=True, help="which to take, counted from 0, for example 0-2,29")
    parser.add_argument("--out", required=True, type=Path, help="folder of the draft model; must be new or empty")
    parser.add_argument("--revision", help="the target's Hub revision")
    parsed: argparse.Namespace = parser.parse(arguments)
    layers = layer_numbers(parsed.layers)
    check_model(parsed.target, "target", parsed.revision)
    check_new_folder(parsed.out, "--out")

    from train.draft.shallow import shorten

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        size = shorten(parsed.target, parsed.revision, layers, parsed.out)
    print(f"{parsed.out}: {len(layers)} layers of {parsed.target}, {size:,} weights; align it before it drafts")


if __name__ == "__main__":
    run_program(main)
