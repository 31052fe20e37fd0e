"""List the most frequent tokens of answers in a checkpoint, for drafters that draft with these alone.

    python -m train.draft_vocab runs/stdlib-eagle --data runs/stdlib/train.jsonl --size 8192

The folder holds a trained drafter, which drafts with them from then on, or a draft model, whose methods do so with the
option draft_vocab. Counted are the answers of dialogues (a ShareGPT file, a Hub dataset, or a feature store), or all of
a plain text (.txt). Best are the target's own answers: data_prep.regenerate writes them.

Any smaller draft_vocab can be chosen when the drafter is loaded; a training run with draft_vocab in its config does the
same by itself.
"""

from pathlib import Path

from data_prep.dialogues.reader import check_source, is_text
from data_prep.store.manifest import MANIFEST
from drafters.cli.program import CommandLine, command, keeping, positive, run_program


def main(arguments: list[str] | None = None) -> int:
    """Count, write, and print how many of the counted tokens lists of several lengths cover."""
    parser = CommandLine("train.draft_vocab", __doc__)
    parser.add_argument("folder", type=Path, help="a trained drafter, or a draft model; it is changed in place")
    parser.add_argument("--data", required=True, help="dialogues, a feature store (one split of it), or a .txt file")
    parser.add_argument("--size", type=positive, required=True, help="how many tokens to list, for example 8192")
    parser.add_argument("--tokenizer", help="folder or Hub repository, if not the target's (or the draft model's)")
    parser.add_argument("--chat-template", help="file with a Jinja template, in place of the tokenizer's own")
    parsed = parser.parse(arguments)
    if not (parsed.folder / "config.json").is_file():
        raise ValueError(f"{parsed.folder} holds no config.json; give the folder of a trained drafter or draft model")
    if not (Path(parsed.data) / MANIFEST).is_file() and not is_text(parsed.data):
        check_source(parsed.data)

    from train.draft_vocab_run import run

    with keeping(lambda: f"the checkpoint is as it was, or finished; to start again: {command()}"):
        return run(parsed)


if __name__ == "__main__":
    run_program(main)
