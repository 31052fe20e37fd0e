"""Read the JSON files that eval.speed and eval.lossless write, and refuse other files.

The schemas list the keys that model cards and ``eval.compare`` read, so that none is missing or of another type there.
``read`` returns the whole content.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from drafters.common.wording import json_object
from drafters.config import Config, validate

REPORT, CERTIFICATE = "report.json", "lossless.json"
MOST_PROBLEMS = 3  # of a file, in one message


class Part(Config):
    """Base of these schemas: other keys are left alone, and a number in quotes is none."""

    model_config = ConfigDict(extra="allow", strict=True)


class Target(Part):
    name: str
    fingerprint: str


class Entry(Part):
    """A drafter of the config."""

    drafter: str
    label: str | None = None


class Facts(Part):
    """What a figure was measured with."""

    target: Target
    dtype: str
    date: str
    argv: list[str]
    commit: str | None
    dirty: bool | None


class PromptSet(Part):
    file: str
    sha256: str
    prompts: int


class Limits(Part):
    max_new_tokens: int
    top_k: int
    top_p: float
    rounds: int
    seed: int
    ignore_eos: bool = False


class SpeedConfig(Part):
    drafters: list[Entry]


class SpeedFacts(Facts):
    """What the figures of a report were measured with."""

    gpu: str | None
    cpu: str
    threads: int
    versions: dict[str, str] = {}
    prompt_set: PromptSet
    limits: Limits
    config: SpeedConfig


Interval = Annotated[Sequence[float], Field(min_length=2, max_length=2)]


class Row(Part):
    """A drafter at a temperature and batch size."""

    drafter: str
    temperature: float
    batch: int = 1
    entry: str | None = None
    lossless: bool
    tau: float | None
    speedup: float | None
    speedup_ci: Interval | None
    tokens_per_second: float | None


class Report(Part):
    """``report.json`` of eval.speed, from its first version on."""

    environment: SpeedFacts
    baseline: dict[str, Any]
    rows: list[Row]


class Greedy(Part):
    """A dtype's greedy texts."""

    dtype: str
    texts: int
    tokens: int
    divergences: list[dict[str, Any]]
    unexplained: int


class Distance(Part):
    distance: float


class Sampled(Part):
    tokens: int
    p_value: float
    power: float
    tests: list[Distance]


class Certificate(Part):
    """``lossless.json`` of eval.lossless."""

    environment: Facts
    drafter: Entry
    verdict: str
    reasons: list[str]
    greedy: list[Greedy]
    sampled: Sampled | None


Found = dict[str, Any]
PROGRAMS: dict[type[Part], tuple[str, str]] = {  # the file, and what writes it
    Report: (REPORT, "python -m eval.speed"),
    Certificate: (CERTIFICATE, "python -m eval.lossless"),
}


def read(given: str | Path | Mapping[str, Any], schema: type[Part] = Report) -> Found:
    """Return the content of a report, checked against ``schema``.

    Args:
        given: the file, the folder that holds it, or its content.

    Raises:
        ValueError: there is no such file, or it is something else; the message names the file and what is wrong in it.
    """
    name, program = PROGRAMS[schema]
    if isinstance(given, Mapping):
        validate(schema, dict(given), f"the {name} given is not what {program} writes", MOST_PROBLEMS)
        return dict(given)
    file = Path(given) / name if Path(given).is_dir() else Path(given)
    if not file.is_file():
        raise ValueError(f"there is no {file}; {program} writes it")
    source = f"{file} is not what {program} writes"
    found = json_object(file, f"{source}: it")
    validate(schema, found, source, MOST_PROBLEMS)
    return found
