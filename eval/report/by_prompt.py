"""Figures of every prompt, which ``eval.compare`` compares, as CSV for other programs."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from eval.figures.metrics import typical_pair, typical_run
from eval.measure.runs import Run
from eval.prompts.prompts import Prompt
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


def in_report(runs: Sequence[Run], prompts: Sequence[Prompt], plain: str) -> list[Line]:
    """Return ``by_prompt`` of a report's runs."""
    together = [prompts[run.prompt : run.prompt + run.batch] for run in runs]
    names = [(", ".join(p.id for p in some), sum(len(p.ids) for p in some)) for some in together]
    return by_prompt(((*name, run) for name, run in zip(names, runs, strict=True)), plain)


def as_csv(lines: Sequence[Line]) -> str:
    """Return the lines as CSV with a head; None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]) if lines else [*PLACE, *COLUMNS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()
