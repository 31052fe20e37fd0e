"""Every configured drafter on the same prompts, in one loop, beside plain decoding and stock ``generate``.

    python -m eval.speed --config configs/speed/stdlib.yaml [--suite gsm8k] [key=value ...]

Writes report.html, report.json, report.md, speedup.png and measurements.jsonl (the environment, then every single run
with its tokens and steps) into ``out``. They replace those of an earlier report when everything is measured. Until then
the runs so far are in measurements.unfinished.*.jsonl, from which the same command goes on after a kill; runs of
another config, commit or machine are never mixed in. ``eval.pages`` makes the pages again from measurements.jsonl,
``eval.sweep`` does this for several values of one key.

Several processes share the prompts, each with a GPU of its own where there are some: torchrun --nproc-per-node 4 -m
eval.speed --config ..., or --rank 0 --ranks 4 and so on. The one that ends last writes the report.

--suite takes the place of the config's prompts: names of configs/suites, or YAML files in their form, with commas
between them; the report is then in a folder of that name within ``out``.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeFloat, model_validator

from data_prep.common.ranks import add_rank_arguments, find_rank, refuse_shared_map
from drafters.cli.program import CommandLine, command, keeping, run_program
from drafters.common.files import check_folder
from drafters.common.wording import shortened
from drafters.config import Config, Dtype, Engine, Length, Quantization, Seed, Size, Vocabulary, load_config
from eval.measure.entries import DISTINCT, STOCK, DrafterEntry, Odd, StockEntry, check_entries, paths_of
from eval.prompts.prompts import PromptsConfig, check_prompt_files, shown_sizes
from eval.prompts.suites import suite_name

BASELINE = "autoregressive"


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


BatchSize = Annotated[Size, Field(ge=1)]
BatchSizes = Annotated[list[BatchSize], BeforeValidator(_as_list), Field(min_length=1), DISTINCT]


class TargetEntry(Config):
    """The target to load."""

    path: str = Field(description="folder or Hub repository, with its tokenizer")
    revision: str | None = None
    dtype: Dtype = Field("auto", description="auto: bf16 where the device has instructions for it")
    device: str | None = Field(None, description="None: a GPU where there is one, else the CPU")
    engine: Engine | None = Field(None, description="of the target and the draft models; None: each its best")
    device_map: str | dict[str, int | str] | None = Field(
        None, description="in place of device: how accelerate spreads the layers over several GPUs, for example auto"
    )
    quantize: Quantization | None = Field(None, description="the target's layers; stock generate has them as they are")
    chat_template: Path | None = Field(None, description="file with a Jinja template, in place of the tokenizer's own")


class SpeedConfig(Config):
    """All paths are relative to the working directory."""

    target: TargetEntry
    prompts: PromptsConfig
    drafters: list[DrafterEntry] = Field(min_length=1, description="plain decoding is added where it is not among them")
    stock: list[StockEntry] = Field([], description="rows of transformers' accelerated generation")
    stock_generate: bool = Field(True, description="also measure transformers' own generation, the slowest row of all")
    out: Path
    max_new_tokens: Length = Field(128, ge=1)
    ignore_eos: bool = Field(
        False, description="every answer has as many tokens as it may, so that sampled ones are of one length with all"
    )
    temperatures: Annotated[list[NonNegativeFloat], DISTINCT] = Field([0.0, 1.0], min_length=1, description="0: greedy")
    top_k: Vocabulary = Field(0, ge=0, description="of sampled rows; 0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="of sampled rows; 1 is off")
    batch: BatchSizes = Field([1], description="prompts decoded together: a number, or a list to compare several")
    rounds: Odd = Field(1, description="odd; times every method decodes every prompt; the median counts")
    warmup: Size = Field(2, ge=1, description="other prompts that every method decodes first, unmeasured")
    threads: Size | None = Field(None, ge=1, description="CPU threads; None: by the load of other processes")
    seed: Seed = Field(0, ge=0, description="of sampling, of the methods' order and of the confidence intervals")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for temperature in self.temperatures:
            here = [e for e in self.entries if e.temperatures is None or temperature in e.temperatures]
            names = [entry.name for entry in here] + [entry.label for entry in self.stock]
            repeated = sorted({name for name in names if names.count(name) > 1} | ({STOCK} & set(names)))
            if repeated:
                raise ValueError(
                    f"rows need names of their own, {shortened(repeated)} are taken twice; set label: on the entries"
                )
        methods = {(entry.name, entry.drafter) for entry in self.entries}
        if mixed := sorted({a for a, method in methods for b, other in methods if a == b and method != other}):
            raise ValueError(f"{mixed} name one method at one temperature and another at another; set other labels")
        for entry in self.entries:
            if not set(entry.temperatures or []) <= set(self.temperatures):
                raise ValueError(
                    f"{entry.name} asks for temperatures {entry.temperatures}, the run has {self.temperatures}"
                )
        unit, count = math.lcm(*self.batch), self.prompts.count
        if count is not None and count % unit:
            near = [n for n in (count - count % unit, count - count % unit + unit) if n]
            raise ValueError(
                f"prompts.count is {count}, and batches of {shown_sizes(self.batch)} are all full with a multiple of "
                f"{unit} prompts: give {' or '.join(map(str, near))}"
            )
        return self

    def check_one_batch(self, program: str) -> None:
        """Raise ValueError where there are several batch sizes, and the program compares something else."""
        if len(self.batch) > 1:
            raise ValueError(f"batch is {self.batch}: {program} takes one batch size; eval.speed compares several")

    @property
    def entries(self) -> list[DrafterEntry]:
        """The drafters, grids expanded; plain decoding, with which all are compared, at every temperature and first."""
        plain = [entry for entry in self.drafters if entry.drafter == BASELINE]
        first = plain[0] if plain else DrafterEntry.model_validate({"drafter": BASELINE})
        first = first.model_copy(update={"temperatures": None})
        others = [entry for entry in self.drafters if entry not in plain[:1]]
        return [entry for given in (first, *others) for entry in given.expand()]

    def methods(self, temperature: float) -> list[str]:
        """The labels of everything that decodes at a temperature, stock ``generate`` last."""
        own = [entry.name for entry in self.entries if entry.temperatures is None or temperature in entry.temperatures]
        return [*own, *(entry.label for entry in self.stock), *([STOCK] if self.stock_generate else [])]

    @property
    def paths(self) -> list[str]:
        """Everything that is loaded: models, checkpoints, phrase pools."""
        assistants = [entry.assistant_model for entry in self.stock if entry.assistant_model]
        return [self.target.path, *paths_of(self.entries), *assistants]


def check(config: SpeedConfig) -> None:
    """Check what can be checked before the target is loaded.

    Raises:
        ValueError: unknown drafters, files or folders that are not there, or an ``out`` that cannot be written to.
    """
    check_prompt_files(config.prompts)
    paths = {"target.path": config.target.path}
    paths |= {f"{e.label}: assistant_model": e.assistant_model for e in config.stock if e.assistant_model}
    check_entries(config.entries, paths)
    check_folder(config.out)


SpeedConfigT = TypeVar("SpeedConfigT", bound=SpeedConfig)


def add_suite(parser: argparse.ArgumentParser) -> None:
    """The argument that ``load`` knows."""
    parser.add_argument("--suite", metavar="NAME,...", help="measure on these in place of the config's prompts")


def load(schema: type[SpeedConfigT], parsed: argparse.Namespace) -> SpeedConfigT:
    """The config as the command line has it; raises ValueError as ``load_config`` does."""
    if parsed.suite is None:
        return load_config(schema, parsed.config, parsed.overrides)
    names = [name.strip() for name in parsed.suite.split(",")]
    config = load_config(schema, parsed.config, [f"prompts={json.dumps({'suite': names})}", *parsed.overrides])
    if not any(override.startswith("out=") for override in parsed.overrides):
        config.out = config.out / "+".join(map(suite_name, names))
    return config


def main(arguments: list[str] | None = None) -> None:
    """Measure every method of a config and write the report."""
    parser = CommandLine("eval.speed", __doc__, "YAML, see SpeedConfig", "prompts.count=8")
    add_suite(parser)
    add_rank_arguments(parser)
    parsed = parser.parse(arguments)
    config = load(SpeedConfig, parsed)
    rank = find_rank(parsed.rank, parsed.ranks)
    refuse_shared_map(rank, config.target.device_map, "target.device_map")
    check(config)

    from eval.report.screen import make_console
    from eval.speed_run import run

    with keeping(lambda: f"nothing was measured since this start, and what was before stays; to go on: {command()}"):
        run(config, parsed.command, make_console(), rank=rank)


if __name__ == "__main__":
    run_program(main)
