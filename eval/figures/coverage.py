"""What a pruned draft vocabulary leaves out: tokens that the target chose and the drafter can never draft."""

from collections.abc import Mapping, Sequence
from typing import Any

from drafters.model.text_tokens import TextTokens
from eval.measure.runner import Run
from eval.prompts import Prompt


def add_coverage(
    judged: Sequence[dict[str, Any]],
    runs: Sequence[Run],
    known: Mapping[str, TextTokens],
    prompts: Sequence[Prompt],
) -> None:
    """Give the figures of every method with a pruned vocabulary the share of its outputs' tokens that it could draft.

    Each is looked up as things stood before it, prompt and answer so far being read. A prompt's first token is left
    out: prefill gives it.

    Args:
        judged: see ``eval.report.judged``. known: by label, the tokens that a method can draft before any text.
        prompts: those measured.
    """
    for row in judged:
        if (vocabulary := known.get(row["drafter"])) is not None:
            place = row["drafter"], row["temperature"], row["batch"]
            outputs = [
                one for run in runs if (run.method, run.temperature, run.batch) == place for one in run.outputs()
            ]
            found = [
                there for one in outputs for there in _drafted(vocabulary.anew(), prompts[one.prompt].ids, one.tokens)
            ]
            if found:
                row["figures"] |= {"draft_vocab": len(vocabulary), "draft_vocab_coverage": sum(found) / len(found)}


def _drafted(vocabulary: TextTokens, prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
    """Of each token but the first, whether it could be drafted."""
    text = [*prompt, *tokens[:1]]
    rows, found = [text], []
    for token in tokens[1:]:
        vocabulary.read(rows)
        found.append(token in vocabulary)
        text.append(token)
    return found
