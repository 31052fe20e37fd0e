"""The protocol between a worker and eval.engines: one line of JSON each way, on stdin and stdout.

First the job (options of the row, model, limits); the answer is the engine's description, or an error. Then prompts,
one at a time; the answer has tokens and times. The first prompt is short and not counted, so that an engine that
crashes at its first token does so before anything is measured.
"""

from collections.abc import Callable
from typing import Any, Protocol

from data_prep.common.other_python import answering, questions


class Engine(Protocol):
    """An engine with its model loaded.

    Attributes:
        facts: ``engine``, ``version``, and more for the report.
    """

    facts: dict[str, Any]

    def decode(self, ids: list[int], seed: int, temperature: float, max_new_tokens: int) -> dict[str, Any]:
        """Decode one prompt.

        Returns:
            ``tokens``: new tokens, up to and including the first EOS. ``prefill_seconds``: seconds to the first.
            ``decode_seconds``: the rest. ``commits``: tokens of each step, the prefill's first. ``drafted``,
            ``accepted``: of each verification in order, before EOS or the limit cut it. The last three are None if the
            engine does not report them.
        """
        ...


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Answer until stdin ends."""
    with answering() as say:
        asked = questions()
        engine = load(next(asked))
        say(engine.facts)
        for prompt in asked:
            say(engine.decode(**prompt))
