"""Accuracy of answers by a suite's metric: the last number, ROUGE or BLEU."""

import re
from collections.abc import Sequence
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from eval.prompts.prompts import Prompt
from eval.prompts.suites import filled, load_suite, suite_name

SHOWN = {"number": "right number", "rouge": "ROUGE-1", "bleu": "BLEU"}
LIBRARIES = {"rouge": "rouge_score", "bleu": "sacrebleu"}
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def accuracy(prompts: Sequence[Prompt], answers: Sequence[str], cut: Sequence[bool]) -> dict[str, dict[str, Any]]:
    """Return by suite, or by category, the share of right answers, or ROUGE-1 or BLEU, in percent.

    Args:
        prompts: only first turns of suites with a metric count. answers: their texts.
        cut: whether an answer ended at its limit of new tokens, perhaps too early.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for place, prompt in enumerate(prompts):
        if prompt.turn == 1 and prompt.record is not None and prompt.record.metric is not None:
            name = prompt.category or suite_name(prompt.record.suite or "")
            places.setdefault((name, prompt.record.metric), []).append(place)
    figures: dict[str, dict[str, Any]] = {}
    for (name, metric), chosen in places.items():
        why = _unavailable(metric)
        of_these = [(prompts[place], answers[place]) for place in chosen]
        value = None if why else _value(metric, of_these)
        figures[name] = {"metric": SHOWN[metric], "value": value, "answers": len(chosen)}
        figures[name] |= {"cut": sum(cut[n] for n in chosen)} | ({"unavailable": why} if why else {})
    return figures


def _unavailable(metric: str) -> str | None:
    """Return why there is no figure; None if there is one."""
    library = LIBRARIES.get(metric)
    missing = library is not None and find_spec(library) is None
    return f"it needs `pip install {str(library).replace('_', '-')}`" if missing else None


def _value(metric: str, answered: list[tuple[Prompt, str]]) -> float:
    records, answers = [prompt.record for prompt, _ in answered if prompt.record], [answer for _, answer in answered]
    references = [filled(load_suite(one.suite or "").reference or "", one.fields) or "" for one in records]
    if metric == "number":
        return 100 * sum(map(same_number, answers, references)) / len(answers)
    if metric == "rouge":  # the mean F1 of single words, stemmed, as in papers on CNN/DM
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rouge1"], use_stemmer=True)
        scores = [
            scorer.score(right, answer)["rouge1"].fmeasure for right, answer in zip(references, answers, strict=True)
        ]
        return 100 * float(sum(scores)) / len(answers)
    import sacrebleu

    return float(sacrebleu.corpus_bleu([" ".join(answer.split()) for answer in answers], [references]).score)


def same_number(answer: str, reference: str) -> bool:
    """Return whether the last numbers are equal (GSM8K's reference has its number after ####)."""
    number, right = last_number(answer), last_number(reference)
    return number is not None and number == right


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text: ``$1,200.50.`` -> 1200.5; None if there is none."""
    numbers = NUMBER.findall(text)
    return Decimal(re.sub("[,$]", "", numbers[-1])) if numbers else None
