"""Figures of every prompt, which ``eval.compare`` compares, as CSV for other programs."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from eval.figures.metrics import typical_pair, typical_run
from eval.measure.runner import Run
from eval.report.pairs import COLUMNS, PLACE, Line


def by_prompt(placed: Iterable[tuple[str, int, Run]], plain: str) -> list[Line]:
    """Return a line for every method and prompt or batch of prompts.

    Args:
        placed: (name, tokens, run) with the prompt's name and number of tokens. plain: plain decoding's label.
    """
    rounds: dict[tuple[Any, ...], list[Run]] = {}
    for name, tokens, run in placed:
        if run.failure is None:
            rounds.setdefault((run.method, run.temperature, run.batch, name, tokens, run.prompt), []).append(run)
    lines = []
    for (method, *where), runs in rounds.items():
        base = rounds.get((plain, *where))
        typical = typical_run(runs)
        pair = typical_pair(runs, base) if base is not None else None
        forwards = sum(step.forwards for step in typical.trace.steps) if typical.trace is not None else None
        values = [typical.decoded_tokens, typical.decode_seconds, forwards]
        values += [x for run in pair or () for x in (run.decoded_tokens, run.decode_seconds)] or [None] * 4
        lines.append(dict(zip(PLACE, (method, *where[:-1]), strict=True)) | dict(zip(COLUMNS, values, strict=True)))
    return lines


def in_report(end: dict[str, Any], runs: Sequence[Run]) -> list[Line]:
    """Return ``by_prompt`` of a report's runs; ``end`` is the last line of their journal."""
    prompts = end["prompts"]
    together = [prompts[run.prompt : run.prompt + run.batch] for run in runs]
    names = [(", ".join(p["id"] for p in some), sum(p["tokens"] for p in some)) for some in together]
    return by_prompt(((*name, run) for name, run in zip(names, runs, strict=True)), end["baseline"])


def as_csv(lines: Sequence[Line]) -> str:
    """Return the lines as CSV with a head; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else [*PLACE, *COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def flat(rows: Sequence[Line]) -> list[Line]:
    """Return the report's rows without lists and tables, all with the same keys; an interval as two figures."""
    plain = []
    for row in rows:
        ends = {
            f"{key}_{end}": pair[n]
            for key, pair in row.items()
            if key.endswith("_ci") and pair
            for n, end in enumerate(("low", "high"))
        }
        plain.append({key: value for key, value in row.items() if isinstance(value, str | int | float)} | ends)
    names = dict.fromkeys(name for row in plain for name in row)
    return [{name: row.get(name) for name in names} for row in plain]
