"""The share of the target's tokens that a pruned draft vocabulary contains."""

from collections.abc import Mapping, Sequence
from typing import Any

from drafters.model.text_tokens import TextTokens
from eval.measure.runner import Run
from eval.prompts.prompts import Prompt


def add_coverage(
    judged: Sequence[dict[str, Any]],
    runs: Sequence[Run],
    known: Mapping[str, TextTokens],
    prompts: Sequence[Prompt],
) -> None:
    """Add to the figures of methods with a pruned vocabulary the share of their outputs' tokens that it contains.

    The vocabulary grows with the text, so each token is looked up at the start of its step. A prompt's first token is
    left out, because prefill gives it. Batches have no figure, because their rows share the tokens of all texts.

    Args:
        judged: see ``eval.report.judged``. known: by label, a method's vocabulary before any text.
        prompts: the measured prompts.
    """
    for row in judged:
        if (vocabulary := known.get(row["drafter"])) is not None and row["batch"] == 1:
            place = row["drafter"], row["temperature"], row["batch"]
            own = [run for run in runs if (run.method, run.temperature, run.batch) == place]
            found = [there for run in own for there in _drafted(vocabulary.anew(), prompts[run.prompt].ids, run)]
            if found:
                row["figures"] |= {"draft_vocab": len(vocabulary), "draft_vocab_coverage": sum(found) / len(found)}


def _drafted(vocabulary: TextTokens, prompt: Sequence[int], run: Run) -> list[bool]:
    """Return for each token except the first whether it could be drafted."""
    found = list[bool]()
    steps = [step.committed for step in run.trace.steps] if run.trace else [1] * (len(run.tokens) - 1)
    text = [*prompt, *run.tokens[:1]]
    rows, at = [text], 1
    for count in steps:
        vocabulary.read(rows)
        new = run.tokens[at : at + count]
        found += [token in vocabulary for token in new]
        text += new
        at += count
    return found
