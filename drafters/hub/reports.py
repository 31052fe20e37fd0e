"""Read the JSON files that eval.speed and eval.lossless write, and refuse other files.

The schemas list only the keys that tell these files from others. ``read`` returns the whole content.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

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


class Facts(Part):
    """What a figure was measured with."""

    target: Target
    dtype: str
    date: str
    argv: list[str]


class Report(Part):
    """``report.json`` of eval.speed, from its first version on."""

    environment: Facts
    baseline: dict[str, Any]
    rows: list[dict[str, Any]]


class Certificate(Part):
    """``lossless.json`` of eval.lossless."""

    environment: Facts
    drafter: dict[str, Any]
    verdict: str
    reasons: list[str]
    greedy: list[dict[str, Any]]
    sampled: dict[str, Any] | None


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
