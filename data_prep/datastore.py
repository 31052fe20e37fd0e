"""Make a datastore for REST (drafter: rest) from answers or plain text. REST drafts how a stored text went on.

    python -m data_prep.datastore answers.jsonl --target runs/real/target --out runs/real/answers/rest.safetensors

For dialogues (a ShareGPT file or a Hub dataset) the answers are stored, for a .txt file all of it. The target's own
answers, written by data_prep.regenerate, work best. The file has 8 bytes per token.
"""

from pathlib import Path

from data_prep.common.disk import check_room, source_bytes
from data_prep.dialogues.reader import check_source, is_text
from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_file
from drafters.common.paths import is_missing_folder


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("data_prep.datastore", __doc__)
    parser.add_argument("source", help="dialogues, or a .txt file")
    parser.add_argument("--target", required=True, help="folder or Hub repository of the target")
    parser.add_argument("--out", required=True, type=Path, help="file to write; its name ends in .safetensors")
    parser.add_argument("--tokenizer", help="folder or Hub repository, if not the target's")
    parser.add_argument("--chat-template", help="file with a Jinja template, used instead of the tokenizer's own")
    parsed = parser.parse(arguments)
    if parsed.out.suffix != ".safetensors":
        raise ValueError(f"--out {parsed.out} does not end in .safetensors; add it")
    check_file(parsed.out, "--out")
    for model in (parsed.target, parsed.tokenizer):
        if model is not None and is_missing_folder(model):
            raise ValueError(f"there is no folder {model}; give the folder of the target, or of its tokenizer")
    if not is_text(parsed.source):
        check_source(parsed.source)
    check_room(parsed.out.parent, 3 * source_bytes(parsed.source), f"--out {parsed.out}", "give one on another disk")

    from data_prep.answers.datastore import make_datastore

    with keeping(lambda: f"to start again: {command()}"):
        make_datastore(parsed.source, parsed.target, parsed.out, parsed.tokenizer, parsed.chat_template)


if __name__ == "__main__":
    run_program(main)
