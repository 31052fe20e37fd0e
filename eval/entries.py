"""The rows of a report as a config gives them: drafters, stock generation, other engines; without torch."""

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, ConfigDict, Field, NonNegativeFloat, model_validator

from drafters.common.paths import is_missing_folder
from drafters.common.wording import shortened
from drafters.config import Config, DraftSize, Length, Size
from drafters.methods import check_method

# Options that name a model or a file, at any depth of an entry (the drafter inside a cascade has options of its own).
DRAFT_MODELS = ("draft_model", "draft_models")
FOLDERS = ("checkpoint", "adapter", *DRAFT_MODELS)
FILES = ("pool", "datastore")
STOCK = "stock generate"  # label of transformers' own generation
PYTHONS = {
    "vllm": Path(".venv-vllm/bin/python"),
    "sglang": Path(".venv-sglang/bin/python"),
    "llama_cpp": Path(".venv-llama/bin/python"),
}
ServedHead = Literal["eagle", "eagle3", "dflash", "dflash2", "dspark"]
# Engine's method -> its required key.
NEEDS = {"draft_model": "draft_model"} | dict.fromkeys(get_args(ServedHead), "checkpoint")


def _check_odd(count: int) -> int:
    if count % 2 == 0:
        raise ValueError(f"an even number has no median: give {count - 1} or {count + 1}")
    return count


def _check_distinct(values: list[Any]) -> list[Any]:
    if len(set(values)) < len(values):
        raise ValueError("they must be different")
    return values


Values = Annotated[list[Any], Field(min_length=1)]
DISTINCT = AfterValidator(_check_distinct)
Odd = Annotated[Size, Field(ge=1), AfterValidator(_check_odd)]


class DrafterEntry(Config):
    """One row of the report, or one row for each combination of ``grid``.

    Every other key is an option of the drafter; learned drafters take ``checkpoint`` and ``adapter``.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    drafter: str = Field(description="the method: the name of its file in drafters/methods")
    label: str | None = Field(None, description="name in the report; default: the method's")
    temperatures: list[NonNegativeFloat] | None = Field(None, description="default: all temperatures of the run")
    grid: dict[str, Values] | None = Field(
        None,
        min_length=1,
        description="values of options (dots for nested ones), instead of the entry's; every combination gets a row",
    )

    @model_validator(mode="after")
    def _check_grid(self) -> Self:
        for knob, values in (self.grid or {}).items():
            if any(value in values[:index] for index, value in enumerate(values)):
                raise ValueError(f"grid: {knob} needs different values, found {shortened(values)}")
        return self

    @property
    def base(self) -> str:
        """The label or the method's name, which all rows of one grid share."""
        return self.label or self.drafter

    @property
    def knobs(self) -> dict[str, Any]:
        """The values that an expanded entry takes from its grid."""
        return {knob: values[0] for knob, values in (self.grid or {}).items()}

    @property
    def name(self) -> str:
        """The row's name in the report, with the values of its grid."""
        return " ".join([self.base, *(f"{knob}={value}" for knob, value in self.knobs.items())])

    @property
    def options(self) -> dict[str, Any]:
        """Options for ``make_drafter``, including the values of its grid."""
        options = copy.deepcopy(self.model_extra or {})
        for knob, value in self.knobs.items():
            set_key(options, knob, value, "grid")
        return options

    def expand(self) -> list["DrafterEntry"]:
        """Return one entry per combination of the grid; the last knob changes fastest."""
        if self.grid is None:
            return [self]
        grids = (dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values()))
        return [self.at(grid) for grid in grids]

    def at(self, values: dict[str, Any]) -> "DrafterEntry":
        """Return this entry with one value for each knob."""
        return self.model_copy(update={"grid": {knob: [value] for knob, value in values.items()}})


def set_key(data: dict[str, Any], key: str, value: Any, what: str) -> None:
    """Set a dotted key; raises ValueError if one of its groups holds a plain value."""
    *parents, leaf = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ValueError(f"{what}: {key} cannot be set, {parent!r} holds a value, not a group of keys")
    data[leaf] = value


class StockEntry(Config):
    """A row of transformers' accelerated generation: with an assistant (draft) model or with prompt lookup."""

    label: str = Field(description="name in the report, which adds (stock)")
    assistant_model: str | None = Field(None, description="folder or Hub repository of a draft model")
    num_assistant_tokens: DraftSize | None = Field(
        None, ge=1, description="draft tokens per step at any confidence; None: transformers' defaults"
    )
    prompt_lookup_num_tokens: DraftSize | None = Field(None, ge=1, description="tokens copied from the text per step")

    @property
    def remembers(self) -> bool:
        """Whether transformers adapts the draft length from prompt to prompt."""
        return self.assistant_model is not None and self.num_assistant_tokens is None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.assistant_model is None) == (self.prompt_lookup_num_tokens is None):
            raise ValueError(f"{self.label}: give either assistant_model or prompt_lookup_num_tokens")
        if self.num_assistant_tokens is not None and self.assistant_model is None:
            raise ValueError(f"{self.label}: num_assistant_tokens needs assistant_model")
        return self


class EngineEntry(Config):
    """A row of another engine."""

    label: str = Field(description="name in the report, which adds the engine and its version")
    engine: Literal["vllm", "sglang", "llama_cpp"]
    method: Literal["plain", "prompt_lookup", "draft_model", ServedHead] = "plain"
    gamma: DraftSize = Field(5, ge=1, description="draft tokens per step")
    min_ngram: Length = Field(1, ge=1, description="of prompt lookup; llama.cpp always starts with one")
    max_ngram: Length = Field(3, ge=1, description="of prompt lookup")
    draft_model: str | None = Field(None, description="folder or Hub repository, for method draft_model")
    checkpoint: str | None = Field(None, description="our EAGLE, EAGLE-3 or block head; exported first")
    gguf: Path | None = Field(None, description="llama.cpp's model: the target as a GGUF file")
    gguf_type: Literal["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"] | None = Field(
        None, description="llama.cpp first converts the file to this type; None: no conversion"
    )
    repack: bool | None = Field(
        None, description="llama.cpp rearranges weights for AMX and similar; None: unless that crashes"
    )
    beside: str | None = Field(None, description="label of our row with which acceptance by depth is compared")
    python: Path | None = Field(None, description="Python of its environment; default: that of make engines")
    module: str | None = Field(None, description="worker module; default: the engine's in eval/engine_workers")

    @property
    def interpreter(self) -> Path:
        """The Python of its environment."""
        return self.python or PYTHONS[self.engine]

    @property
    def worker(self) -> str:
        """The module that this Python runs."""
        return self.module or f"eval.engine_workers.{self.engine}_worker"

    @property
    def paths(self) -> dict[str, str]:
        """By key, the models and files that it names."""
        paths = {"draft_model": self.draft_model, "checkpoint": self.checkpoint, "gguf": self.gguf}
        return {key: str(path) for key, path in paths.items() if path is not None}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in dict.fromkeys(NEEDS.values()):
            if (NEEDS.get(self.method) == key) != (getattr(self, key) is not None):
                methods = " or ".join(method for method, needed in NEEDS.items() if needed == key)
                raise ValueError(f"{self.label}: {key} and method {methods} go together; method is {self.method}")
        if self.engine == "llama_cpp" and (self.gguf is None or self.method not in ("plain", "prompt_lookup")):
            options = f"method {self.method}, gguf {self.gguf}"
            raise ValueError(f"{self.label}: llama_cpp takes gguf and method plain or prompt_lookup; found {options}")
        if self.engine != "llama_cpp" and any(value is not None for value in (self.gguf, self.gguf_type, self.repack)):
            raise ValueError(
                f"{self.label}: gguf, gguf_type and repack are options of llama_cpp; {self.engine} loads the target"
            )
        unserved = {"vllm": ("dspark", "dflash2"), "sglang": ("prompt_lookup",)}
        if self.method in unserved.get(self.engine, ()):
            raise ValueError(f"{self.label}: there is no method {self.method} for {self.engine} (docs/engines.md)")
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"{self.label}: min_ngram is {self.min_ngram}, more than max_ngram {self.max_ngram}")
        return self


def check_entries(entries: list[DrafterEntry], paths: dict[str, str]) -> None:
    """Raise ValueError for unknown methods and for folders and files that do not exist.

    Args:
        paths: other models, by their key in the config.
    """
    named = [(place, "checkpoint", path) for place, path in paths.items()]
    for entry in entries:
        check_method(entry.drafter)
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
    """Return the models, checkpoints and files that the entries name."""
    keys = (*FOLDERS, *FILES)
    return [text for entry in entries for _, key, text in _texts(entry.options, "", "") if key in keys]


def _texts(value: Any, key: str, place: str) -> Iterator[tuple[str, str, str]]:
    """Yield (dotted place, key, text) of every string in an entry's options; items of a list have the list's key."""
    if isinstance(value, str):
        yield place, key, value
    elif isinstance(value, dict):
        for inner, item in value.items():
            yield from _texts(item, inner, f"{place}.{inner}" if place else inner)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key, place)
