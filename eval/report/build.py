"""Make ``report.json`` from the runs."""

from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import Any

from eval.entries import STOCK
from eval.figures import metrics
from eval.figures.divergence import differing
from eval.figures.metrics import joules_per_token, paired_speedup, typical_run
from eval.measure.runs import Run
from eval.prompts.prompts import Prompt

Key = tuple[float, int, str]  # temperature, batch size, method
Rounds = list[list[Run]]  # for each prompt or batch of prompts, its run in every round
Described = dict[str, dict[str, Any]]  # by label, what is known of a method


def build(
    facts: dict[str, Any],
    described: Described,
    baseline_label: str,
    prompts: list[Prompt],
    judged: list[dict[str, Any]],
    left_out: list[dict[str, Any]],
    runs: list[Run],
) -> dict[str, Any]:
    """Return ``report.json``.

    Args:
        facts: the report's environment. judged: see ``eval.report.judged``.
        left_out: methods that cannot decode batches of a size.
    """
    baseline, rows = make_rows(runs, described, baseline_label, prompts, judged, facts["limits"]["seed"])
    report = {"format_version": 1, "environment": facts, "baseline": baseline, "rows": rows}
    report["failures"] = failures(runs, described, prompts)
    if facts["batch"] != 1:
        report["left_out"] = [{**row, **described[row["drafter"]]} for row in left_out]
        report["throughput"] = best_throughput(rows, baseline)
    return report


def make_rows(
    runs: list[Run],
    described: Described,
    baseline_label: str,
    prompts: list[Prompt],
    judged: list[dict[str, Any]],
    seed: int,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the report's ``baseline`` and ``rows``, in the order of ``described``."""
    by_key = rounds_by_key(runs, len(prompts))
    figures = {(row["temperature"], row["batch"], row["drafter"]): row["figures"] for row in judged}
    rows, baselines = [], []
    for temperature, batch in dict.fromkeys((run.temperature, run.batch) for run in runs):
        plain = by_key[temperature, batch, baseline_label]
        stock = by_key.get((temperature, batch, STOCK))
        baselines.append(_baseline(temperature, batch, plain, stock if stock and succeeded(stock) else None))
        # Every method at this temperature against plain decoding, prompt by prompt.
        here: dict[str, dict[str, Any]] = {}
        for label, known in described.items():
            rounds = by_key.get((temperature, batch, label), [])
            if rounds and succeeded(rounds):
                row: dict[str, Any] = {"drafter": label, "temperature": temperature, "batch": batch, **known}
                here[label] = row | _row(rounds, plain, prompts, seed) | figures[temperature, batch, label]
        for label, row in here.items():
            if (best := _best_fixed(row, here.values())) is not None:
                over = paired_speedup(by_key[temperature, batch, label], by_key[temperature, batch, best], seed)
                row["over_best_fixed"] = {"drafter": best, "speedup": over.speedup, "speedup_ci": over.speedup_ci}
            rows.append(row)
    return {**baselines[0], "temperatures": baselines}, rows


def rounds_by_key(runs: list[Run], prompts: int) -> dict[Key, Rounds]:
    """Return the rounds of every prompt, or batch of prompts, by method."""
    by_key: dict[Key, Rounds] = {}
    for run in runs:
        rounds = by_key.setdefault((run.temperature, run.batch, run.method), [[] for _ in range(0, prompts, run.batch)])
        rounds[run.prompt // run.batch].append(run)
    return by_key


def succeeded(rounds: Rounds) -> bool:
    """Return whether no run failed."""
    return all(run.failure is None for run in chain(*rounds))


def best_throughput(rows: list[dict[str, Any]], baseline: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each method's fastest batch size, and its speed relative to plain decoding at its own fastest size."""
    plain: dict[float, float] = {}
    for each in baseline["temperatures"]:
        plain[each["temperature"]] = max(plain.get(each["temperature"], 0.0), each["tokens_per_second"] or 0.0)
    best: dict[tuple[str, float], dict[str, Any]] = {}
    for row in rows:
        if row["tokens_per_second"] is not None:
            other = best.setdefault((row["drafter"], row["temperature"]), row)
            if row["tokens_per_second"] > other["tokens_per_second"]:
                best[row["drafter"], row["temperature"]] = row
    columns = ("drafter", "temperature", "batch", "lossless", "stock", "tokens_per_second")
    return [
        {name: row[name] for name in columns} | {"over_plain": row["tokens_per_second"] / plain[row["temperature"]]}
        for row in best.values()
    ]


def _best_fixed(row: dict[str, Any], others: Iterable[dict[str, Any]]) -> str | None:
    """Return the fastest row of the same drafter with fixed options, for a row that chooses options itself."""
    if "expected" not in row or "method" not in row:
        return None
    same = [
        one
        for one in others
        if "expected" not in one
        and one["speedup"] is not None
        and all(one.get(name) == row.get(name) for name in ("method", "trained", "lossless"))
    ]
    return max(same, key=lambda one: float(one["speedup"]))["drafter"] if same else None


def outputs_of(runs: list[Run]) -> list[Run]:
    """Return the output of each prompt, from runs of batches."""
    return [output for run in runs for output in run.outputs()]


def outputs_by_prompt(rounds: Rounds) -> Rounds:
    """Return the rounds of each prompt from those of each batch."""
    return [list(outputs) for of_batch in rounds for outputs in zip(*(run.outputs() for run in of_batch), strict=True)]


def failures(runs: list[Run], described: Described, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Return the methods that failed, without figures, each with its first failed prompt and the reason."""
    first: dict[Key, Run] = {}
    for run in runs:
        if run.failure is not None:
            first.setdefault((run.temperature, run.batch, run.method), run)
    return [
        {"drafter": run.method, "temperature": run.temperature, "batch": run.batch, **described[run.method]}
        | {"prompt": prompts[run.prompt].id, "round": run.round, "reason": run.failure}
        for run in first.values()
    ]


def _baseline(temperature: float, batch: int, plain: Rounds, stock: Rounds | None) -> dict[str, Any]:
    typical = [typical_run(rounds) for rounds in plain]
    outputs = outputs_of(typical)
    exact = 1 - len(differing(outputs_by_prompt(stock), outputs)) / len(outputs) if stock else None
    return {
        "temperature": temperature,
        "batch": batch,
        "tokens_per_second": metrics.tokens_per_second(typical),
        "loop_share": len(_looping(outputs)) / len(outputs),
        "stock_generate_tokens_per_second": metrics.tokens_per_second([typical_run(each) for each in stock or ()]),
        "over_stock_generate": paired_speedup(plain, stock).speedup if stock else None,
        "stock_generate_joules_per_token": joules_per_token(list(chain(*stock))) if stock else None,
        "stock_generate_exact_match": exact if stock and temperature == 0 else None,
    }


def _looping(runs: list[Run]) -> set[int]:
    """Return the prompts whose outputs end in a loop; of each method its own, because lossy outputs differ."""
    return {run.prompt for run in runs if metrics.ends_in_loop(run.tokens)}


def _row(rounds: Rounds, plain: Rounds, prompts: list[Prompt], seed: int) -> dict[str, Any]:
    typical = [typical_run(of_prompt) for of_prompt in rounds]
    outputs = outputs_of(typical)
    looping = _looping(outputs)
    steady = [place for place, run in enumerate(typical) if not any(one.prompt in looping for one in run.outputs())]
    row = metrics.acceptance(outputs, looping) | metrics.times(typical) | metrics.expected(typical)
    row |= asdict(paired_speedup(rounds, plain, seed)) | {"joules_per_token": joules_per_token(list(chain(*rounds)))}
    row |= {
        "speedup_without_loops": _speedup_on(steady, rounds, plain),
        "loop_share": len(looping) / len(outputs),
        "by_context": metrics.by_context(outputs, [len(prompt.ids) for prompt in prompts]),
        "prompts": len(outputs),
        "new_tokens": sum(len(run.tokens) for run in typical),
        "decoded_tokens": sum(run.decoded_tokens for run in typical),
    }
    if len(outputs) > len(typical):
        return row  # the time of a batch cannot be divided among the categories in it
    kinds = {"categories": [p.category for p in prompts], "sub_categories": [p.sub_category for p in prompts]}
    for kind, of_prompts in kinds.items():
        for name in sorted({of for of in of_prompts if of is not None}):
            chosen = [place for place, of in enumerate(of_prompts) if of == name]
            row.setdefault(kind, {})[name] = {
                "prompts": len(chosen),
                "tau": metrics.acceptance([typical[place] for place in chosen], set())["tau"],
                "speedup": _speedup_on(chosen, rounds, plain),
            }
    return row


def _speedup_on(places: list[int], rounds: Rounds, plain: Rounds) -> float | None:
    """Return the speedup over a part of the prompts."""
    return paired_speedup([rounds[place] for place in places], [plain[place] for place in places]).speedup
