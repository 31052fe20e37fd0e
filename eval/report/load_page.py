"""The page of a load measurement: which endpoint to serve with at each number of requests in flight."""

import shlex
from typing import Any

from eval.figures.load import Row, best
from eval.report.tables import number, table

CACHED = 0.05  # share of prompt tokens; chat templates share a few blocks
ABOUT = """\
*tokens/s*: all tokens over all seconds of a request, times the requests in flight. *first token*, *per token*: median
and 95th percentile in ms, measured at the client. *tau*: tokens committed per verification, bonus token included;
*drafted*: tokens of a draft. Both come from the server's counters; "-": it has none. In brackets the 95% interval of
the ratio, over the prompts that both endpoints answered. An endpoint is chosen if its interval is above 1 and no more
requests failed than without a drafter."""


def markdown(report: dict[str, Any]) -> str:
    """Return ``load.md``."""
    facts, settings = report["environment"], report["settings"]
    loads = [load for load in facts["load_average"] if load is not None]
    lines = ["# Which endpoint to serve with", "", *choice_table(report), ""]
    lines += ["## Figures", "", *figures_table(report["rows"]), "", ABOUT, "", *remarks(report)]
    lines += [f"- endpoint {label}: {one['model']} at {one['url']}" for label, one in report["endpoints"].items()]
    lines += [
        f"- prompts: {len(settings['ids'])} of {settings['prompts']}, at most {settings['max_new_tokens']} new tokens, "
        f"temperature {settings['temperature']:g}",
        f"- client: {facts['client']}, load average {min(loads, default=0):.1f} to {max(loads, default=0):.1f}; "
        f"commit {(facts['commit'] or 'unknown')[:12]}; {facts['date']}",
    ]
    commands = dict.fromkeys(shlex.join(one["argv"]) for one in report["endpoints"].values())
    return "\n".join([*lines, "", "## To run it again", "", *(f"    {command}" for command in commands), ""])


def last_turn(data: dict[str, Any]) -> str:
    """Return the line about the turn that has just ended."""
    turn = data["turns"][-1]
    answered = sum(answer["outcome"] == "answered" for answer in turn["answers"])
    return f"{turn['endpoint']}, {turn['in_flight']} in flight: {answered} of {len(turn['answers'])} answered"


def choice_table(report: dict[str, Any]) -> list[str]:
    """Return ratios to the baseline by endpoint and number of requests, and what to serve with."""
    rows, plain = report["rows"], report["baseline"]
    if plain is None:
        return ["No endpoint without a drafter was measured: give `--baseline URL`."]
    labels = list(dict.fromkeys(row["endpoint"] for row in rows if row["endpoint"] != plain))
    lines = []
    for in_flight in sorted({row["in_flight"] for row in rows}):
        here = {row["endpoint"]: row for row in rows if row["in_flight"] == in_flight}
        base = here[plain]["tokens_per_second"] if plain in here else None
        cells = [ratio(here.get(label)) for label in labels]
        lines.append([str(in_flight), number(base, 1), *cells, best(rows, in_flight, plain)])
    return table(["requests in flight", f"{plain}, tokens/s", *labels, "serve with"], lines)


def ratio(row: Row | None) -> str:
    """Return ``1.31x [1.22, 1.40]``; "-" without enough answers."""
    if row is None or row["change"] is None:
        return "-"
    return "{:.2f}x [{:.2f}, {:.2f}]".format(row["change"]["ratio"], *row["change"]["ratio_ci"])


def figures_table(rows: list[Row]) -> list[str]:
    """Return all figures, one line for each endpoint and number of requests."""
    head = [
        "requests",
        "endpoint",
        "tokens/s",
        "first token, ms",
        "per token, ms",
        "tau",
        "drafted",
        "answered",
        "failed",
    ]
    return table(
        head,
        [
            [
                str(row["in_flight"]),
                row["endpoint"],
                number(row["tokens_per_second"], 1),
                *(milliseconds(row[key], digits) for key, digits in (("first", 0), ("per_token", 1))),
                number(row["tau"], 2),
                number(row["drafted"], 2),
                str(row["answered"]),
                ", ".join(f"{count} {outcome}" for outcome, count in row["failed"].items()) or "0",
            ]
            for row in rows
        ],
        texts=2,
    )


def milliseconds(spread: dict[str, float] | None, digits: int) -> str:
    """Return ``median, 95th percentile``."""
    return "-" if spread is None else f"{1e3 * spread['median']:.{digits}f}, {1e3 * spread['p95']:.{digits}f}"


def remarks(report: dict[str, Any]) -> list[str]:
    """Return what went wrong: failed requests, missing counters, a prefix cache that repeats of a prompt hit."""
    lines = []
    for label in report["endpoints"]:
        here = [row for row in report["rows"] if row["endpoint"] == label]
        if all(turn["gains"] is None for turn in report["turns"] if turn["endpoint"] == label):
            lines.append(f"- {label}: no counters at /metrics; SGLang has them with `--enable-metrics`")
        cached = max((row["cached"] or 0.0 for row in here), default=0.0)
        if cached > CACHED:
            lines.append(
                f"- {label}: {cached:.0%} of prompt tokens came from the prefix cache, so prefill was "
                "not measured; serve with `--no-enable-prefix-caching` (SGLang: `--disable-radix-cache`)"
            )
        details = [(row["in_flight"], *detail) for row in here for detail in row["details"].items()]
        lines += [f"- {label}, {in_flight} in flight, {outcome}: {why}" for in_flight, outcome, why in details]
    return lines
