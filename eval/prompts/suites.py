"""Suites of prompts by name: ``configs/suites/<name>.yaml``, or another YAML file in the same form.

A suite names the published source of its questions (a file, the Hub), the fields of a record that make the prompt, the
number of prompts that papers measure, the longest answer and the metric of answers.
"""

import difflib
import functools
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from data_prep.dialogues.json_records import read_records
from data_prep.dialogues.reader import DATASET_SUFFIXES, dataset_records
from drafters.common.wording import read_text, shortened
from drafters.config import Amount, Config, Length, load_config
from eval.prompts.prompt_files import QUESTION_KEYS, Record, first_record, question_key, questions, turns_under

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "suites"
Metric = Literal["number", "rouge", "bleu"]
# Questions of no suite, for the warm-up of a suite that is measured whole.
WARM_UP = (
    "Name three rivers of Europe and say into which sea each of them flows.",
    "Explain to a child why the sky is blue during the day and red in the evening.",
    "Write a Python function that returns the second largest number of a list.",
    "A baker makes 12 trays of 18 rolls and sells 170 of them. How many rolls are left?",
    "Translate into French: The library closes an hour earlier on Saturdays.",
)


class Suite(Config):
    """One set of prompts, named after its file."""

    file: Path | None = Field(
        None, description="under prompts.data: JSON lines, gzipped or not, or a folder of such or of parquet files"
    )
    url: str | None = Field(None, description="where the file is published")
    hub: str | None = Field(
        None, description="a dataset of the Hub, read if there is no file; owner/name[:config][:split]"
    )
    subset: str | None = Field(None, description="configuration of the Hub's dataset")
    split: str = "test"
    prompt: str | None = Field(
        None, description="Jinja template of the prompt over a record's fields; None: the fields of published formats"
    )
    id: str | None = Field(None, description="field with a record's id; None: question_id, task_id or id")
    ids: tuple[int, int] | None = Field(None, description="only records with ids from the first to the second")
    turns: Literal["first", "all"] = Field(
        "first", description="all: also later turns, after plain decoding's greedy answers to earlier ones"
    )
    groups: dict[str, list[str]] = Field({}, description="categories, each with the records' own categories in it")
    count: Amount | None = Field(None, ge=1, description="prompts chosen; None: all")
    max_new_tokens: Length | None = Field(
        None, ge=1, description="largest length of an answer; the run's limit may be smaller"
    )
    metric: Metric | dict[str, Metric] | None = Field(
        None, description="how answers are judged; or one metric per category"
    )
    reference: str | None = Field(None, description="Jinja template of the reference answer")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.file is None and self.hub is None:
            raise ValueError("it has neither file nor hub: give one of them as the source of prompts")
        if self.metrics and self.reference is None:
            raise ValueError(f"metric {min(self.metrics.values())} compares answers with reference, which is missing")
        return self

    @property
    def metrics(self) -> dict[str | None, Metric]:
        """Metric by category; a metric of all categories is under None."""
        if isinstance(self.metric, dict):
            return dict(self.metric.items())
        return {} if self.metric is None else {None: self.metric}

    def metric_of(self, category: str | None) -> Metric | None:
        """Return the metric of a category's answers, or None if they are not judged."""
        return self.metrics.get(category, self.metrics.get(None))


def suite_names() -> list[str]:
    """Return the names of the shipped suites."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if not _is_run(path))


@functools.cache
def load_suite(name: str) -> Suite:
    """Return the suite of that name or file; ValueError if there is none, with the nearest name, or if it is wrong."""
    path = suite_path(name)
    if _is_run(path):
        raise ValueError(
            f"{name} is no set of prompts but a run: python -m eval.speed --config {shlex.quote(str(path))}"
        )
    return load_config(Suite, path)


def suite_path(name: str) -> Path:
    """Return the suite's YAML file; ValueError if there is none."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = suite_names()
        near = difflib.get_close_matches(suite_name(name).lower().replace("_", "-"), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}? There are" if near else "there are"
        raise ValueError(f"no suite {name!r}; {hint}: {', '.join(known)}, or the path of your YAML file")
    return path


def suite_name(name: str) -> str:
    """Return the name of a suite in reports: its file's stem."""
    return Path(name).stem if name.endswith((".yaml", ".yml")) else name


def _is_run(path: Path) -> bool:
    return any(line.startswith("drafters:") for line in read_text(path).splitlines())


def _place(suite: Suite, data: Path) -> Path | None:
    """Return the suite's file or folder, or None if the Hub's dataset is read."""
    if suite.file is None or (suite.hub is not None and not (data / suite.file).exists()):
        return None
    return data / suite.file


def local_files(name: str, data: Path) -> list[Path]:
    """Return the suite's YAML file and its local data files."""
    here = _place(load_suite(name), data)
    return [suite_path(name), *(_files_in(here) if here is not None else [])]


def source(name: str, data: Path) -> str:
    """Return the source of a suite's prompts, for messages and reports."""
    suite = load_suite(name)
    if (here := _place(suite, data)) is not None:
        return str(here)
    parts = filter(None, (suite.subset, suite.split))
    return str(suite.hub) if ":" in str(suite.hub) else f"{suite.hub} ({', '.join(parts)})"


def read_suite(name: str, data: Path, skipped: Counter[str] | None = None) -> list[Record]:
    """Return the suite's records; ``skipped`` counts those that cannot be used."""
    skipped = Counter() if skipped is None else skipped
    suite = load_suite(name)
    read = list(_numbered(name, suite, data))
    chosen = [(number, record) for number, record in read if _within(record, suite)]
    before = skipped.copy()
    turns, missing = functools.partial(_from_template, template=suite.prompt or ""), "missing_field"
    if suite.prompt is None:
        keys = (question_key(record) for _, record in chosen if isinstance(record, dict))
        key = next(filter(None, keys), next(iter(QUESTION_KEYS)))
        turns, missing = functools.partial(turns_under, key=key), f"no_{key}"
    records = list(questions(chosen, turns, missing, skipped, suite.id))
    if not records:
        why = dict(skipped - before)
        first = shortened(first_record(read), 60)
        where = source(name, data)
        if why.get("placeholder"):
            raise ValueError(
                f"suite {name}: all {why['placeholder']} prompts of {where} are placeholders; fill them in with "
                "prepare_data.py of NVIDIA's specdec_bench"
            )
        expected = f"{suite.prompt!r}" if suite.prompt else f"a field {' or '.join(QUESTION_KEYS)}"
        raise ValueError(
            f"suite {name}: {where} has no record with the fields of its prompt, {expected}; the first record is "
            f"{first}; skipped: {why}"
        )
    placed = [_placed(record, name, suite) for record in records]
    _check_judged(placed, name, suite)
    return placed


def _from_template(record: dict[str, Any], template: str) -> list[str]:
    text = filled(template, record)
    return [] if text is None else [text]


def _check_judged(records: list[Record], name: str, suite: Suite) -> None:
    """Raise ValueError, before anything is decoded, if a record lacks the fields that judge its answer."""
    for record in records:
        if record.metric is not None and filled(suite.reference or "", record.fields) is None:
            raise ValueError(
                f"suite {name}: metric {record.metric!r} needs {suite.reference}, which prompt {record.id!r} lacks; "
                f"it has {shortened(record.fields, 60)}; set metric to null to skip judging"
            )


def _placed(record: Record, name: str, suite: Suite) -> Record:
    """Return the record with its suite, metric and category among the suite's groups."""
    group = next((group for group, members in suite.groups.items() if record.category in members), None)
    if group is not None:
        record = replace(record, category=group, sub_category=record.category)
    later = record.later if suite.turns == "all" else ()
    return replace(record, suite=name, later=later, metric=suite.metric_of(record.category))


def _numbered(name: str, suite: Suite, data: Path) -> Iterator[tuple[int, Any]]:
    here = _place(suite, data)
    fetch = f"curl --create-dirs -Lo {shlex.quote(str(data / (suite.file or '')))} {suite.url}"
    if here is None:
        try:
            hub = str(suite.hub) if ":" in str(suite.hub) else f"{suite.hub}:{suite.split}"
            records = dataset_records(hub, suite.subset)
        except ValueError as error:
            raise ValueError(f"suite {name}: {error}{f'; or fetch its file: {fetch}' if suite.url else ''}") from error
        yield from enumerate(records, start=1)
        return
    files = _files_in(here)
    if not files:
        fetched = f"; {fetch} fetches it" if suite.url else ""
        hint = f"or prompts.data=FOLDER names the folder of {suite.file}"
        raise ValueError(f"suite {name}: there is nothing at {here}{fetched}, {hint}")
    if any(file.name.endswith(DATASET_SUFFIXES) for file in files):
        yield from enumerate(dataset_records(f"{here}:{suite.split}"), start=1)
        return
    for file in files:
        yield from read_records(file)


def _files_in(place: Path) -> list[Path]:
    """Return a file, or the JSON lines files of a folder, else those that `datasets` reads; [] if it is missing."""
    if place.is_file():
        return [place]
    files = sorted(path for path in place.rglob("*") if path.is_file())
    lines = [path for path in files if path.name.endswith((".jsonl", ".jsonl.gz", ".json"))]
    return lines or [path for path in files if path.name.endswith(DATASET_SUFFIXES)]


def _within(record: Any, suite: Suite) -> bool:
    number = record.get(suite.id or "task_id") if isinstance(record, dict) else None
    return suite.ids is None or not isinstance(number, int) or suite.ids[0] <= number <= suite.ids[1]


def filled(template: str, fields: dict[str, Any]) -> str | None:
    """Return a Jinja template over a record's fields; None if it prints a missing or null field."""
    from jinja2 import TemplateError, UndefinedError

    try:
        text: str = _compiled(template).render(fields)
    except UndefinedError:
        return None
    except TemplateError as error:
        raise ValueError(f"{shortened(template)} is not a Jinja template: {error}") from error
    return text


@functools.cache
def _compiled(template: str) -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import SandboxedEnvironment

    def printed(value: Any) -> Any:
        return StrictUndefined(name="a null") if value is None else value

    return SandboxedEnvironment(undefined=StrictUndefined, finalize=printed).from_string(template)
