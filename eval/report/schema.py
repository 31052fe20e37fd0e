"""``report.json`` as this version of eval.speed writes it, and the journal's lines that it is made from.

A file of another version, or a damaged one, is refused by its key before anything is made from it.
"""

from typing import Any

from pydantic import Field

from drafters.common.wording import shortened
from drafters.config import validate
from drafters.hub import reports
from drafters.hub.reports import MOST_PROBLEMS, Interval, Part


class Named(Part):
    name: str


class Target(reports.Target):
    revision: str | None
    parameters: int
    tuned_from: Named | None = None


class Tokens(Part):
    mean: float
    max: int


class Context(Part):
    tokens: int
    files: str


class Suite(Part):
    max_new_tokens: int | None


class PromptSet(reports.PromptSet):
    format: str
    requested: int | None
    later_turns: int = 0
    categories: dict[str, int]
    consecutive: int | None
    warmup_prompts: int
    context: Context | None
    prompt_tokens: Tokens
    skipped: dict[str, int]
    suites: dict[str, Suite] = {}


class Meter(Part):
    available: bool
    how: str


class Start(Part):
    date: str
    load_average: float | None
    runs: int = 0


class Cost(Part):
    """Of quantised layers."""

    kl: float
    same_argmax: float
    positions: int


class OtherEngine(Part):
    engine: str
    version: str


class Facts(reports.SpeedFacts):
    target: Target
    versions: dict[str, str]
    prompt_set: PromptSet
    engine: str
    quantize: str | None
    batch: int | list[int]
    cpu_cores: int
    cpu_instructions: str | None = None
    fewest_threads: int | None = None
    load_average: float | None
    load_average_after: float | None
    peak_memory_bytes: dict[str, int | None]
    energy: dict[str, Meter]
    parts: list[Start]
    processes: int = 1
    quantisation: Cost | None = None
    engines: dict[str, OtherEngine] = {}
    engines_left_out: dict[str, str] = {}
    programs: str | None = None


class Baseline(Part):
    temperature: float
    batch: int
    tokens_per_second: float | None
    loop_share: float
    over_stock_generate: float | None
    stock_generate_tokens_per_second: float | None


class Baselines(Part):
    temperatures: list[Baseline]


class Divergence(Part):
    position: int
    gap: float | None
    tolerance: float | None
    accepted: bool


class Divergences(Part):
    count: int
    unexplained: int | None
    largest_margin: float | None
    each: list[Divergence] | None
    unavailable: str | None = None


class Expected(Part):
    tau: float
    speedup: float
    choice: str


class Fixed(Part):
    drafter: str
    speedup: float | None
    speedup_ci: Interval | None


class Bin(Part):
    low: int = Field(alias="from")
    to: int
    tau: float


class Category(Part):
    prompts: int
    tau: float | None
    speedup: float | None


class Mark(Part):
    metric: str
    answers: int
    value: float | None
    cut: int = 0
    unavailable: str = ""


class Row(reports.Row):
    entry: str
    batch: int
    stock: bool
    grid: dict[str, Any] | None
    engine: str | None = None
    beside: str | None = None
    tau_ci: Interval | None
    tau_by_prompt: float | None
    tau_without_loops: float | None
    ctar: list[float] | None
    n_alpha: list[float] | None
    joint_alpha: list[float] | None
    steps: int | None
    drafted_per_step: float | None
    end_to_end_tokens_per_second: float
    draft_ms: float | None
    verify_ms: float | None
    other_ms: float | None
    host_ms: float | None
    overhead: float | None
    prefill_ms: float | None
    joules_per_token: float | None
    host_joules_per_token: float | None
    speedup_median: float | None
    prompts: int
    perplexity: float | None
    perplexity_unavailable: str = ""
    exact_match: float | None
    draft_vocab: int | None = None
    draft_vocab_coverage: float | None = None
    divergences: Divergences = Divergences(count=0, unexplained=0, largest_margin=None, each=[])
    expected: Expected | None = None
    over_best_fixed: Fixed | None = None
    by_context: list[Bin]
    categories: dict[str, Category] = {}
    sub_categories: dict[str, Category] = {}
    accuracy: dict[str, Mark] = {}


class WithoutFigures(Part):
    drafter: str
    temperature: float
    batch: int
    lossless: bool
    stock: bool
    engine: str | None = None


class Failed(WithoutFigures):
    prompt: str
    reason: str


class Report(Part):
    environment: Facts
    baseline: Baselines
    rows: list[Row]
    failures: list[Failed]


class Prompt(Part):
    id: str
    category: str | None
    sub_category: str | None
    turn: int
    tokens: int


class Judged(Part):
    drafter: str
    temperature: float
    batch: int
    figures: dict[str, Any]


class LeftOut(WithoutFigures):
    most: int


class Output(Part):
    drafter: str
    temperature: float
    same: int
    rest: str | list[str]


class Shown(Part):
    id: str
    category: str | None
    prompt: str
    outputs: list[Output]


class Texts(Part):
    prompts: int
    shown: list[Shown]


class Ending(Part):
    """The last line of a journal: everything besides the runs that a report needs."""

    environment: Facts
    described: dict[str, dict[str, Any]]
    baseline: str
    prompts: list[Prompt]
    judged: list[Judged]
    left_out: list[LeftOut]
    texts: Texts


def check(data: Any, schema: type[Part], source: str) -> None:
    """Raise ValueError if a part of ``data`` is missing or of another type; the message begins with ``source``."""
    if not isinstance(data, dict):
        raise ValueError(f"{source} must hold keys and values, found {shortened(data)}")
    validate(schema, data, source, MOST_PROBLEMS)
