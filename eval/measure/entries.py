"""The rows of a report as a config gives them, and whether what it names is there; without torch."""

import copy
import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat, model_validator

from drafters.common.paths import is_missing_folder
from drafters.common.wording import shortened
from drafters.config import Config, DraftSize, Length, Size
from drafters.methods import check_method

# Options that name a model or a file, wherever in an entry they stand (a cascade's drafter has options of its own).
DRAFT_MODELS = ("draft_model", "draft_models")
CHECKPOINTS = ("checkpoint", "adapter")
FOLDERS = (*CHECKPOINTS, *DRAFT_MODELS)
FILES = ("pool", "datastore")
STOCK = "stock generate"


def _check_odd(count: int) -> int:
    if count % 2 == 0:
        raise ValueError(f"of an even number none is the median: give {count - 1} or {count + 1}")
    return count


def _check_distinct(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError("they must be different")
    return values


Values = Annotated[list[Any], Field(min_length=1)]
DISTINCT = AfterValidator(_check_distinct)
Odd = Annotated[Size, Field(ge=1), AfterValidator(_check_odd)]


class DrafterEntry(Config):
    """One row of the report, or one for each combination of a ``grid``.

    Every other key is an option of the drafter; learned ones take ``checkpoint`` and ``adapter``.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    drafter: str = Field(description="the method: the name of its file in drafters/")
    label: str | None = Field(None, description="its name in the report; default: the method's")
    temperatures: list[NonNegativeFloat] | None = Field(None, description="default: all of the run's")
    grid: dict[str, Values] | None = Field(
        None, min_length=1, description="values of options, dots for nested ones; every combination gets a row"
    )

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        for knob, values in (self.grid or {}).items():
            if any(value in values[:index] for index, value in enumerate(values)):
                raise ValueError(f"grid: {knob} needs different values, found {shortened(values)}")
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
            set_key(options, knob, value, "grid")
        return options

    def expand(self) -> list["DrafterEntry"]:
        """One entry for each combination of the grid, the last knob turning fastest; without a grid, itself."""
        if self.grid is None:
            return [self]
        places = itertools.product(*self.grid.values())
        grids = [{knob: [value] for knob, value in zip(self.grid, place, strict=True)} for place in places]
        return [self.model_copy(update={"grid": grid}) for grid in grids]


def set_key(data: dict[str, Any], key: str, value: Any, what: str) -> None:
    """Set a dotted key; raises ValueError where a value stands in place of a group."""
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ValueError(f"{what}: {key} cannot be set, {parent!r} holds a value, not a group of keys")
    data[leaf] = value


def _holds(options: dict[str, Any], knob: str) -> bool:
    """Whether an option is given, or a value stands in place of a group that would hold it."""
    held: Any = options
    for part in knob.split("."):
        if not isinstance(held, dict):
            return True
        if part not in held:
            return False
        held = held[part]
    return True


def check_entries(entries: list[DrafterEntry], paths: dict[str, str]) -> None:
    """Check what can be checked before the target is loaded.

    Args:
        paths: of other models, by their key in the config.

    Raises:
        ValueError: unknown drafters, or folders and files that are not there.
    """
    named = [(place, "checkpoint", path) for place, path in paths.items()]
    for entry in entries:
        named.append((entry.name, "drafter", entry.drafter))
        named += [(f"{entry.name}: {place}", key, text) for place, key, text in _texts(entry.options, "", "")]
    for _, key, text in named:
        if key == "drafter":
            check_method(text)
    folders = [f"{place} {path!r}" for place, key, path in named if key in FOLDERS and is_missing_folder(path)]
    files = [f"{place} {path!r}" for place, key, path in named if key in FILES and not Path(path).is_file()]
    for kind, missing in (("folders", folders), ("files", files)):
        if missing:
            raise ValueError(
                f"these {kind} do not exist: {', '.join(missing)}; train or fetch them first, or correct the path"
            )


def paths_of(entries: list[DrafterEntry]) -> list[str]:
    """The models, checkpoints and files that the entries name."""
    return [text for entry in entries for text in named_in(entry.options, (*FOLDERS, *FILES))]


def named_in(options: dict[str, Any], keys: Collection[str]) -> list[str]:
    """What stands under ``keys`` in an entry's options, however deep."""
    return [text for _, key, text in _texts(options, "", "") if key in keys]


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


class StockEntry(Config):
    """A row of transformers' accelerated generation: by an assistant (draft) model, or by lookup in the prompt."""

    label: str = Field(description="its name in the report, where (stock) is added")
    assistant_model: str | None = Field(None, description="folder or Hub repository of a draft model")
    num_assistant_tokens: DraftSize | None = Field(
        None, ge=1, description="drafted every step, whatever the assistant's confidence; None: transformers' defaults"
    )
    prompt_lookup_num_tokens: DraftSize | None = Field(None, ge=1, description="tokens copied from the text every step")
    max_matching_ngram_size: Length | None = Field(None, ge=1, description="of the lookup; None: transformers' default")

    @property
    def remembers(self) -> bool:
        """Whether transformers adapts its drafts as it goes, from prompt to prompt."""
        return self.assistant_model is not None and self.num_assistant_tokens is None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.assistant_model is None) == (self.prompt_lookup_num_tokens is None):
            raise ValueError(f"{self.label}: give either assistant_model or prompt_lookup_num_tokens")
        if self.assistant_model is None and self.num_assistant_tokens is not None:
            raise ValueError(f"{self.label}: num_assistant_tokens is for an assistant_model, and there is none")
        if self.prompt_lookup_num_tokens is None and self.max_matching_ngram_size is not None:
            raise ValueError(f"{self.label}: max_matching_ngram_size needs prompt_lookup_num_tokens")
        return self
