"""Add the most frequent tokens of answers to a checkpoint, for drafters that draft with these only.

    python -m train.tools.draft_vocab runs/stdlib-eagle --data runs/stdlib/train.jsonl --size 8192

The folder holds a trained drafter, which then drafts with these tokens, or a draft model, whose methods do so with the
option draft_vocab. The tokens are counted in the answers of dialogues (a ShareGPT file, a Hub dataset, or a feature
store), or in a plain text (.txt). The target's own answers are best: data_prep.regenerate writes them.

A loaded drafter accepts any smaller draft_vocab. A training run with draft_vocab in its config adds the tokens itself.
"""

from pathlib import Path

from data_prep.dialogues.reader import check_source, is_text
from data_prep.store.manifest import MANIFEST
from drafters.cli.program import CommandLine, command, keeping, positive, run_program


def main(arguments: list[str] | None = None) -> None:
    """Count, write, and print how many of the counted tokens lists of several lengths cover."""
    parser = CommandLine("train.tools.draft_vocab", __doc__)
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

    from train.data.draft_vocab import add_frequent_tokens

    with keeping(lambda: f"the checkpoint is as it was, or finished; to start again: {command()}"):
        add_frequent_tokens(parsed)


if __name__ == "__main__":
    run_program(main)
