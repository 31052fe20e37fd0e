"""The configured drafters, built afresh for every round; what they only read, the draft models, is loaded once."""

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from drafters import Drafter, TargetModel, drafter_class, make_drafter
from drafters.config import Config
from drafters.decoding.target import Engine

# Options that name a model or a file, wherever in an entry they stand (a cascade's drafter has options of its own).
DRAFT_MODELS = ("draft_model", "draft_models")
FOLDERS = ("checkpoint", *DRAFT_MODELS)
FILES = ("pool",)


class DrafterEntry(Config):
    """One row of the report, or one for each combination of a ``grid``.

    Every other key is an option of the drafter; learned ones take ``checkpoint``.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    drafter: str = Field(description="the method: the name of its file in drafters/")
    label: str | None = Field(None, description="its name in the report; default: the method's")
    temperatures: list[float] | None = Field(None, description="default: all of the run's")
    grid: dict[str, list[Any]] | None = Field(
        None, min_length=1, description="values of options, dots for nested ones; every combination gets a row"
    )

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        for knob, values in (self.grid or {}).items():
            if not values or any(value in values[:index] for index, value in enumerate(values)):
                raise ValueError(f"grid: {knob} needs one or more different values, found {values}")
            if knob in DrafterEntry.model_fields or _holds(self.model_extra or {}, knob):
                raise ValueError(f"grid: {knob} is set in the entry itself, too; leave it in one of the two")
        return self

    @property
    def base(self) -> str:
        """The label, or the method's name: the rows of one grid share it."""
        return self.label or self.drafter

    @property
    def knobs(self) -> dict[str, Any]:
        """What an expanded entry takes from its grid."""
        return {knob: values[0] for knob, values in (self.grid or {}).items()}

    @property
    def name(self) -> str:
        """What the report calls it: of an expanded entry, with its place in the grid."""
        return " ".join([self.base, *(f"{knob}={value}" for knob, value in self.knobs.items())])

    @property
    def options(self) -> dict[str, Any]:
        """For ``make_drafter``; of an expanded entry, its place in the grid included."""
        options = copy.deepcopy(self.model_extra or {})
        for knob, value in self.knobs.items():
            *parents, leaf = knob.split(".")
            group = options
            for parent in parents:
                group = group.setdefault(parent, {})
            group[leaf] = value
        return options

    def expand(self) -> list["DrafterEntry"]:
        """One entry for each combination of the grid, the last knob turning fastest; without a grid, itself."""
        if self.grid is None:
            return [self]
        places = itertools.product(*self.grid.values())
        grids = [{knob: [value] for knob, value in zip(self.grid, place, strict=True)} for place in places]
        return [self.model_copy(update={"grid": grid}) for grid in grids]


def _holds(options: dict[str, Any], knob: str) -> bool:
    """Whether an option is given, or something that is no group of keys stands in the way of a nested one."""
    *parents, leaf = knob.split(".")
    for parent in parents:
        if parent not in options:
            return False
        options = options[parent]
        if not isinstance(options, dict):
            return True
    return leaf in options


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
            loaded = TargetModel.from_pretrained(
                path, dtype=self.target.dtype, device=self.target.device, engine=self.engine
            )
            self._draft_models[path] = loaded
        return self._draft_models[path]


class Lineup:
    """Builds drafters, so that none in a round has met a prompt before.

    All are built once at the start, which finds what is wrong with them; these are the ones that the first call of
    ``fresh`` for each hands out. Whoever gets drafters from there is the only one to hold them.

    Attributes:
        max_context: positions that every drafter was made for.

    Raises:
        ValueError: some cannot be built; one message names them all.
    """

    def __init__(self, entries: list[DrafterEntry], models: Models) -> None:
        self._entries, self._models = entries, models
        self._unused: dict[str, Drafter] = {}
        problems = []
        for entry in entries:
            try:
                self._unused[entry.name] = self._build(entry)
            except ValueError as error:
                problems.append(f"{entry.name}: {error}")
        if problems:
            raise ValueError("cannot build the drafters\n  " + "\n  ".join(problems))
        self.max_context = min(drafter.max_context for drafter in self._unused.values())
        self._lossless = {name: drafter.lossless for name, drafter in self._unused.items()}

    def fresh(self, temperature: float) -> dict[str, Drafter]:
        """The drafters of a temperature by their names in the report; none has seen a prompt."""
        wanted = [e for e in self._entries if e.temperatures is None or temperature in e.temperatures]
        return {e.name: self._unused.pop(e.name) if e.name in self._unused else self._build(e) for e in wanted}

    def describe(self) -> dict[str, dict[str, Any]]:
        """By name, what the report's rows say of each drafter beside what is measured."""
        return {
            e.name: {"lossless": self._lossless[e.name], "stock": False, "entry": e.base, "grid": e.knobs or None}
            for e in self._entries
        }

    def _build(self, entry: DrafterEntry) -> Drafter:
        known = drafter_class(entry.drafter).options.model_fields
        options = {  # an unknown option is not worth a model's loading: the drafter refuses it
            key: _with_draft_models(value, key, self._models.draft_model) if key in known else value
            for key, value in entry.options.items()
        }
        return make_drafter(entry.drafter, self._models.target, **options)


def _with_draft_models(value: Any, key: str, load: Callable[[str], TargetModel]) -> Any:
    """An option with loaded models in place of the paths under ``DRAFT_MODELS``, however deep; a list has its key."""
    if isinstance(value, str) and key in DRAFT_MODELS:
        return load(value)
    if isinstance(value, dict):
        return {inner: _with_draft_models(item, inner, load) for inner, item in value.items()}
    if isinstance(value, list):
        return [_with_draft_models(item, key, load) for item in value]
    return value


def check_entries(entries: list[DrafterEntry], paths: dict[str, str]) -> None:
    """What can be found out before the target is loaded.

    Args:
        paths: of other models, by their key in the config.

    Raises:
        ValueError: unknown drafters, or folders and files that are not there.
    """
    named = [(place, "checkpoint", path) for place, path in paths.items()]
    for entry in entries:
        drafter_class(entry.drafter)
        named += [(f"{entry.name}: {place}", key, text) for place, key, text in _texts(entry.options, "", "")]
    for _, key, text in named:
        if key == "drafter":
            drafter_class(text)
    folders = [f"{place} {path!r}" for place, key, path in named if key in FOLDERS and _is_missing_folder(path)]
    files = [f"{place} {path!r}" for place, key, path in named if key in FILES and not Path(path).is_file()]
    for kind, missing in (("folders", folders), ("files", files)):
        if missing:
            raise ValueError(
                f"these {kind} do not exist: {', '.join(missing)}; train or fetch them first, or mend the path"
            )


def _texts(value: Any, key: str, place: str) -> Iterator[tuple[str, str, str]]:
    """(place, key, text) of every string among an entry's options, however deep; a list's items have its key."""
    if isinstance(value, str):
        yield place, key, value
    elif isinstance(value, dict):
        for inner, item in value.items():
            yield from _texts(item, inner, f"{place}.{inner}" if place else inner)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key, place)


def _is_missing_folder(path: str) -> bool:
    """A name like ``checkpoints/x`` could be a Hub repository's; where ``checkpoints`` is a folder here, it is not."""
    here = Path(path)
    return not here.exists() and (here.is_absolute() or path.startswith(".") or Path(here.parts[0]).is_dir())
