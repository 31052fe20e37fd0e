"""What the target says of the outputs: perplexity, and whether rounding explains where greedy ones part.

The journal keeps it, so that a report can be made again without the model.
"""

from collections.abc import Callable
from itertools import chain
from typing import Any

from drafters import TargetModel
from eval.figures import divergence
from eval.figures.metrics import typical_run
from eval.figures.perplexity import OutputPerplexity
from eval.measure.runner import Run
from eval.prompts import Prompt
from eval.report.rows import outputs_by_prompt, outputs_of, rounds_by_key


def judge(
    runs: list[Run],
    described: dict[str, dict[str, Any]],
    baseline_label: str,
    prompts: list[Prompt],
    target: TargetModel,
    accuracy: Callable[[list[Run]], dict[str, Any]] = lambda outputs: {},
) -> list[dict[str, Any]]:
    """By method, temperature and batch size: the ``figures`` that the report's row has besides those of its runs.

    Args:
        described: the methods that have rows. Those that failed have no figures.
        accuracy: of outputs, nothing where no suite judges them.
    """
    by_key = rounds_by_key(runs, len(prompts))
    perplexity = OutputPerplexity(target, [prompt.ids for prompt in prompts])
    smallest = min(run.batch for run in runs)
    found = []
    for (temperature, batch, label), rounds in by_key.items():
        if label not in described or any(run.failure is not None for run in chain(*rounds)):
            continue
        outputs = outputs_of([typical_run(of_prompt) for of_prompt in rounds])
        figures = perplexity.describe(outputs)
        if marks := accuracy(outputs):
            figures["accuracy"] = marks
        if temperature == 0:
            plain = by_key[temperature, smallest, baseline_label]  # a batch may not change what a prompt comes to
            figures |= _exactness(rounds, plain, prompts, target)
        else:
            figures["exact_match"] = None
        found.append({"drafter": label, "temperature": temperature, "batch": batch, "figures": figures})
    return found


def _exactness(
    rounds: list[list[Run]], baseline: list[list[Run]], prompts: list[Prompt], target: TargetModel
) -> dict[str, Any]:
    rounds = outputs_by_prompt(rounds)
    plain = outputs_of([typical_run(of_prompt) for of_prompt in baseline])
    row: dict[str, Any] = {"exact_match": divergence.exact_share(rounds, plain)}
    try:
        found = divergence.find_divergences(target, [p.ids for p in prompts], [p.id for p in prompts], rounds, plain)
    except Exception as error:  # out of memory, say: what was measured is worth more than an explanation
        return row | {"divergences": divergence.unavailable(rounds, plain, error)}
    return row | {"divergences": divergence.summary(found, len(prompts))}
