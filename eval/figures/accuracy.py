"""Accuracy of answers by a suite's metric: the last number, running a program, ROUGE or BLEU."""

import re
from collections.abc import Sequence
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

from eval.measure.programs import passes
from eval.prompts.prompts import Prompt
from eval.prompts.suites import filled, load_suite, suite_name

SHOWN = {"number": "right number", "humaneval": "pass@1", "mbpp": "pass@1", "rouge": "ROUGE-1", "bleu": "BLEU"}
PROGRAMS = ("humaneval", "mbpp")
LIBRARIES = {"rouge": "rouge_score", "bleu": "sacrebleu"}
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\.\d+")
FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.S)


def accuracy(
    prompts: Sequence[Prompt], answers: Sequence[str], cut: Sequence[bool], run_code: bool
) -> dict[str, dict[str, Any]]:
    """Return by suite, or by category, the share of right answers, or ROUGE-1 or BLEU, in percent.

    Args:
        prompts: only first turns of suites with a metric count. answers: their texts.
        cut: whether an answer ended at its limit of new tokens, perhaps too early.
        run_code: whether the user allows running programs.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for place, prompt in enumerate(prompts):
        if prompt.turn == 1 and prompt.record is not None and prompt.record.metric is not None:
            name = prompt.category or suite_name(prompt.record.suite or "")
            places.setdefault((name, prompt.record.metric), []).append(place)
    figures: dict[str, dict[str, Any]] = {}
    for (name, metric), chosen in places.items():
        why = _unavailable(metric, run_code)
        of_these = [(prompts[place], answers[place]) for place in chosen]
        value = None if why else _value(metric, of_these)
        figures[name] = {"metric": SHOWN[metric], "value": value, "answers": len(chosen)}
        figures[name] |= {"cut": sum(cut[n] for n in chosen)} | ({"unavailable": why} if why else {})
    return figures


def _unavailable(metric: str, run_code: bool) -> str | None:
    """Return why there is no figure; None if there is one."""
    if metric in PROGRAMS and not run_code:
        return "the answers are programs; prompts.run_code=true runs them"
    library = LIBRARIES.get(metric)
    if library is not None and find_spec(library) is None:
        return f"it needs `pip install {library.replace('_', '-')}`"
    return None


def _value(metric: str, answered: list[tuple[Prompt, str]]) -> float:
    records, answers = [prompt.record for prompt, _ in answered if prompt.record], [answer for _, answer in answered]
    if metric in PROGRAMS:
        right = [passes(program(metric, one.fields, answer)) for one, answer in zip(records, answers, strict=True)]
        return 100 * sum(right) / len(right)
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


def program(metric: str, fields: dict[str, Any], answer: str) -> str:
    """Return a program that reaches its end if the answer passes its tests.

    Uses the answer's first block of code, else all of it; for HumanEval, the whole function or a continuation of the
    prompt.
    """
    block = FENCE.search(answer)
    code = block.group(1) if block else answer
    if metric == "mbpp":
        return "\n".join([code, fields.get("test_setup_code") or "", *fields["test_list"]])
    name = f"def {fields['entry_point']}"
    before = fields["prompt"].rpartition(name)[0] if name in code else fields["prompt"]  # imports, helpers
    return f"{before}{code}\n{fields['test']}\ncheck({fields['entry_point']})\n"
