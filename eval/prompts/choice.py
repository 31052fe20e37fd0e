"""The schema of a run's ``prompts``: which to decode and in which order; without torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from drafters.config import Amount, Config, Length, Seed
from eval.prompts.context import check_context_files
from eval.prompts.prompt_files import KNOWN, check_prompt_file
from eval.prompts.suites import local_files, read_suite, source, suite_name


class PromptsConfig(Config):
    """Which prompts to decode, and in which order."""

    file: Path | list[Path] | None = Field(
        None, description=f"{KNOWN}; of several files, the stem is the category of prompts that have none"
    )
    suite: str | list[str] | None = Field(
        None, description="instead of file: names in configs/suites, or YAML files; each of several is a category"
    )
    data: Path = Field(Path("data"), description="folder with the files of suites")
    count: Amount | None = Field(None, ge=1, description="prompts measured; None: all that can be used")
    categories: list[str] | None = Field(None, min_length=1, description="only prompts of these; None: all prompts")
    per_category: Amount | None = Field(None, ge=1, description="prompts measured of every category, instead of count")
    consecutive: Amount | None = Field(
        None, ge=1, description="this many prompts of one category in a row, then of the next; None: shuffled"
    )
    seed: Seed = Field(0, description="of the choice of prompts and of their order")
    max_prompt_tokens: Length | None = Field(None, ge=1, description="longer prompts are skipped and counted")
    apart_from: list[Path] = Field(
        [], description="ShareGPT files, for example of a training: prompts whose question they ask are skipped"
    )
    context_tokens: Length | None = Field(
        None, ge=1, description="length of prompts: dialogues are put before the question, as earlier turns"
    )
    context_file: Path | None = Field(
        None, description="ShareGPT dialogues for that; None: the unused dialogues of file"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.count is not None and self.per_category is not None:
            raise ValueError(f"count is {self.count} and per_category {self.per_category}: give one of the two")
        if bool(self.files) == bool(self.suites):
            raise ValueError(
                f"file is {self.file} and suite {self.suite}: give one of the two (--suite NAME replaces file)"
            )
        if self.suites and self.context_tokens is not None and self.context_file is None:
            raise ValueError("context_tokens needs dialogues, and a suite has none: give context_file")
        if self.context_file is not None and self.context_tokens is None:
            raise ValueError(
                f"context_file is {self.context_file}, but the length of prompts is missing: give context_tokens"
            )
        return self

    @property
    def files(self) -> list[Path]:
        """The prompt files."""
        return self.file if isinstance(self.file, list) else [self.file] if self.file is not None else []

    @property
    def suites(self) -> list[str]:
        """The suites."""
        return self.suite if isinstance(self.suite, list) else [self.suite] if self.suite is not None else []

    @property
    def context_files(self) -> list[Path]:
        """The files of earlier turns."""
        if self.context_tokens is None:
            return []
        return self.files if self.context_file is None else [self.context_file]

    @property
    def read_files(self) -> list[Path]:
        """All local files that are read."""
        of_suites = [file for name in self.suites for file in local_files(name, self.data)]
        return list(dict.fromkeys([*self.files, *of_suites, *self.context_files, *self.apart_from]))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, as far as the config says; else 0."""
        return self.context_tokens or self.max_prompt_tokens or 0

    @property
    def shown_files(self) -> str:
        """The names of the sources, for messages and reports."""
        of_suites = [f"suite {suite_name(name)}: {source(name, self.data)}" for name in self.suites]
        return ", ".join([*map(str, self.files), *of_suites])


def check_prompt_files(config: PromptsConfig) -> None:
    """Raise ValueError if a file is missing, cannot be read as a suite, or has no dialogues for earlier turns."""
    for file in (*config.files, *config.context_files, *config.apart_from):
        check_prompt_file(file)
    for name in config.suites:
        read_suite(name, config.data)
    check_context_files(config.context_files)


def source_key(source: str) -> str:
    """Return the key of a source on a command line: file or suite."""
    return "file" if source.endswith((".jsonl", ".json", ".gz")) else "suite"


def shown_sizes(batches: Sequence[int]) -> str:
    """Return batch sizes as text: "1, 2 and 4"."""
    *before, last = map(str, batches)
    return f"{', '.join(before)} and {last}" if before else last
