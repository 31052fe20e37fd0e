"""The configured drafters, built again for every round; their draft models are loaded once."""

import difflib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from drafters import Drafter, LearnedDrafter, TargetModel, drafter_class, make_drafter
from drafters.model.draft_head import DraftHead, TextTokens
from eval.entries import DRAFT_MODELS, DrafterEntry
from eval.measure.models import Models

KEPT = ("data", "dialogues", "tokens", "minutes", "ranks", "joules")  # fields of a checkpoint's training record


class Lineup:
    """Builds drafters that have seen no prompt.

    All are built once at the start, which finds mistakes in their options; ``fresh`` hands these out first and keeps
    no reference.

    Attributes:
        max_context: positions that all drafters have.
        described: facts on each drafter for the report's rows, by name; without figures.
        draft_vocabularies: tokens of each drafter with a pruned vocabulary, by name.
        remembering: names of the drafters that remember earlier prompts.
    """

    def __init__(self, entries: list[DrafterEntry], models: Models) -> None:
        self._entries, self._models = entries, models
        self._unused: dict[int, Drafter] = {}  # by index: entries of different temperatures may share a name
        problems = []
        for place, entry in enumerate(entries):
            try:
                self._unused[place] = self._build(entry)
            except ValueError as error:
                problems.append(f"{entry.name}: {error}")
        if problems:
            raise ValueError("cannot build the drafters\n  " + "\n  ".join(problems))
        self.max_context = min(drafter.max_context for drafter in self._unused.values())
        self.described: dict[str, dict[str, Any]] = {}
        self.draft_vocabularies: dict[str, TextTokens] = {}
        self._rows = [drafter.max_batch or sys.maxsize for drafter in self._unused.values()]
        for entry, drafter in zip(entries, self._unused.values(), strict=True):
            row = {"lossless": drafter.lossless, "stock": False, "entry": entry.base, "grid": entry.knobs or None}
            trained = trained_with(drafter)
            self.described[entry.name] = row | {"method": entry.drafter} | ({"trained": trained} if trained else {})
            if (vocabulary := draft_vocabulary(drafter)) is not None:
                self.draft_vocabularies[entry.name] = vocabulary
        self.remembering = {e.name for place, e in enumerate(entries) if self._unused[place].remembers}

    def largest(self, temperature: float) -> dict[str, int]:
        """Return by name the largest batch of each drafter at a temperature."""
        return {e.name: self._rows[n] for n, e in self._at(temperature)}

    def fresh(self, temperature: float, batch: int = 1) -> dict[str, Drafter]:
        """Return by name the drafters that decode batches of this size; none has seen a prompt."""
        wanted = [(n, e) for n, e in self._at(temperature) if batch <= self._rows[n]]
        return {e.name: self._unused.pop(n) if n in self._unused else self._build(e) for n, e in wanted}

    def _at(self, temperature: float) -> list[tuple[int, DrafterEntry]]:
        numbered = enumerate(self._entries)
        return [(n, e) for n, e in numbered if e.temperatures is None or temperature in e.temperatures]

    def _build(self, entry: DrafterEntry) -> Drafter:
        known = keys_of(drafter_class(entry.drafter))
        options = {  # for an unknown option no model is loaded; the drafter refuses it
            key: _with_draft_models(value, key, self._models.draft_model) if key in known else value
            for key, value in entry.options.items()
        }
        return make_drafter(entry.drafter, self._models.target, **options)


def keys_of(kind: type[Drafter]) -> list[str]:
    """The options of a method; of a learned one also the keys of its head's shape, which a checkpoint has."""
    shape = kind.shape.model_fields if issubclass(kind, LearnedDrafter) else {}
    return [*kind.options.model_fields, *shape]


def check_options(entries: list[DrafterEntry]) -> None:
    """Raise ValueError for an option that its drafter does not have; before any model is loaded."""
    for entry in entries:
        kind = drafter_class(entry.drafter)
        learned = ("checkpoint", "revision", "adapter") if issubclass(kind, LearnedDrafter) else ()
        known = [*keys_of(kind), *learned]
        for name in entry.options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                raise ValueError(f"{entry.name}: unknown key {name!r}; {hint}")


def _with_draft_models(value: Any, key: str, load: Callable[[str], TargetModel]) -> Any:
    """Return an option with the paths under ``DRAFT_MODELS`` replaced by loaded models, at any depth."""
    if isinstance(value, str) and key in DRAFT_MODELS:
        return load(value)
    if isinstance(value, dict):
        return {inner: _with_draft_models(item, inner, load) for inner, item in value.items()}
    if isinstance(value, list):
        return [_with_draft_models(item, key, load) for item in value]
    return value


def trained_with(drafter: Drafter) -> list[dict[str, Any]]:
    """Return the training records of its checkpoints; empty if it has none."""
    records = []
    for one in _within(drafter):
        if isinstance(one, LearnedDrafter) and (training := one.provenance.get("training")):
            record = {name: training[name] for name in KEPT if training.get(name) is not None}
            records.append({"drafter": one.name, **record, "init_from": training.get("config", {}).get("init_from")})
    return records


def draft_vocabulary(drafter: Drafter) -> TextTokens | None:
    """Return the tokens of its pruned vocabulary before any text, or None if it drafts all tokens."""
    for one in _within(drafter):
        holder = one.head if isinstance(one, LearnedDrafter) else one
        for value in vars(holder).values():
            for head in value if isinstance(value, list) else [value]:
                if isinstance(head, DraftHead) and (vocabulary := head.vocabulary()) is not None:
                    return vocabulary
    return None


def _within(drafter: Drafter) -> Iterator[Drafter]:
    yield drafter
    for value in vars(drafter).values():
        if isinstance(value, Drafter):
            yield from _within(value)
