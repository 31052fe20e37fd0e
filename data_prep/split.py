"""Split one ShareGPT file or Hub dataset into ``train.jsonl`` and ``heldout.jsonl``.

    python -m data_prep.split data/sharegpt.json --out runs/sharegpt --heldout 500 [--seed 0]

Only usable dialogues are written, in the order of the source; the seed decides which are held out. Dialogues with the
same first question go to the same side, so that a drafter is not tested on what it was trained on.
"""

import argparse
import json
import random
from pathlib import Path

from data_prep.common.disk import check_room, source_bytes
from data_prep.dialogues.reader import (
    Dialogue,
    ReadCounts,
    check_source,
    first_question,
    read_dialogues,
    record,
    source_digest,
)
from drafters.cli.program import CommandLine, command, keeping, positive, run_program
from drafters.common.files import check_folder, replace_json, replace_text
from drafters.common.provenance import changes

FACTS = "split.json"


def main(arguments: list[str] | None = None) -> None:
    parser = CommandLine("data_prep.split", __doc__)
    parser.add_argument(
        "source", help="ShareGPT .json, .jsonl or .gz file, or a Hub dataset as owner/name[:config][:split]"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder of train.jsonl and heldout.jsonl")
    parser.add_argument("--heldout", type=positive, default=500, help="dialogues to hold out (default 500)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--unanswered", action="store_true", help="keep questions that data_prep.regenerate will answer"
    )
    parsed = parser.parse(arguments)
    check_source(parsed.source)
    facts: dict[str, object] = {"source_digest": source_digest(parsed.source), "seed": parsed.seed}
    facts |= {"wanted": parsed.heldout, "unanswered": parsed.unanswered}
    check_out(parsed.out, parsed.source, facts)
    check_room(parsed.out, source_bytes(parsed.source), f"--out {parsed.out}", "give a folder on another disk")
    with keeping(lambda: f"to start again: {command()}"):
        write_split(parsed, facts)


def check_out(out: Path, source: str, facts: dict[str, object]) -> None:
    """Raise ValueError unless ``out`` is free or has this very split, complete or not."""
    check_folder(out, "--out")
    files = [out / f"{name}.jsonl" for name in ("train", "heldout")]
    if any(file.exists() and Path(source).exists() and file.samefile(source) for file in files):
        raise ValueError(f"--out {out} would overwrite the source {source}; give another folder")
    facts_file = out / FACTS
    if not facts_file.is_file():
        if names := [file.name for file in files if file.exists()]:
            raise ValueError(f"--out {out} has a {names[0]} that no split has made; give another folder")
        return
    try:
        before = {"unanswered": False, **json.loads(facts_file.read_text())}  # older splits do not record it
        changed = changes({key: before[key] for key in facts}, facts)
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{facts_file} was not written by this program; give another folder") from None
    if changed:  # a drafter could be tested on its training data
        raise ValueError(f"--out {out} holds another split: {'; '.join(changed)}; give another folder, or delete it")


def write_split(parsed: argparse.Namespace, facts: dict[str, object]) -> None:
    """Read the source, and write both sides and ``facts``."""
    counts = ReadCounts()
    dialogues = list(read_dialogues(parsed.source, counts, parsed.unanswered))
    train, heldout = split(dialogues, parsed.heldout, parsed.seed)
    facts |= {"source": parsed.source, "train": len(train), "heldout": len(heldout), "dropped": dict(counts.dropped)}
    parsed.out.mkdir(parents=True, exist_ok=True)
    replace_json(parsed.out / FACTS, facts)  # first, so that a killed run can be repeated
    for name, part in (("train", train), ("heldout", heldout)):
        replace_text(parsed.out / f"{name}.jsonl", "".join(json.dumps(record(d)) + "\n" for d in part))
    print(
        f"{parsed.source}: {counts.describe()}; {len(train):,} to train on, {len(heldout):,} held out -> {parsed.out}"
    )


def split(dialogues: list[Dialogue], heldout: int, seed: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """Training and held-out dialogues; at least ``heldout``, more if questions are shared. ValueError if all."""
    groups: dict[str, list[int]] = {}
    for index, dialogue in enumerate(dialogues):
        groups.setdefault(first_question(dialogue), []).append(index)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    chosen: set[int] = set()
    for group in order:
        if len(chosen) >= heldout:
            break
        chosen.update(group)
    if len(chosen) >= len(dialogues):
        raise ValueError(
            f"--heldout {heldout} takes all of the {len(dialogues)} usable dialogues ({len(groups)} different first "
            "questions); hold out fewer"
        )
    train = [dialogue for index, dialogue in enumerate(dialogues) if index not in chosen]
    return train, [dialogues[index] for index in sorted(chosen)]


if __name__ == "__main__":
    run_program(main)
