"""The configured drafters, built afresh for every round; what they only read, the draft models, is loaded once."""

import difflib
from collections.abc import Callable
from typing import Any

from drafters import Drafter, LearnedDrafter, TargetModel, drafter_class, make_drafter
from drafters.config import Engine
from drafters.model.draft_head import TextTokens
from eval.measure.entries import DRAFT_MODELS, DrafterEntry
from eval.measure.inside import draft_vocabulary, trained_with


class Models:
    """A target and the draft models for it, each loaded once.

    Args:
        engine: of the draft models; None: each its best.
        stock: what transformers' own generation runs on, where the target is quantised.
    """

    def __init__(self, target: TargetModel, engine: Engine | None = None, stock: TargetModel | None = None) -> None:
        self.target, self.engine, self.stock = target, engine, stock or target
        self._draft_models: dict[str, TargetModel] = {}

    def draft_model(self, path: str) -> TargetModel:
        """The draft model of a folder or Hub repository, in the target's dtype and on its device.

        Raises:
            ValueError: it cannot be loaded.
        """
        if path not in self._draft_models:
            place = self.target.dtype, self.target.device
            self._draft_models[path] = TargetModel.from_pretrained(path, *place, engine=self.engine)
        return self._draft_models[path]


class Lineup:
    """Builds drafters, so that none in a round has met a prompt before.

    All are built once at the start, which finds what is wrong with them; these are the ones that the first call of
    ``fresh`` for each hands out. Whoever gets drafters from there is the only one to hold them.

    Attributes:
        max_context: positions that every drafter was made for.
        described: by name, what the report's rows say of each drafter beside what is measured.
        draft_vocabularies: by name, the tokens that a drafter with a pruned vocabulary can draft.
        remembering: the names of those that carry something from prompt to prompt.

    Raises:
        ValueError: some cannot be built; one message names them all.
    """

    def __init__(self, entries: list[DrafterEntry], models: Models) -> None:
        self._entries, self._models = entries, models
        self._unused: dict[int, Drafter] = {}  # by their entry's place: entries of other temperatures may share a name
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
        for place, e in enumerate(entries):
            row = {"lossless": self._unused[place].lossless, "stock": False, "entry": e.base, "grid": e.knobs or None}
            row["method"] = e.drafter
            trained, kept = trained_with(self._unused[place]), draft_vocabulary(self._unused[place])
            self.described[e.name] = row | ({"trained": trained} if trained else {})
            if kept is not None:
                self.draft_vocabularies[e.name] = kept
        self.remembering = {e.name for place, e in enumerate(entries) if self._unused[place].remembers}
        self._rows = [self._unused[place].max_batch for place in range(len(entries))]

    def fitting(self, temperature: float, batch: int) -> list[str]:
        """The names of those that decode so many prompts together at a temperature."""
        return [e.name for n, e in self._at(temperature) if self._fits(n, batch)]

    def refusing(self, temperature: float, batch: int) -> dict[str, int]:
        """The names of the others, and how many each can."""
        return {e.name: self._rows[n] or 0 for n, e in self._at(temperature) if not self._fits(n, batch)}

    def _at(self, temperature: float) -> list[tuple[int, DrafterEntry]]:
        numbered = enumerate(self._entries)
        return [(n, e) for n, e in numbered if e.temperatures is None or temperature in e.temperatures]

    def _fits(self, place: int, batch: int) -> bool:
        most = self._rows[place]
        return most is None or batch <= most

    def fresh(self, temperature: float, batch: int = 1) -> dict[str, Drafter]:
        """``fitting`` drafters by their names in the report; none has seen a prompt."""
        wanted = [(n, e) for n, e in self._at(temperature) if self._fits(n, batch)]
        return {e.name: self._unused.pop(n) if n in self._unused else self._build(e) for n, e in wanted}

    def _build(self, entry: DrafterEntry) -> Drafter:
        known = drafter_class(entry.drafter).options.model_fields
        options = {  # an unknown option is not worth a model's loading: the drafter refuses it
            key: _with_draft_models(value, key, self._models.draft_model) if key in known else value
            for key, value in entry.options.items()
        }
        return make_drafter(entry.drafter, self._models.target, **options)


def check_options(entries: list[DrafterEntry]) -> None:
    """Raise ValueError where an entry has an option that its drafter does not know; before any model is loaded."""
    for entry in entries:
        kind = drafter_class(entry.drafter)
        learned = ("checkpoint", "revision", "adapter") if issubclass(kind, LearnedDrafter) else ()
        known = [*kind.options.model_fields, *learned]
        for name in entry.options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
                raise ValueError(f"{entry.name}: unknown key {name!r}; {hint}")


def _with_draft_models(value: Any, key: str, load: Callable[[str], TargetModel]) -> Any:
    """An option with loaded models in place of the paths under ``DRAFT_MODELS``, however deep; a list has its key."""
    if isinstance(value, str) and key in DRAFT_MODELS:
        return load(value)
    if isinstance(value, dict):
        return {inner: _with_draft_models(item, inner, load) for inner, item in value.items()}
    if isinstance(value, list):
        return [_with_draft_models(item, key, load) for item in value]
    return value
