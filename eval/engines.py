"""What a user would run instead: vLLM and llama.cpp beside our own methods, on the same prompts, by the same clock.

    python -m eval.engines --config configs/engines/stdlib.yaml [key=value ...]

All of eval.speed, with a row more for every entry of ``engines``. Each is a process of an environment of its own
(make engines sets them up: docs/engines.md), with its model loaded, that takes its turn prompt by prompt. An engine
that is not installed is left out, and one that crashes has no figures: the report says so, and the others go on.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.paths import is_missing_folder
from drafters.common.wording import shortened
from drafters.config import Config, DraftSize, Length
from eval.speed import SpeedConfig, add_suite, load
from eval.speed import check as check_speed

PYTHONS = {"vllm": Path(".venv-vllm/bin/python"), "llama_cpp": Path(".venv-llama/bin/python")}
NEEDS = {"draft_model": "draft_model", "eagle": "checkpoint", "ours": "ours"}  # the key that a method cannot do without


class EngineEntry(Config):
    """A row of another engine."""

    label: str = Field(description="its name in the report, where engine and version are added")
    engine: Literal["vllm", "llama_cpp"]
    method: Literal["plain", "prompt_lookup", "draft_model", "eagle", "ours"] = "plain"
    gamma: DraftSize = Field(5, ge=1, description="tokens drafted a step")
    min_ngram: Length = Field(1, ge=1, description="of prompt lookup; llama.cpp always begins with one")
    max_ngram: Length = Field(3, ge=1, description="of prompt lookup")
    draft_model: str | None = Field(None, description="folder or Hub repository of method draft_model")
    checkpoint: str | None = Field(None, description="folder of our EAGLE head; exported first")
    ours: dict[str, Any] | None = Field(
        None, description="of method ours: drafter and options of what runs inside vLLM, see drafters/vllm_proposer.py"
    )
    gguf: Path | None = Field(None, description="llama.cpp's model: the target as a GGUF file")
    gguf_type: Literal["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"] | None = Field(
        None, description="llama.cpp converts the file to it first; None: as it is"
    )
    repack: bool | None = Field(
        None, description="llama.cpp lays weights out anew for AMX and the like; None: where it does not crash so"
    )
    beside: str | None = Field(None, description="label of our row whose acceptance by depth it should have")
    python: Path | None = Field(None, description="of its environment; default: that of make engines")
    module: str | None = Field(None, description="the worker; default: the engine's in eval/engine_workers")

    @property
    def interpreter(self) -> Path:
        """The Python of its environment."""
        return self.python or PYTHONS[self.engine]

    @property
    def worker(self) -> str:
        """The module that it runs."""
        return self.module or f"eval.engine_workers.{self.engine}_worker"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for method, key in NEEDS.items():
            if (self.method == method) != (getattr(self, key) is not None):
                raise ValueError(f"{self.label}: {key} and method {method} go together; method is {self.method}")
        if self.engine == "llama_cpp" and (self.gguf is None or self.method not in ("plain", "prompt_lookup")):
            found = f"method {self.method}, gguf {self.gguf}"
            raise ValueError(f"{self.label}: llama_cpp takes gguf and method plain or prompt_lookup; found {found}")
        if self.engine != "llama_cpp" and any(value is not None for value in (self.gguf, self.gguf_type, self.repack)):
            raise ValueError(
                f"{self.label}: gguf, gguf_type and repack are llama_cpp's; {self.engine} loads the target"
            )
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"{self.label}: min_ngram is {self.min_ngram}, more than max_ngram {self.max_ngram}")
        return self


class EnginesConfig(SpeedConfig):
    """eval.speed's, and the engines."""

    engines: list[EngineEntry] = Field(min_length=1)
    patience: float = Field(
        900.0, gt=0, description="seconds for loading an engine, and for a prompt there; after them it has failed"
    )

    @model_validator(mode="after")
    def _check_engines(self) -> Self:
        if self.batch != [1]:
            raise ValueError(f"batch is {self.batch}: engines are measured with one prompt at a time; leave batch out")
        labels = [entry.label for entry in self.engines]
        ours = {label for temperature in self.temperatures for label in self.methods(temperature)}
        if repeated := sorted({label for label in labels if labels.count(label) > 1 or label in ours}):
            raise ValueError(f"rows need names of their own, {shortened(repeated)} are taken twice; set other labels")
        for entry in self.engines:
            if entry.beside is not None and entry.beside not in ours:
                raise ValueError(f"{entry.label}: beside is {entry.beside!r}, and there is no such row; set a label")
        return self

    @property
    def paths(self) -> list[str]:
        """Everything that is loaded."""
        return [*super().paths, *(path for entry in self.engines for path in _paths(entry).values())]


def _paths(entry: EngineEntry) -> dict[str, str]:
    found = {"draft_model": entry.draft_model, "checkpoint": entry.checkpoint, "gguf": entry.gguf}
    return {key: str(path) for key, path in found.items() if path is not None}


def check(config: EnginesConfig) -> None:
    """Check what can be checked before the target is loaded.

    Raises:
        ValueError: as ``eval.speed`` does, and for folders and files that the engines' entries name.
    """
    check_speed(config)
    for entry in config.engines:
        for key, path in _paths(entry).items():
            missing = not Path(path).is_file() if key == "gguf" else is_missing_folder(path)
            if missing:
                kind = "file" if key == "gguf" else "folder"
                raise ValueError(f"engines: {entry.label}: {key}: there is no {kind} {path}; make it or leave it out")


def main(arguments: list[str] | None = None) -> None:
    """Measure our methods and the engines, and write the report."""
    parser = CommandLine("eval.engines", __doc__, "YAML, see EnginesConfig", "prompts.count=8")
    add_suite(parser)
    config = load(EnginesConfig, parsed := parser.parse(arguments))
    check(config)

    from eval.engines_run import run
    from eval.report.screen import make_console

    with keeping(lambda: f"nothing was measured since this start, and what was before stays; to go on: {command()}"):
        run(config, parsed.command, make_console())


if __name__ == "__main__":
    run_program(main)
