"""Training and draft vocabulary of a drafter, including drafters inside of it."""

from collections.abc import Iterator
from typing import Any

from drafters import Drafter, LearnedDrafter
from drafters.model.draft_head import DraftHead
from drafters.model.text_tokens import TextTokens

KEPT = ("data", "dialogues", "tokens", "minutes", "ranks", "joules")  # fields of a checkpoint's training record


def trained_with(drafter: Drafter) -> list[dict[str, Any]]:
    """Return the training records of its checkpoints; empty if it has none."""
    found = []
    for one in _within(drafter):
        if isinstance(one, LearnedDrafter) and (training := one.provenance.get("training")):
            told = {name: training[name] for name in KEPT if training.get(name) is not None}
            found.append({"drafter": one.name, **told, "init_from": training.get("config", {}).get("init_from")})
    return found


def draft_vocabulary(drafter: Drafter) -> TextTokens | None:
    """Return the tokens of its pruned vocabulary before any text; None: all tokens."""
    for one in _within(drafter):
        for value in vars(one).values():
            for head in value if isinstance(value, list) else [value]:
                if isinstance(head, DraftHead) and (found := head.vocabulary()) is not None:
                    return found
    return None


def _within(drafter: Drafter) -> Iterator[Drafter]:
    yield drafter
    for value in vars(drafter).values():
        if isinstance(value, Drafter):
            yield from _within(value)
