"""Write a trained MTP layer into a copy of its target, where vLLM, SGLang and other engines load it.

    python -m drafters.stitch CHECKPOINT --out FOLDER [--target MODEL]
    vllm serve FOLDER --speculative-config '{"method": "mtp", "num_speculative_tokens": 3}'

Only files that hold the layer are rewritten; other weights are hard links. The target itself stays as it is.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_new_folder
from drafters.common.paths import check_model


def main(arguments: list[str] | None = None) -> None:
    """Stitch, and name the files."""
    parser = CommandLine("drafters.stitch", __doc__)
    parser.add_argument("checkpoint", help="folder or Hub repository of a drafter of type mtp")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--target", help="folder of its target, if not the one that the checkpoint names")
    given = parser.parse(arguments)
    check_new_folder(given.out, "--out")
    check_model(given.checkpoint, "checkpoint")
    check_model(given.target, "--target")
    from drafters.layouts.stitch import stitch

    with keeping(lambda: f"{given.out} is incomplete: delete it; to start again: {command()}"):
        files = stitch(given.checkpoint, given.out, given.target)
    print(f"{given.out}: {', '.join(files)} rewritten, the other files as they were")


if __name__ == "__main__":
    run_program(main)
