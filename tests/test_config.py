"""Run configurations: what is wrong in a YAML is said at once, with the key and the fix."""

import contextlib
import importlib
import math
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel, Field, ValidationError

from drafters.config import Config, load_config
from drafters.hub.reports import Part


class Schedule(Config):
    learning_rate: float = Field(default=1e-4, gt=0)
    warmup_steps: int = 0


class Run(Config):
    out: str
    steps: int = 10
    schedule: Schedule = Schedule()
    taps: list[int] = []
    suites: list[Schedule] = []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("out: runs/a\nschedule:\n  warmup_steps: 5\nsuites:\n  - warmup_steps: 1\n")
    return path


def test_values_and_overrides(file: Path) -> None:
    """Catches overrides read as strings (1e-4 is one in YAML 1.1), or that replace a whole group of keys."""
    run = load_config(Run, file, ["schedule.learning_rate=3e-5", "steps=20", "taps=[2, 5]", "out=runs/b"])
    assert run.schedule.learning_rate == 3e-5
    assert run.schedule.warmup_steps == 5
    assert (run.steps, run.taps, run.out) == (20, [2, 5], "runs/b")


class Shape(Config):
    layers: int = 1


class Headed(Config):
    head: Shape = Shape()
    steps: int = 1


def test_an_override_finds_the_key_under_head(tmp_path: Path) -> None:
    """Catches ``layers=2`` that is refused, or set beside ``head:``, because the file has the key under it."""
    path = tmp_path / "run.yaml"
    path.write_text("head: {layers: 3}\n")
    assert load_config(Headed, path, ["layers=2", "steps=4"]) == Headed(head=Shape(layers=2), steps=4)
    with pytest.raises(ValueError, match=r"overrides layers=1 and head\.layers=2: the second would undo the first"):
        load_config(Headed, path, ["layers=1", "head.layers=2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("out: a\nstep: 3\n", "unknown key 'step'; did you mean 'steps'"),
        ("out: a\nschedule: {learning_rat: 1}\n", "unknown key 'schedule.learning_rat'; did you mean 'learning_rate'"),
        ("out: a\nzzz: 3\n", "unknown key 'zzz'; known keys: out, schedule, steps, suites, taps"),
        ("steps: 3\n", "missing key 'out'"),
        ("out: a\nsteps: many\n", r"steps: .*found 'many'"),
        ("out: a\nschedule: {learning_rate: -1}\n", r"schedule.learning_rate: .*greater than 0"),
        ("out: [\n", "not valid YAML"),
        ("out: a\nsteps: 3\n\n'out': b\n", "key 'out' occurs twice, on lines 1 and 4"),
        ("- out\n", "must hold a mapping"),
    ],
)
def test_wrong_file(tmp_path: Path, text: str, message: str) -> None:
    """Catches a mistyped key that is silently ignored, so that a run trains with a default for hours."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(Run, path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "not of the form key=value"),
        ("out.sub=3", "'out' holds a value, not a group"),
        ("schedule.warmup=3", "did you mean 'warmup_steps'"),
    ],
)
def test_wrong_override(file: Path, override: str, message: str) -> None:
    """Catches an override that is dropped, or that adds an unknown key."""
    with pytest.raises(ValueError, match=message):
        load_config(Run, file, [override])


def test_missing_file_suggests_a_neighbour(file: Path) -> None:
    """Catches a bare FileNotFoundError for a name that is one letter off."""
    with pytest.raises(ValueError, match=r"no config file at .*runs\.yaml; did you mean .*run\.yaml"):
        load_config(Run, file.with_name("runs.yaml"))


def test_a_repeated_override_is_refused(file: Path) -> None:
    """Catches a value on the command line that another one there replaces without a word."""
    for first, second in (("steps=1", "steps=2"), ("schedule.warmup_steps=8", "schedule={}")):
        with pytest.raises(
            ValueError, match=f"overrides {re.escape(first)} and {re.escape(second)}: the second would undo the first"
        ):
            load_config(Run, file, [first, second])
    run = load_config(Run, file, ["schedule={}", "schedule.warmup_steps=8"])
    assert run.schedule.warmup_steps == 8  # which undoes nothing


ROOMS = ("drafters", "data_prep", "train", "eval")
# Whole numbers that may be 1e9, for no list, tensor or loop is sized by them.
MAY_BE_LARGE = {
    "seed": "of a random number generator, which takes it",
    "Suite.ids": "records' ids, which are compared",
    "device_map": "a device's number, which is looked up among those of the machine",
    "format_version": "compared with the one that is read",
    "Answer": "what an engine says that it did, compared with the answer's tokens",
    "ShardEntry": "what was written, compared with the shard's own header",
    "ShardRecord": "what was written, compared with the shards",
    "ShardPlan": "what was planned, compared with the dialogues",
    "StoreManifest": "what was written, compared with the shards and with the target",
}


def schemas() -> list[type[BaseModel]]:
    """Every schema of the four packages that a user fills; the parts of a report say what was measured."""
    for room in ROOMS:
        for module in pkgutil.walk_packages(importlib.import_module(room).__path__, f"{room}."):
            with contextlib.suppress(ModuleNotFoundError):  # an engine that is not installed
                importlib.import_module(module.name)
    found: dict[type[BaseModel], None] = {}
    left: list[type[BaseModel]] = [BaseModel]
    while left:
        for schema in left.pop().__subclasses__():
            left.append(schema)
            if schema.__module__.partition(".")[0] in ROOMS and not issubclass(schema, Part):
                found[schema] = None
    return [*found]


def holding(annotation: Any, kind: type, number: float) -> Iterator[Any]:
    """Values of an annotated type that have ``number`` at each place, at any depth, that takes a ``kind``."""
    if annotation is kind:
        yield number
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from holding(arguments[0], kind, number)
    elif origin in (list, tuple):
        yield from ([inner] for inner in holding(arguments[0], kind, number) if len(arguments) == 1)
        if len(arguments) > 1:
            yield from ([inner] * len(arguments) for inner in holding(arguments[0], kind, number))
    elif origin is dict:
        key = get_args(arguments[0])[0] if get_origin(arguments[0]) is Literal else "key"
        yield from ({key: inner} for inner in holding(arguments[1], kind, number))
    elif origin in (Union, types.UnionType):
        yield from (value for argument in arguments for value in holding(argument, kind, number))


def taken(kind: type, number: float) -> Iterator[tuple[str, str]]:
    """(schema, field) of every field that takes ``number`` where it takes a ``kind``."""
    for schema in schemas():
        for name, field in schema.model_fields.items():
            for value in holding(field.annotation, kind, number):
                try:
                    schema.model_validate({name: value})
                except ValidationError as error:
                    if any(name in found["loc"][:1] for found in error.errors()):
                        continue  # other fields may be missing
                yield schema.__name__, name


def test_every_size_has_an_upper_bound() -> None:
    """Catches a mistyped size (nodes, batch, depth) that fills the memory or never ends, in whichever schema."""
    fields = dict.fromkeys(taken(int, 10**9))
    used = [{name, schema, f"{schema}.{name}"} & MAY_BE_LARGE.keys() for schema, name in fields]
    assert [f for f, reasons in zip(fields, used, strict=True) if not reasons] == []
    assert set().union(*used) == MAY_BE_LARGE.keys()


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_no_number_is_infinite_or_nan(number: float) -> None:
    """Catches a temperature, rate or time of .inf or .nan that is found hours later, or never."""
    assert [*taken(float, number)] == []


@pytest.mark.parametrize("seed", [1 << 64, 1 << 32, -1])
def test_a_seed_beyond_what_generators_take_is_refused(seed: int) -> None:
    """Catches an OverflowError of torch after the target was loaded, or at a later epoch's derived seed."""
    refused = [schema for schema in schemas() if "seed" in schema.model_fields]
    assert len(refused) > 5
    for schema in refused:
        with pytest.raises(ValidationError, match=r"seed\n"):
            schema.model_validate({"seed": seed})
