"""What a drafter is made of, those within it included: what it was trained with, and the tokens that it can draft."""

from collections.abc import Iterator
from typing import Any

from drafters import Drafter, LearnedDrafter
from drafters.model.draft_head import DraftHead, TextTokens

TOLD = ("data", "dialogues", "tokens", "minutes", "ranks", "joules")  # of a training, as its checkpoint records it


def trained_with(drafter: Drafter) -> list[dict[str, Any]]:
    """What its checkpoints record of their training; empty where nothing within it was trained."""
    found = []
    for one in _within(drafter):
        if isinstance(one, LearnedDrafter) and (training := one.provenance.get("training")):
            told = {name: training[name] for name in TOLD if training.get(name) is not None}
            found.append({"drafter": one.name, **told, "init_from": training.get("config", {}).get("init_from")})
    return found


def draft_vocabulary(drafter: Drafter) -> TextTokens | None:
    """The tokens that its LM heads can draft, before any text, where its vocabulary is pruned; None: all."""
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
