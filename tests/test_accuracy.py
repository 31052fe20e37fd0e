"""Answers are judged as their benchmarks judge them, and the programs among them only where the user said so."""

from typing import Any

import pytest

from eval.figures import accuracy as module
from eval.figures.accuracy import accuracy, last_number, program, same_number
from eval.measure.programs import namespaces, passes
from eval.prompts.files import Record
from eval.prompts.prompts import Prompt

FIELDS = {
    "prompt": 'import math\n\n\ndef root(x):\n    """The square root."""\n',
    "entry_point": "root",
    "test": "def check(candidate):\n    assert candidate(4) == 2\n",
}


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


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here it is:\n```python\ndef root(x):\n    return math.sqrt(x)\n```\nIt works.\n```\nroot(4)\n```", True),
        ("    return math.sqrt(x)\n", True),
        ("def root(x):\n    return x ** 0.5", True),
        ("```\ndef root(x):\n    return x\n```", False),
        ("I cannot.", False),
        ("import os; os._exit(0)", False),
        ("    raise SystemExit(0)", False),
    ],
)
def test_a_program_passes_by_its_tests_alone(answer: str, right: bool) -> None:
    """Catches an import of the prompt's left out, a fence run as code, and an early exit with status 0 that counts."""
    assert passes(program("humaneval", FIELDS, answer), seconds=2) is right


@pytest.mark.parametrize(
    "harm",
    [
        "import socket; socket.socket()",
        "import os; os.remove('x')",
        "import subprocess; subprocess.run(['true'])",
        "open('big', 'w').write('x' * (1 << 22))",
        "x = 'x' * (1 << 32)",
        "import time; time.sleep(60)",
        pytest.param(
            "import _socket as s\none = s.socket()\none.bind(('127.0.0.1', 0))\none.listen()\n"
            "s.socket().connect(one.getsockname())",
            marks=pytest.mark.skipif(not namespaces(), reason="no namespaces here"),
        ),
    ],
)
def test_what_a_solution_has_no_use_for_ends_it(harm: str) -> None:
    """Catches a program that reaches the network, deletes, starts others, or takes the machine's memory or time."""
    assert not passes(harm, seconds=1)
    assert passes("import math, re, collections, itertools\nprint('not shown')", seconds=1)


def test_no_program_runs_unless_it_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a model's code run because a suite was named, and 0 where nothing was judged."""

    def never(program: str) -> bool:
        raise AssertionError("it was run")

    given = [prompt("humaneval", "humaneval", **FIELDS)], ["    return x ** 0.5"], [True]
    with monkeypatch.context() as patch:
        patch.setattr(module, "passes", never)
        found = accuracy(*given, run_code=False)["humaneval"]
    assert found["value"] is None and "prompts.run_code=true" in found["unavailable"]
    assert accuracy(*given, run_code=True)["humaneval"] == {"metric": "pass@1", "value": 100.0, "answers": 1, "cut": 1}


def test_words_are_scored_by_the_libraries() -> None:
    """Catches references and answers in each other's places, two suites in one figure, and a later turn judged by the
    first one's reference; ROUGE-1 by hand: 2 of 3 words found, 2 of 4 right, F1 4/7."""
    prompts = [
        prompt("cnn-dm", "rouge", highlights="the cat sat"),
        prompt("wmt16-de-en", "bleu", translation={"de": "", "en": "It rains today in the whole country."}),
        prompt("cnn-dm", "rouge", turn=2, highlights="nothing of this"),
    ]
    answers = ["a cat sat down", "It rains today in the whole country.", "else"]
    found = accuracy(prompts, answers, [False] * 3, run_code=False)
    assert found["cnn-dm"]["value"] == pytest.approx(100 * 4 / 7) and found["cnn-dm"]["answers"] == 1
    assert found["wmt16-de-en"]["value"] == pytest.approx(100)
    assert found["cnn-dm"]["metric"] == "ROUGE-1"
