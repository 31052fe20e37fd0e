"""Answers, or plain text -> a datastore for REST, which drafts what followed there (drafter: rest).

    python -m data_prep.datastore answers.jsonl --target runs/real/target --out runs/real/answers/rest.safetensors

Of dialogues (a ShareGPT file or a Hub dataset) the answers are taken, of a .txt file everything. Best are the target's
own answers: data_prep.regenerate writes them. The file has 8 bytes a token.
"""

from pathlib import Path

from data_prep.common.disk import check_room, source_bytes
from data_prep.dialogues.reader import check_source
from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_file
from drafters.common.paths import is_missing_folder


def main(arguments: list[str] | None = None) -> int:
    """Tokenize, sort and write."""
    parser = CommandLine("data_prep.datastore", __doc__)
    parser.add_argument("source", help="dialogues, or a .txt file")
    parser.add_argument("--target", required=True, help="folder or Hub repository of the target that they are for")
    parser.add_argument("--out", required=True, type=Path, help="the file to write, which ends in .safetensors")
    parser.add_argument("--tokenizer", help="folder or Hub repository, if not the target's")
    parser.add_argument("--chat-template", help="file with a Jinja template, in place of the tokenizer's own")
    parsed = parser.parse(arguments)
    if parsed.out.suffix != ".safetensors":
        raise ValueError(f"--out {parsed.out} does not end in .safetensors, and that is what it will be; add it")
    check_file(parsed.out, "--out")
    for given in (parsed.target, parsed.tokenizer):
        if given is not None and is_missing_folder(given):
            raise ValueError(f"there is no folder {given}; give that of the target, or of its tokenizer")
    if not is_text(parsed.source):
        check_source(parsed.source)
    check_room(parsed.out.parent, 3 * source_bytes(parsed.source), f"--out {parsed.out}", "give one on another disk")

    from data_prep.datastore_run import run

    with keeping(lambda: f"to start again: {command()}"):
        return run(parsed)


def is_text(source: str) -> bool:
    """Whether it is a plain text file."""
    return source.endswith(".txt") and Path(source).is_file()


if __name__ == "__main__":
    run_program(main)
