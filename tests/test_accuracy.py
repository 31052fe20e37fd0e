"""Answers are judged as their benchmarks judge them."""

from typing import Any

import pytest

from eval.figures.accuracy import accuracy, last_number, same_number
from eval.prompts.prompt_files import Record
from eval.prompts.prompts import Prompt


def prompt(suite: str, metric: str, turn: int = 1, category: str | None = None, **fields: Any) -> Prompt:
    return Prompt(
        "p", category, [3], record=Record("p", category, [], fields=fields, suite=suite, metric=metric), turn=turn
    )


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("She makes 9 * 2 = $18.", True),
        ("so 1,018 - 1,000 is 18.00 dollars", True),
        ("The answer is 18 and not 17", False),
        ("18, but -18 are gone", False),
        ("I do not know.", False),
        ("It is $-18", False),
    ],
)
def test_the_last_number_decides(answer: str, right: bool) -> None:
    """Catches a thousands separator, a full stop or a currency that makes a right answer wrong, and a lost sign."""
    assert same_number(answer, "9 * 2 = <<9*2=18>>18\n#### 18") is right
    assert last_number("no digits") is None and last_number("$1,234.50.") == last_number("1234.5")


def test_words_are_scored_by_the_libraries() -> None:
    """Catches references and answers in each other's places, two suites in one figure, and a later turn judged by the
    first one's reference; ROUGE-1 by hand: 2 of 3 words found, 2 of 4 right, F1 4/7."""
    prompts = [
        prompt("cnn-dm", "rouge", highlights="the cat sat"),
        prompt("wmt16-de-en", "bleu", translation={"de": "", "en": "It rains today in the whole country."}),
        prompt("cnn-dm", "rouge", turn=2, highlights="nothing of this"),
    ]
    answers = ["a cat sat down", "It rains today in the whole country.", "else"]
    found = accuracy(prompts, answers, [False] * 3)
    assert found["cnn-dm"]["value"] == pytest.approx(100 * 4 / 7) and found["cnn-dm"]["answers"] == 1
    assert found["wmt16-de-en"]["value"] == pytest.approx(100)
    assert found["cnn-dm"]["metric"] == "ROUGE-1"
