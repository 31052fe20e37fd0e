"""How a worker and eval.engines talk: a line of JSON each way, on stdin and stdout.

First comes the job (the options of the row, the model, the limits), answered by what the engine is, or by an error.
Then prompts, one at a time, each answered by its tokens and times. The first is a short one that no figure counts: an
engine that crashes at its first token is to do so before anything is measured.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """An engine with its model loaded.

    Attributes:
        facts: ``engine``, ``version``, and whatever else a report should tell of it.
    """

    facts: dict[str, Any]

    def decode(self, ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """One prompt, alone.

        Returns:
            ``tokens``: the new ones, up to and with the first EOS. ``prefill_seconds``: until the first of them were
            there. ``decode_seconds``: from there on. ``commits``: how many each step gave, the prefill's first; None
            where the engine does not tell. ``drafted``, ``accepted``: of each verification, in order, before EOS or the
            limit cut it; None where the engine does not tell.
        """
        ...


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Answer until stdin ends. What the engine itself prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        engine = load(json.loads(sys.stdin.readline()))
        answer(engine.facts)
        for line in sys.stdin:
            answer(engine.decode(**json.loads(line)))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
