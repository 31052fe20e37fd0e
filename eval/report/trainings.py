"""The trainings of one report, a row each: data, minutes, and tau with its interval over seeds.

An entry of ``eval.speed`` with a ``grid`` over trained models is one training with several seeds. Differences are taken
seed by seed, because equal seeds see equal data.
"""

import statistics
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.console import Console

from drafters.common.wording import shortened
from drafters.config import Size, validate
from drafters.hub import reports
from eval.report.tables import number, run_again, setting_of, table, write_page

Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TRAINED = ("checkpoint", "draft_model", "draft_models")  # options that name a trained model
# Two-sided 95% quantiles of Student's t, for 1 to 9 degrees of freedom.
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]
ABOUT = """\
- tau: tokens committed per target forward; in brackets the 95% interval over the seeds (Student's t)
- over: difference in percent, seed by seed; "-" where the numbers of seeds differ
- accepted: share of draft tokens that were accepted, by depth, where all before them were
- minutes, positions: of the last training, as means over the seeds
"""


class Training(reports.Part):
    tokens: Figure | None = None
    minutes: Figure | None = None


class Row(reports.Row):
    """A row of ``report.json``, with what it says of trainings."""

    temperature: Figure
    tau: float | None = Field(gt=0, allow_inf_nan=False)
    batch: Size = 1
    grid: dict[str, Any] | None = None
    trained: list[Training] | None = None
    n_alpha: list[Figure] | None = None

    @property
    def recipe(self) -> str:
        """The label of its entry, with the options of its grid that name no trained model."""
        more = [f"{key}={value}" for key, value in (self.grid or {}).items() if key not in TRAINED]
        return ", ".join([self.entry or self.drafter, *more])

    @property
    def is_trained(self) -> bool:
        return bool(self.trained) or not (self.grid or {}).keys().isdisjoint(TRAINED)


class Report(reports.Report):
    rows: list[Row]  # type: ignore[assignment]


def write_trainings(folder: Path, over: list[str], out: Path, argv: list[str], console: Console) -> None:
    """Write trainings.json and trainings.md.

    Raises:
        ValueError: the report lacks a part, or no row is of a trained model.
    """
    source = f"{folder} is not what python -m eval.speed writes"
    report = validate(Report, reports.read(folder), source, reports.MOST_PROBLEMS)
    rows = trainings(report.rows, over)
    facts = {"format_version": 1, "report": str(folder), "commit": report.environment.commit, "argv": argv}
    write_page({**facts, "rows": rows}, page(rows, report, argv), out, "trainings", console)


def trainings(rows: list[Row], over: list[str]) -> list[dict[str, Any]]:
    """Return tau by seed, its mean, and the percentage over each entry of ``over``, for every training and setting.

    Args:
        over: labels, also of entries without training; default: the first training.
    """
    groups: dict[tuple[float, int, str], list[Row]] = {}
    for row in rows:
        if row.tau is not None:  # stock generation and engines that report no steps
            groups.setdefault((row.temperature, row.batch, row.recipe), []).append(row)
    names = list(dict.fromkeys(recipe for _, _, recipe in groups))
    trained = list(dict.fromkeys(row.recipe for row in rows if row.is_trained and row.tau is not None))
    if not trained:
        raise ValueError(
            f"no row of the report names a training (`trained`, or a `grid` over checkpoints); it has "
            f"{shortened(names)}; measure again: python -m eval.speed"
        )
    if unknown := set(over) - set(names):
        raise ValueError(f"--over {sorted(unknown)} is no entry of the report; it has {shortened(names)}")
    lines: list[dict[str, Any]] = []
    for (temperature, batch, recipe), seeds in groups.items():
        if recipe in trained:
            line = {"training": recipe, "temperature": temperature, "batch": batch, **figures(seeds)}
            others = [other for other in over or trained[:1] if other != recipe]
            bases = {other: groups.get((temperature, batch, other), []) for other in others}
            line["over"] = {other: gain(seeds, base) for other, base in bases.items() if base}
            lines.append(line)
    return lines


def figures(seeds: list[Row]) -> dict[str, Any]:
    """Return the figures of one training; its rows are its seeds."""
    depths = [row.n_alpha for row in seeds if row.n_alpha]
    last = [row.trained[-1] for row in seeds if row.trained]
    tokens = [one.tokens for one in last if one.tokens is not None]
    minutes = [one.minutes for one in last if one.minutes is not None]
    return {
        "minutes": statistics.mean(minutes) if minutes else None,
        "positions": statistics.mean(tokens) if tokens else None,
        "n_alpha": [statistics.mean(shares) for shares in zip(*depths, strict=False)],
        "tau_by_seed": taus(seeds),
        **mean("tau", taus(seeds)),
    }


def taus(seeds: list[Row]) -> list[float]:
    return [row.tau for row in seeds if row.tau is not None]


def gain(seeds: list[Row], base: list[Row]) -> dict[str, Any] | None:
    """Return the percentage over ``base``, seed by seed; None if the numbers of seeds differ."""
    if len(base) not in (1, len(seeds)):
        return None
    pairs = zip(taus(seeds), taus(base * (len(seeds) // len(base))), strict=True)
    return mean("percent", [100 * (tau / than - 1) for tau, than in pairs])


def mean(name: str, values: list[float]) -> dict[str, Any]:
    """Return the mean as ``name`` and its 95% interval as ``name_ci``, for normally distributed values."""
    middle = statistics.mean(values)
    if len(values) == 1:
        return {name: middle, f"{name}_ci": None}
    if len(values) > len(STUDENT) + 1:
        raise ValueError(f"found {len(values)} seeds of one training; give at most {len(STUDENT) + 1}")
    half = STUDENT[len(values) - 2] * statistics.stdev(values) / len(values) ** 0.5
    return {name: middle, f"{name}_ci": [middle - half, middle + half]}


def page(rows: list[dict[str, Any]], report: Report, argv: list[str]) -> str:
    """Return ``trainings.md``."""
    others = list(dict.fromkeys(other for row in rows for other in row["over"]))
    most = max(len(row["tau_by_seed"]) for row in rows)
    seeds = [f"seed {place}" for place in range(1, most + 1)] if most > 1 else []
    head = ["training", "setting", "minutes", "positions", "accepted", *seeds, "tau"]
    lines = []
    for row in rows:
        taus = [f"{tau:.2f}" for tau in row["tau_by_seed"]] if seeds else []
        lines.append(
            [row["training"], setting_of(row), number(row["minutes"], 1)]
            + [number(row["positions"] and row["positions"] / 1e6, 2, "M")]
            + [" ".join(f"{share:.2f}" for share in row["n_alpha"]) or "-"]
            + [*taus, *["-"] * (len(seeds) - len(taus)), interval(row, "tau", "{:.2f}", "[{:.2f}, {:.2f}]")]
            + [interval(row["over"].get(other), "percent", "{:+.1f}%", "[{:+.1f}, {:+.1f}]") for other in others]
        )
    title = [f"# Trainings, on {report.environment.prompt_set.prompts} prompts", "", ABOUT]
    return "\n".join([*title, *table([*head, *(f"over {other}" for other in others)], lines), "", *run_again(argv)])


def interval(figure: dict[str, Any] | None, name: str, value: str, ends: str) -> str:
    """Return a mean as text, with its interval if it has one."""
    if figure is None:
        return "-"
    between = figure[f"{name}_ci"]
    return value.format(figure[name]) + (" " + ends.format(*between) if between else "")
