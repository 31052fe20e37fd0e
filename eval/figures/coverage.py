"""What a pruned draft vocabulary leaves out: tokens that the target chose and the drafter can never draft."""

from collections.abc import Mapping, Sequence
from typing import Any

from drafters.model.draft_head import TextTokens
from eval.measure.runner import Run
from eval.prompts.prompts import Prompt


def add_coverage(
    judged: Sequence[dict[str, Any]],
    runs: Sequence[Run],
    known: Mapping[str, TextTokens],
    prompts: Sequence[Prompt],
) -> None:
    """Give the figures of every method with a pruned vocabulary the share of its outputs' tokens that it could draft.

    Each is looked up as things stood when its step began, prompt and answer so far being read. A prompt's first token
    is left out: prefill gives it. Of batches nothing is said: their rows share what the text has brought.

    Args:
        judged: see ``eval.report.judged``. known: by label, the tokens that a method can draft before any text.
        prompts: those measured.
    """
    for row in judged:
        if (vocabulary := known.get(row["drafter"])) is not None and row["batch"] == 1:
            place = row["drafter"], row["temperature"], row["batch"]
            own = [run for run in runs if (run.method, run.temperature, run.batch) == place]
            found = [there for run in own for there in _drafted(vocabulary.anew(), prompts[run.prompt].ids, run)]
            if found:
                row["figures"] |= {"draft_vocab": len(vocabulary), "draft_vocab_coverage": sum(found) / len(found)}


def _drafted(vocabulary: TextTokens, prompt: Sequence[int], run: Run) -> list[bool]:
    """Of each token but the first, whether it could be drafted."""
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
