"""Figures of outputs beyond the runs: perplexity, divergences that rounding explains, coverage of a draft vocabulary.

The journal keeps them, so that a report can be made again without the model.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from drafters import TargetModel
from drafters.model.draft_head import TextTokens
from eval.figures.divergence import exactness
from eval.figures.metrics import typical_run
from eval.figures.scores import Scores
from eval.measure.runs import Run
from eval.prompts.prompts import Prompt
from eval.report.build import Described, outputs_by_prompt, outputs_of, rounds_by_key, succeeded


def judge(
    runs: list[Run],
    described: Described,
    baseline_label: str,
    prompts: list[Prompt],
    target: TargetModel,
    accuracy: Callable[[list[Run]], dict[str, Any]] = lambda outputs: {},
) -> list[dict[str, Any]]:
    """Return the ``figures`` of every method at a temperature and batch size, except for methods that failed.

    Args:
        described: the methods that have rows.
        accuracy: function that judges outputs; returns {} if no suite judges them.
    """
    by_key = {
        key: rounds
        for key, rounds in rounds_by_key(runs, len(prompts)).items()
        if key[2] in described and succeeded(rounds)
    }
    typical = {key: outputs_of([typical_run(of_prompt) for of_prompt in rounds]) for key, rounds in by_key.items()}
    asked = [*typical.values(), *(outputs_of([*chain(*rounds)]) for key, rounds in by_key.items() if key[0] == 0)]
    outputs = ((run.prompt, run.tokens) for run in chain(*asked))
    scores = Scores(target, [prompt.ids for prompt in prompts], outputs)
    smallest = min(run.batch for run in runs)
    rows = []
    for (temperature, batch, label), rounds in by_key.items():
        figures = scores.perplexity(typical[temperature, batch, label])
        if marks := accuracy(typical[temperature, batch, label]):
            figures["accuracy"] = marks
        if temperature == 0:
            plain = typical[temperature, smallest, baseline_label]  # the batch size must not change an output
            figures |= exactness(outputs_by_prompt(rounds), plain, [prompt.id for prompt in prompts], scores)
        else:
            figures["exact_match"] = None
        rows.append({"drafter": label, "temperature": temperature, "batch": batch, "figures": figures})
    return rows


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
        judged: see ``eval.report.judged``. known: each method's vocabulary before any text, by label.
        prompts: the measured prompts.
    """
    for row in judged:
        if (vocabulary := known.get(row["drafter"])) is not None and row["batch"] == 1:
            place = row["drafter"], row["temperature"], row["batch"]
            of_method = [run for run in runs if (run.method, run.temperature, run.batch) == place]
            covered = [
                there for run in of_method for there in _drafted(vocabulary.fresh(), prompts[run.prompt].ids, run)
            ]
            if covered:
                row["figures"] |= {"draft_vocab": len(vocabulary), "draft_vocab_coverage": sum(covered) / len(covered)}


def _drafted(vocabulary: TextTokens, prompt: Sequence[int], run: Run) -> list[bool]:
    """Return for each token except the first whether it could be drafted."""
    covered = list[bool]()
    steps = [step.committed for step in run.trace.steps] if run.trace else [1] * (len(run.tokens) - 1)
    text = [*prompt, *run.tokens[:1]]
    rows, at = [text], 1
    for count in steps:
        vocabulary.read(rows)
        new = run.tokens[at : at + count]
        covered += [token in vocabulary for token in new]
        text += new
        at += count
    return covered
