"""Read and check the JSON files that eval.speed and eval.lossless write.

The schemas list only the keys that other programs use. ``read`` returns the whole content, with all keys.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from drafters.common.wording import strict_json
from drafters.config import Config, Length, Seed, Size, Vocabulary, validate

REPORT, CERTIFICATE = "report.json", "lossless.json"
MOST_PROBLEMS = 3  # of a file, in one message
Count = Annotated[int, Field(ge=0)]  # what was counted: only what a user types has an upper bound


class Part(Config):
    """Base of these schemas: other keys are left alone, and a number in quotes is none."""

    model_config = ConfigDict(extra="allow", strict=True)


class Entry(Part):
    """One of the methods that were measured, with its options."""

    drafter: str
    label: str | None = None


class Target(Part):
    name: str
    fingerprint: str
    parameters: float


class Facts(Part):
    """What a figure was measured with."""

    target: Target
    dtype: str
    quantize: str | None = None
    date: str
    cpu: str
    cpu_cores: Size | None
    gpu: str | None
    threads: Size
    versions: dict[str, str] = {}
    commit: str | None
    dirty: bool | None
    argv: list[str]


class PromptSet(Part):
    file: str
    sha256: str
    prompts: Count
    suites: dict[str, Any] = {}


class Limits(Part):
    max_new_tokens: Length
    top_k: Vocabulary
    top_p: float
    rounds: Size
    seed: Seed
    ignore_eos: bool = False


class Measured(Part):
    """The config of a speed test."""

    drafters: list[Entry]


class SpeedFacts(Facts):
    prompt_set: PromptSet
    limits: Limits
    config: Measured


class Trained(Part):
    """What a report says of the training of a row's weights."""

    minutes: float | None = None
    tokens: Count | None = None
    data: str | None = None
    joules: float | None = None
    init_from: str | None = None


class Row(Part):
    """A method at one temperature and batch size."""

    drafter: str
    entry: str | None = None
    temperature: float
    batch: Size = 1
    lossless: bool
    stock: bool = False
    engine: str | None = None
    drafted_per_step: float | None = None
    tau: float | None
    speedup: float | None
    speedup_ci: list[float] | None = Field(min_length=2, max_length=2)
    tokens_per_second: float | None
    grid: dict[str, Any] | None = None
    trained: list[Trained] = []


class Setting(Part):
    temperature: float
    batch: Size = 1


class Baseline(Part):
    temperatures: list[Setting]


class Report(Part):
    """``report.json`` of eval.speed, from its first version on."""

    environment: SpeedFacts
    baseline: Baseline
    rows: list[Row]


class Greedy(Part):
    dtype: str
    texts: Count
    tokens: Count
    divergences: list[Any]
    unexplained: Count


class Distance(Part):
    distance: float


class Sampled(Part):
    tokens: Count
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
    try:
        found = strict_json(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: it is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{source}: it must hold an object, found a {type(found).__name__}")
    validate(schema, found, source, MOST_PROBLEMS)
    return found
