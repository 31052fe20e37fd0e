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
from eval.prompts.prompts import Prompt
from eval.report.rows import Key, outputs_by_prompt, outputs_of, rounds_by_key


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
    by_key = {
        key: rounds for key, rounds in rounds_by_key(runs, len(prompts)).items() if _judged(key, rounds, described)
    }
    typical = {key: outputs_of([typical_run(of_prompt) for of_prompt in rounds]) for key, rounds in by_key.items()}
    ids = [prompt.ids for prompt in prompts]
    perplexity = OutputPerplexity(target, ids, chain(*typical.values()))
    smallest = min(run.batch for run in runs)
    greedy = [outputs_of([*chain(*rounds)]) for (temperature, *_), rounds in by_key.items() if temperature == 0]
    partings: divergence.Partings | None = None
    found = []
    for (temperature, batch, label), rounds in by_key.items():
        outputs = typical[temperature, batch, label]
        figures = perplexity.describe(outputs)
        if marks := accuracy(outputs):
            figures["accuracy"] = marks
        if temperature == 0:
            plain = typical[temperature, smallest, baseline_label]  # a batch may not change what a prompt comes to
            if partings is None:
                said = ((run.prompt, run.tokens) for run in chain(*greedy))
                partings = divergence.Partings(target, ids, [run.tokens for run in plain], said)
            figures |= _exactness(rounds, plain, prompts, target, partings)
        else:
            figures["exact_match"] = None
        found.append({"drafter": label, "temperature": temperature, "batch": batch, "figures": figures})
    return found


def _judged(key: Key, rounds: list[list[Run]], described: dict[str, dict[str, Any]]) -> bool:
    """Those that failed, and those without a row, are not."""
    return key[2] in described and all(run.failure is None for run in chain(*rounds))


def _exactness(
    rounds: list[list[Run]], plain: list[Run], prompts: list[Prompt], target: TargetModel, partings: divergence.Partings
) -> dict[str, Any]:
    rounds = outputs_by_prompt(rounds)
    row: dict[str, Any] = {"exact_match": divergence.exact_share(rounds, plain)}
    ids, names = [prompt.ids for prompt in prompts], [prompt.id for prompt in prompts]
    try:
        found = divergence.find_divergences(target, ids, names, rounds, plain, partings)
    except Exception as error:  # out of memory, say: what was measured is worth more than an explanation
        return row | {"divergences": divergence.unavailable(rounds, plain, error)}
    return row | {"divergences": divergence.summary(found, len(prompts))}
