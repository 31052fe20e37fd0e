"""Export a trained drafter in the form that its official code or an engine loads, or check a folder in such a form.

    python -m drafters.export CHECKPOINT --to PROGRAM --out FOLDER [--target MODEL] [--adapter LORA]
    python -m drafters.export --check FOLDER [--to PROGRAM] [--target MODEL]

PROGRAM is official, vllm, sglang, speculators or llama.cpp. EAGLE-3 and DFlash heads go to all, DSpark heads to all but
the first, DFlash2 heads to all but the last, EAGLE heads with the decoder layer of a Llama to the first three, Kangaroo
adapters of Llamas to their official code. Each folder gets a README.md with the command that serves it. These programs
do not report a wrong name, shape or key of config.json: --check does, with status 1.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_new_folder
from drafters.common.paths import check_model
from drafters.heads.keys import EXPORT_FIRST, READERS, read_config


def main(arguments: list[str] | None = None) -> None:
    """Export a checkpoint, or check a folder."""
    parser = CommandLine("drafters.export", __doc__)
    parser.add_argument("checkpoint", nargs="?", help="folder or Hub repository of a drafter")
    parser.add_argument("--to", choices=READERS, help="what is to load it")
    parser.add_argument("--out", type=Path, help="new folder")
    parser.add_argument("--target", help="its target, where that is not at the place that the checkpoint names")
    parser.add_argument("--adapter", help="folder or Hub repository of a LoRA for the drafter, to be merged into it")
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="check this folder, and write nothing")
    given = parser.parse(arguments)
    exported = (given.checkpoint, given.out, given.adapter)
    check_model(given.target, "--target")
    if given.check is not None:
        if any(exported):
            parser.error("--check FOLDER takes --to and --target alone")
        if not given.check.is_dir():
            raise ValueError(f"--check: there is no folder {given.check}")
        read_config(given.check, str(given.check), EXPORT_FIRST)
        from drafters.layouts.export import check

        print(f"OK: {check(given.check, given.to, given.target)}")
        return
    if not (given.checkpoint and given.to and given.out):
        parser.error(f"give CHECKPOINT --to {'|'.join(READERS)} --out FOLDER, or --check FOLDER")
    check_new_folder(given.out, "--out")
    check_model(given.checkpoint, "checkpoint")
    check_model(given.adapter, "--adapter")
    from drafters.layouts.export import export

    with keeping(lambda: f"nothing was written; to start again: {command()}"):
        for notice in export(given.checkpoint, given.to, given.out, given.target, given.adapter):
            print(f"note: {notice}")
    print(given.out)


if __name__ == "__main__":
    run_program(main)
