"""The YAML schemas of all programs of ``eval``; without torch, so that a mistyped key is answered at once.

All paths are relative to the working directory.
"""

import argparse
import json
import os
import random
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeFloat, model_validator

from data_prep.configs import check_address
from drafters.common.files import check_folder
from drafters.common.paths import is_missing_folder
from drafters.common.wording import shortened
from drafters.config import (
    Amount,
    Config,
    DraftSize,
    Dtype,
    Engine,
    Layers,
    Length,
    Quantization,
    Seed,
    Size,
    Threads,
    Vocabulary,
    load_config,
    validate,
)
from eval.entries import (
    DISTINCT,
    STOCK,
    DrafterEntry,
    EngineEntry,
    Odd,
    StockEntry,
    Values,
    check_entries,
    paths_of,
    set_key,
)
from eval.prompts.choice import PromptsConfig, check_prompt_files
from eval.prompts.suites import suite_name

BASELINE = "autoregressive"
BatchSize = Annotated[Size, Field(ge=1)]
BatchSizes = Annotated[
    list[BatchSize],
    BeforeValidator(lambda value: value if isinstance(value, list) else [value]),
    Field(min_length=1),
    DISTINCT,
]


class TargetEntry(Config):
    """The target to load."""

    path: str = Field(description="folder or Hub repository, with its tokenizer")
    revision: str | None = None
    dtype: Dtype = Field("auto", description="auto: bf16 if the device has instructions for it")
    device: str | None = Field(None, description="None: a GPU if there is one, else the CPU")
    engine: Engine | None = Field(None, description="of the target and the draft models; None: the fastest of each")
    device_map: str | dict[str, int | str] | None = Field(
        None, description="instead of device: how accelerate spreads the layers over several GPUs, for example auto"
    )
    quantize: Quantization | None = Field(None, description="of the target's layers; stock generate is not quantised")
    chat_template: Path | None = Field(None, description="file with a Jinja template that replaces the tokenizer's")


class SpeedConfig(Config):
    """eval.speed: every drafter on the same prompts."""

    target: TargetEntry
    prompts: PromptsConfig
    drafters: list[DrafterEntry] = Field(min_length=1, description="plain decoding is added if it is missing")
    stock: list[StockEntry] = Field([], description="rows of transformers' accelerated generation")
    stock_generate: bool = Field(True, description="also measure transformers' own generation, the slowest row")
    out: Path
    max_new_tokens: Length = Field(128, ge=1)
    ignore_eos: bool = Field(False, description="every answer has max_new_tokens, so sampled answers have one length")
    temperatures: Annotated[list[NonNegativeFloat], DISTINCT] = Field([0.0, 1.0], min_length=1, description="0: greedy")
    top_k: Vocabulary = Field(0, ge=0, description="of sampled rows; 0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="of sampled rows; 1 is off")
    batch: BatchSizes = Field([1], description="prompts decoded together: a number, or a list to compare several")
    rounds: Odd = Field(1, description="odd; how often every method decodes every prompt; the median counts")
    warmup: Size = Field(2, ge=1, description="other prompts that every method decodes first, unmeasured")
    threads: Threads | None = Field(None, description="CPU threads; None: by the load of other processes")
    seed: Seed = Field(0, ge=0, description="of sampling, the order of methods and the confidence intervals")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for temperature in self.temperatures:
            names = [*self.methods(temperature), *([] if self.stock_generate else [STOCK])]
            if repeated := sorted({name for name in names if names.count(name) > 1}):
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
        return self

    def check_one_batch(self, program: str) -> None:
        """Raise ValueError if there are several batch sizes."""
        if len(self.batch) > 1:
            raise ValueError(f"batch is {self.batch}: {program} takes one batch size; eval.speed compares several")

    @property
    def entries(self) -> list[DrafterEntry]:
        """The drafters with grids expanded; plain decoding comes first and at every temperature."""
        plain = [entry for entry in self.drafters if entry.drafter == BASELINE]
        first = plain[0] if plain else DrafterEntry.model_validate({"drafter": BASELINE})
        first = first.model_copy(update={"temperatures": None})
        others = [entry for entry in self.drafters if entry not in plain[:1]]
        return [entry for drafter in (first, *others) for entry in drafter.expand()]

    def methods(self, temperature: float) -> list[str]:
        """The labels of all rows at a temperature, stock ``generate`` last."""
        names = [
            entry.name for entry in self.entries if entry.temperatures is None or temperature in entry.temperatures
        ]
        return [*names, *(entry.label for entry in self.stock), *([STOCK] if self.stock_generate else [])]

    @property
    def assistants(self) -> dict[str, str]:
        """By label, the draft models of stock generation."""
        return {entry.label: entry.assistant_model for entry in self.stock if entry.assistant_model}

    @property
    def paths(self) -> list[str]:
        """All models, checkpoints and files that are loaded."""
        return [self.target.path, *paths_of(self.entries), *self.assistants.values()]

    def check_paths(self) -> None:
        """Raise ValueError for unknown methods, missing files and folders, or an ``out`` that cannot be written."""
        check_prompt_files(self.prompts)
        assistants = {f"{label}: assistant_model": path for label, path in self.assistants.items()}
        check_entries(self.entries, {"target.path": self.target.path} | assistants)
        check_folder(self.out)


SpeedConfigT = TypeVar("SpeedConfigT", bound=SpeedConfig)


def add_suite(parser: argparse.ArgumentParser) -> None:
    """Add --suite, which ``load_with_suite`` reads."""
    parser.add_argument("--suite", metavar="NAME,...", help="measure these suites instead of the config's prompts")


def load_with_suite(schema: type[SpeedConfigT], parsed: argparse.Namespace) -> SpeedConfigT:
    """Return the config of a command line with --suite; raises ValueError as ``load_config`` does."""
    if parsed.suite is None:
        return load_config(schema, parsed.config, parsed.overrides)
    names = [name.strip() for name in parsed.suite.split(",")]
    config = load_config(schema, parsed.config, [f"prompts={json.dumps({'suite': names})}", *parsed.overrides])
    if not any(override.startswith("out=") for override in parsed.overrides):
        config.out = config.out / "+".join(map(suite_name, names))
    return config


class EnginesConfig(SpeedConfig):
    """eval.engines: a speed config and other engines."""

    engines: list[EngineEntry] = Field(min_length=1)
    patience: float = Field(900.0, gt=0, description="seconds after which loading an engine, or one prompt, has failed")

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
        """All models, checkpoints and files that are loaded."""
        return [*super().paths, *(path for entry in self.engines for path in entry.paths.values())]

    def check_paths(self) -> None:
        """Raise ValueError as for a speed config, and for missing files and folders of the engines."""
        super().check_paths()
        for entry in self.engines:
            for key, path in entry.paths.items():
                if not Path(path).is_file() if key == "gguf" else is_missing_folder(path):
                    kind = "file" if key == "gguf" else "folder"
                    raise ValueError(f"engines: {entry.label}: {key}: there is no {kind} {path}; make it, or remove it")


class SweepConfig(SpeedConfig):
    """eval.sweep: a speed config and the key that varies."""

    vary: dict[str, Values] = Field(min_length=1, max_length=1, description="one dotted key and its values")

    @model_validator(mode="after")
    def _check_vary(self) -> Self:
        key, values = self.varied
        if key.partition(".")[0] in ("out", "vary"):
            raise ValueError(f"vary: {key} cannot vary: it names the folder of every value")
        names = [folder_name(key, value) for value in values]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"vary: values must be different, {shortened(repeated)} is given twice")
        return self

    @property
    def varied(self) -> tuple[str, list[Any]]:
        """The key and its values."""
        return next(iter(self.vary.items()))

    def speed_configs(self) -> list[SpeedConfig]:
        """Return a speed config for every value, each with its own folder; raises ValueError for a wrong value."""
        key, values = self.varied
        configs = []
        for value in values:
            data = self.model_dump(mode="json", exclude={"vary"}, exclude_unset=True)
            set_key(data, key, value, "vary")
            name = folder_name(key, value)
            configs.append(validate(SpeedConfig, data | {"out": str(self.out / name)}, source=f"vary: {name}"))
            configs[-1].check_one_batch("a value of eval.sweep")
        return configs

    def check_paths(self) -> None:
        """Raise ValueError as for a speed config, for every value."""
        check_folder(self.out)
        for config in self.speed_configs():
            config.check_paths()


def folder_name(key: str, value: Any) -> str:
    """Return ``key=value`` without the slashes of a path."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}".replace("/", "_")


class TuneConfig(SpeedConfig):
    """eval.tune: a speed config of one drafter at one temperature, and the knobs to search."""

    knobs: dict[str, Values] = Field(min_length=1, description="options (dots for nested ones) and their values")
    start: dict[str, Any] = Field({}, description="first values of knobs; the others get a drawn one")
    max_perplexity: float | None = Field(
        None, gt=0, description="of a lossy method: largest perplexity of its outputs, relative to plain decoding's"
    )
    stock_generate: bool = Field(False, description="also measure transformers' own generation; nothing depends on it")

    @model_validator(mode="after")
    def _check_search(self) -> Self:
        if len(self.drafters) != 1 or self.drafters[0].grid is not None or len(self.temperatures) != 1:
            raise ValueError(
                f"a search takes one drafter without a grid and one temperature, found {len(self.drafters)} drafter(s) "
                f"and temperatures {self.temperatures}; write a config for each"
            )
        self.check_one_batch("eval.tune")
        return self

    def first_values(self) -> dict[str, Any]:
        """Return the values at which the search starts; those not in ``start`` are drawn with the run's seed."""
        draw = random.Random(self.seed)
        return {knob: draw.choice(values) for knob, values in self.knobs.items()} | self.start

    def planned(self) -> list[SpeedConfig]:
        """Return the stages as they are known at the start."""
        chosen = self.first_values()
        return [self.stage(number, knob, chosen) for number, knob in enumerate(self.knobs, start=1)]

    def stage(self, number: int, knob: str, chosen: dict[str, Any]) -> SpeedConfig:
        """Return the speed config that measures all values of ``knob``, with the other knobs as ``chosen``."""
        entry = self.drafters[0].model_dump(mode="json", exclude_unset=True)
        grid = {other: [value] for other, value in chosen.items()} | {knob: self.knobs[knob]}
        tune_keys = set(TuneConfig.model_fields) - set(SpeedConfig.model_fields)
        data = self.model_dump(mode="json", exclude=tune_keys, exclude_unset=True)
        data |= {"drafters": [entry | {"grid": grid}], "out": str(self.out / f"{number}-{knob}")}
        data["stock_generate"] = self.stock_generate
        return validate(SpeedConfig, data, source=f"knobs: {knob}")

    def check_paths(self) -> None:
        """Raise ValueError as for a speed config, for every knob."""
        check_folder(self.out)
        for config in self.planned():
            config.check_paths()


def common_folder(configs: dict[Path, TuneConfig]) -> Path:
    """Return the folder of one search, or the folder that holds those of several."""
    return Path(os.path.commonpath([config.out for config in configs.values()]))


class ExactTarget(TargetEntry):
    """The target, by default in float32, where outputs must be equal."""

    dtype: Dtype = "float32"


class LosslessConfig(Config):
    """eval.lossless: one drafter and the tests."""

    target: ExactTarget
    drafter: DrafterEntry
    prompts: PromptsConfig | None = Field(None, description="None: the target samples the beginnings")
    begun: Size = Field(32, ge=1, description="number of prompts that the target samples")
    begun_tokens: Length = Field(16, ge=1, description="tokens of each of them")
    greedy_tokens: Length = Field(128, ge=1, description="new tokens of a greedy text")
    rounded: Dtype | None = Field(
        "auto", description="test greedy texts also in this dtype, if it is not target.dtype; None: no second test"
    )
    texts: Amount = Field(512, ge=1, description="number of sampled texts")
    new_tokens: Length = Field(32, ge=2, description="largest number of new tokens of a sampled text")
    temperature: float = Field(1.0, gt=0)
    top_k: Vocabulary = Field(0, ge=0, description="0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="1 is off")
    batch: Size = Field(16, ge=1, description="prompts decoded together, if the drafter takes several")
    alpha: float = Field(1e-4, gt=0, lt=1, description="probability that a lossless drafter fails the sampled test")
    threads: Threads | None = Field(None, description="CPU threads; None: by the load of other processes")
    seed: Seed = Field(0, ge=0)
    out: Path = Path("runs/lossless")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.drafter.grid is not None or self.drafter.temperatures is not None:
            raise ValueError("drafter takes no grid and no temperatures here: a certificate is for one drafter")
        if self.target.quantize is not None:
            raise ValueError(
                f"target.quantize is {self.target.quantize!r}, but transformers' model, which judges the tokens, is "
                "not quantised: leave it out"
            )
        return self


class ParityConfig(Config):
    """eval.parity: a head, its target, and the engine that serves it."""

    target: TargetEntry
    checkpoint: str = Field(description="folder or Hub repository of our EAGLE, EAGLE-3 or block head")
    engine: Literal["vllm", "sglang", "ours"] = Field(description="ours: no engine; which reading accepts most")
    prompts: PromptsConfig | None = Field(None, description="None: the target samples the beginnings")
    count: Size = Field(80, ge=2, description="prompts, unless prompts.count is given")
    begun_tokens: Length = Field(16, ge=2, description="tokens of a prompt that the target samples")
    max_new_tokens: Length = Field(128, ge=2, description="new tokens of a prompt")
    depth: DraftSize | None = Field(
        None, ge=1, description="tokens of a draft, which is a chain; None: 5, and of a block head all of a block"
    )
    batch: Size = Field(8, ge=1, description="prompts that our loop decodes together")
    python: Path | None = Field(None, description="Python of the engine's environment; None: its folder .venv-*")
    module: str | None = Field(None, description="worker module; None: the engine's in eval/engine_workers")
    patience: float = Field(
        900.0, gt=0, description="seconds after which loading the engine, or one prompt, has failed"
    )
    threads: Threads | None = Field(None, description="CPU threads; None: by the load of other processes")
    seed: Seed = Field(0, ge=0, description="of the beginnings")
    out: Path = Path("runs/parity")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.engine == "ours" and (self.python is not None or self.module is not None):
            raise ValueError("python and module are of another engine, and engine is ours; leave them out")
        return self


class LoadConfig(Config):
    """eval.load: served endpoints, prompts, and the numbers of requests in flight."""

    endpoints: dict[str, str] = Field(min_length=1, description="address up to /v1 by label, say 4: four draft tokens")
    baseline: str | None = Field(None, description="label of the endpoint without a drafter")
    prompts: PromptsConfig
    requests: Annotated[list[Annotated[Size, Field(ge=1)]], DISTINCT] = Field([1, 8, 32], min_length=1)
    model: str | None = Field(None, description="the server's name of the model; None: the first that it lists")
    max_new_tokens: Length = Field(128, ge=2)
    temperature: NonNegativeFloat = Field(0.0, description="0: greedy")
    parts: Size = Field(2, ge=1, description="parts of the prompts; endpoints take turns part by part")
    timeout: float = Field(300.0, gt=0, description="seconds after which a request is given up")
    extra: dict[str, Any] = Field({}, description="further keys of a request, for example {ignore_eos: true}")
    api_key_env: str = Field("OPENAI_API_KEY", description="environment variable that holds the API key")
    seed: Seed = Field(0, description="of the intervals")
    out: Path = Path("runs/load")

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys = ("context_tokens", "max_prompt_tokens", "per_category", "consecutive")
        if given := [key for key in keys if getattr(self.prompts, key) is not None]:
            raise ValueError(
                f"prompts.{given[0]} is given, but a server's prompts are not tokenised here; leave it out"
            )
        if self.baseline is not None and self.baseline not in self.endpoints:
            raise ValueError(f"baseline is {self.baseline!r}, the endpoints are {list(self.endpoints)}; name one")
        return self

    def check(self) -> None:
        """Raise ValueError for a wrong address (a validator's message would print its password) or a missing file."""
        for label, url in self.endpoints.items():
            check_address(url, f"endpoints.{label}", "api_key_env")
        check_prompt_files(self.prompts)
        check_folder(self.out, "--out")


class RooflineConfig(Config):
    """eval.roofline: settings given as ``key=value``."""

    dtype: Dtype = "auto"
    device: str | None = Field(None, description="None: a GPU if there is one, else the CPU")
    engine: Engine | None = None
    quantize: Quantization | None = None
    context: Length = Field(1024, ge=2, description="tokens before the decoded ones")
    new_tokens: Length = Field(128, ge=2)
    rows: list[Size] = Field([1, 2, 4, 8, 16, 26, 32, 60, 64], min_length=1, description="rows of a verification")
    batches: list[Size] = Field([1, 4], min_length=1, description="batch sizes of plain decoding and EAGLE")
    rounds: Odd = Field(3, description="odd; the median counts")
    exit_layer: Layers = Field(2, ge=1, description="Kangaroo's")
    stock: bool = Field(True, description="also stock generate")
    compiled: bool | None = Field(None, description="stock generate on a compiled static cache; None: on a GPU only")
    threads: Threads | None = Field(None, description="CPU threads; None: by the load of other processes")
    seed: Seed = 0
    out: Path | None = Field(None, description="folder; None: docs/results/<machine>")
