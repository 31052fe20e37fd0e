"""Import a drafter in the form of its authors as a checkpoint of this toolkit; the reverse of ``drafters.export``.

    python -m drafters.convert SOURCE --target MODEL --out FOLDER
        [--revision R] [--exit-layer N] [--layout L] [--taps 2,12,21]

SOURCE is a folder or Hub repository of an EAGLE, EAGLE-2, EAGLE-3, DFlash, DFlash2 or DSpark head or a Kangaroo
adapter: config.json and model.safetensors, or pytorch_model.bin, from which only tensors are read. A Kangaroo adapter
needs --exit-layer, some DFlash and DSpark heads need --layout, and some EAGLE-3 heads --taps, because their files do
not tell it. FOLDER can be loaded (`load_drafter`), trained further (init_from) and published.
"""

from argparse import ArgumentTypeError
from pathlib import Path

from drafters.cli.program import CommandLine, command, keeping, positive, run_program
from drafters.common.files import check_new_folder
from drafters.common.paths import check_model
from drafters.heads.keys import LOADS_AS_IT_IS, read_config

LAYOUTS = ("fill-in", "anchor-first")


def numbers(text: str) -> list[int]:
    """argparse type of numbers of hidden states: 2,12,21."""
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise ArgumentTypeError(f"must be whole numbers with commas between them, such as 2,12,21, found {text!r}")
    return [int(part) for part in parts]


def main(arguments: list[str] | None = None) -> None:
    """Import a released checkpoint."""
    parser = CommandLine("drafters.convert", __doc__)
    parser.add_argument("source", help="folder or Hub repository of the released head")
    parser.add_argument("--target", required=True, help="folder or Hub repository of the model that it was trained for")
    parser.add_argument("--target-revision", help="of a target on the Hub")
    parser.add_argument("--out", required=True, type=Path, help="new folder")
    parser.add_argument("--revision", help="of a source on the Hub")
    parser.add_argument("--exit-layer", type=positive, help="of a Kangaroo adapter: layers of the target before it")
    parser.add_argument("--layout", choices=LAYOUTS, help="of a block head: what a slot predicts")
    parser.add_argument(
        "--taps",
        type=numbers,
        metavar="2,12,21",
        help="of an EAGLE-3 or block head: the target's hidden states that it reads, 2 after 2 layers",
    )
    parsed = parser.parse(arguments)
    check_new_folder(parsed.out, "--out")
    check_model(parsed.source, "source", parsed.revision)
    check_model(parsed.target, "--target", parsed.target_revision)
    if Path(parsed.source).is_dir():
        read_config(Path(parsed.source), parsed.source, LOADS_AS_IT_IS)
    from drafters.layouts.convert import convert

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        revisions = parsed.revision, parsed.target_revision
        stated = parsed.layout, parsed.taps
        for notice in convert(parsed.source, parsed.target, parsed.out, parsed.exit_layer, *revisions, *stated):
            print(f"note: {notice}")
    print(parsed.out)


if __name__ == "__main__":
    run_program(main)
