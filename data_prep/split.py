"""One ShareGPT file or Hub dataset -> ``train.jsonl`` and ``heldout.jsonl``.

    python -m data_prep.split data/sharegpt.json --out runs/sharegpt --heldout 500 [--seed 0]

Usable dialogues only, in the order of the source, as `dialogues.py` hands them out; which of them are held out is drawn
from the seed. Dialogues with the same first question go to the same side, or the drafter would be tested on what it was
trained on.
"""

import argparse
import json
import random
import sys
from pathlib import Path

from drafters.provenance import replace_text

from .dialogues import Dialogue, ReadCounts, read_dialogues, source_digest

FROM = {"system": "system", "user": "human", "assistant": "gpt"}


def split(dialogues: list[Dialogue], heldout: int, seed: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """``dialogues`` without and with the held-out ones, at least ``heldout`` of them (a shared question brings more).

    Raises:
        ValueError: nothing would be left to train on.
    """
    groups: dict[str, list[int]] = {}
    for index, dialogue in enumerate(dialogues):
        groups.setdefault(_question(dialogue), []).append(index)
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


def record(dialogue: Dialogue) -> dict[str, object]:
    """The ShareGPT record of a dialogue."""
    turns = [{"from": FROM[message["role"]], "value": message["content"]} for message in dialogue.messages]
    category = {"category": dialogue.category} if dialogue.category else {}
    return {"id": dialogue.id, **category, "conversations": turns}


def _question(dialogue: Dialogue) -> str:
    return next(message["content"] for message in dialogue.messages if message["role"] == "user").strip().lower()


def main(arguments: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.split", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("source", help="ShareGPT .json, .jsonl or .gz file, or a Hub dataset as owner/name[:split]")
    parser.add_argument("--out", required=True, type=Path, help="folder of train.jsonl and heldout.jsonl")
    parser.add_argument("--heldout", type=int, default=500, help="dialogues to hold out (default 500)")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    if parsed.heldout < 1:
        raise ValueError(f"--heldout must be at least 1, found {parsed.heldout}")
    if parsed.out.exists() and not parsed.out.is_dir():
        raise ValueError(f"--out {parsed.out} is a file; give a folder")
    counts = ReadCounts()
    dialogues = list(read_dialogues(parsed.source, counts))
    train, heldout = split(dialogues, parsed.heldout, parsed.seed)
    parsed.out.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("heldout", heldout)):
        replace_text(parsed.out / f"{name}.jsonl", "".join(json.dumps(record(d)) + "\n" for d in part))
    facts = {"source": parsed.source, "source_digest": source_digest(parsed.source), "seed": parsed.seed}
    facts |= {"train": len(train), "heldout": len(heldout), "dropped": dict(counts.dropped)}
    replace_text(parsed.out / "split.json", json.dumps(facts, indent=1) + "\n")
    print(
        f"{parsed.source}: {counts.describe()}; {len(train):,} to train on, {len(heldout):,} held out -> {parsed.out}"
    )


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
