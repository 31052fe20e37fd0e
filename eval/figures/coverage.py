"""What a pruned draft vocabulary leaves out: tokens that the target chose and the drafter can never draft."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from eval.measure.runner import Run


def add_coverage(judged: Sequence[dict[str, Any]], runs: Sequence[Run], known: Mapping[str, Collection[int]]) -> None:
    """Give the figures of every method with a pruned vocabulary the share of its outputs' tokens that are in it.

    Args:
        judged: see ``eval.report.judged``. known: by label, the tokens that a method can draft.
    """
    for row in judged:
        if (ids := known.get(row["drafter"])) is not None:
            place = row["drafter"], row["temperature"], row["batch"]
            tokens = [t for run in runs if (run.method, run.temperature, run.batch) == place for t in run.tokens]
            share = sum(token in ids for token in tokens) / len(tokens)
            row["figures"] |= {"draft_vocab": len(ids), "draft_vocab_coverage": share}
