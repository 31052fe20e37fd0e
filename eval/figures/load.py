"""Figures of a load measurement: tokens/s, latencies, acceptance, and the ratio to the endpoint without a drafter."""

from dataclasses import asdict
from typing import Any

import numpy as np

from eval.figures.paired import change
from eval.measure.counters import speculation
from eval.measure.stream import FAILURES, Answer

Row = dict[str, Any]


def rows_of(data: dict[str, Any], seed: int = 0) -> list[Row]:
    """Return a row for each number of requests in flight and each endpoint, the baseline first."""
    settings = {(turn["in_flight"], turn["endpoint"]) for turn in data["turns"]}
    order = sorted(settings, key=lambda one: (one[0], one[1] != data["baseline"], _label_order(one[1])))
    return [_row(data, in_flight, label, seed) for in_flight, label in order]


def _label_order(label: str) -> tuple[float, str]:
    return (float(label), "") if label.isdecimal() else (float("inf"), label)


def _row(data: dict[str, Any], in_flight: int, label: str, seed: int) -> Row:
    """Return the figures of one endpoint; times are in seconds."""
    answers = answers_of(data, in_flight, label)
    good = [answer for answer in answers.values() if answer.outcome == "answered"]
    failed = [answer for answer in answers.values() if answer.outcome != "answered"]
    details = {name: bad.detail for name in FAILURES for bad in failed if bad.outcome == name}
    totals = np.array([[answer.tokens, answer.seconds] for answer in good]).reshape(-1, 2)
    gains = [turn["gains"] or {} for turn in _turns(data, in_flight, label)]
    summed = {name: sum(each.get(name, 0.0) for each in gains) for name in set().union(*gains)}
    return {
        "in_flight": in_flight,
        "endpoint": label,
        # Little's law: requests that are always in flight, over the mean time of one, times its tokens.
        "tokens_per_second": in_flight * float(tokens_per_second(totals.sum(0))) if good else None,
        "first": _spread([answer.first for answer in good]),
        "per_token": _spread([answer.per_token for answer in good]),
        **speculation(summed),
        "answered": len(good),
        "failed": {name: sum(bad.outcome == name for bad in failed) for name in details},
        "details": details,
        "change": _against_baseline(data, in_flight, answers, seed) if label != data["baseline"] else None,
    }


def answers_of(data: dict[str, Any], in_flight: int, label: str) -> dict[int, Answer]:
    """Return an endpoint's answers by prompt."""
    rows = [row for turn in _turns(data, in_flight, label) for row in turn["answers"]]
    return {row["prompt"]: Answer(**{key: row[key] for key in row if key != "prompt"}) for row in rows}


def _turns(data: dict[str, Any], in_flight: int, label: str) -> list[dict[str, Any]]:
    return [turn for turn in data["turns"] if (turn["in_flight"], turn["endpoint"]) == (in_flight, label)]


def tokens_per_second(sums: np.ndarray) -> np.ndarray:
    """Return tokens over seconds of sums ``[..., 2]``: of one request, on average."""
    return sums[..., 0] / sums[..., 1]


def _spread(values: list[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": float(np.median(known)), "p95": float(np.percentile(known, 95))}


def _against_baseline(data: dict[str, Any], in_flight: int, answers: dict[int, Answer], seed: int) -> Row | None:
    """Return the ratio of tokens/s to the baseline's on the prompts that both answered; None without two of them."""
    plain = answers_of(data, in_flight, data["baseline"]) if data["baseline"] is not None else {}
    both = [at for at in answers if at in plain and {answers[at].outcome, plain[at].outcome} == {"answered"}]
    if len(both) < 2:
        return None
    a, b = (np.array([[one[at].tokens, one[at].seconds] for at in both], float) for one in (plain, answers))
    return asdict(change(a, b, tokens_per_second, seed=seed))


def best(rows: list[Row], in_flight: int, baseline: str) -> str:
    """Return the endpoint to serve with: the highest ratio whose interval is above 1, or the baseline.

    An endpoint with more failed requests than the baseline is not chosen.
    """
    here = [row for row in rows if row["in_flight"] == in_flight]
    failed = sum(sum(row["failed"].values()) for row in here if row["endpoint"] == baseline)
    faster = [row for row in here if row["change"] is not None and row["change"]["ratio_ci"][0] > 1]
    faster = [row for row in faster if sum(row["failed"].values()) <= failed]
    return max(faster, key=lambda row: row["change"]["ratio"], default={"endpoint": baseline})["endpoint"]
