"""What there is to start from without dialogues: questions that the target asks itself, by a sample of them."""

import time
from collections.abc import Iterator
from itertools import islice

from data_prep.answers.target import turn_ends
from data_prep.dialogues.reader import DroppedError
from data_prep.magpie import MagpieConfig
from data_prep.magpie_run import Asked, draw
from data_prep.ranks import Rank
from drafters import TargetModel, generate_many, make_drafter
from drafters.config import validate

from .configs import magpie
from .facts import Data, Machine, Model, Rates, alike

QUESTIONS = 32  # of the sample: kept ones; it is over after three times as many drawn ones


class Sample:
    """Asks and answers a few questions, as ``measure`` wants its prompts; afterwards it knows how long each takes.

    Attributes (once it was called):
        asking: seconds of a question that is kept. question, answer: tokens of a prompt and of its answer, on average.
    """

    def __init__(self, model: Model, machine: Machine) -> None:
        self.model, self.machine = model, machine
        self.asking = self.question = self.answer = 0.0

    def __call__(self, target: TargetModel, rows: int) -> list[list[int]]:
        """``rows`` prompts of one length.

        Raises:
            ValueError: the target asks nothing that could be answered.
        """
        prompts = self._ask(target, rows)
        self.question = sum(map(len, prompts)) / len(prompts)
        self.answer = self._answer(target, prompts, rows)
        return alike(self.model, prompts, rows)

    def _ask(self, target: TargetModel, rows: int) -> list[list[int]]:
        chat, name = self.model.chat, self.model.name
        values, _ = magpie(self.model, self.machine, min(rows, QUESTIONS // 2), "-", QUESTIONS, None)
        config = validate(MagpieConfig, values, "the sample")
        try:
            prompt, mark = chat.question_prompt()
        except DroppedError as error:
            raise ValueError(f"target {name} cannot be let ask: {error}; give --data") from error
        asked = Asked(chat, mark, Rank(), QUESTIONS, [])
        asked.open(target)
        began, questions, dropped = time.perf_counter(), list[str](), set[str]()
        for ids in islice(draw(config, target, make_drafter("autoregressive", target), prompt, asked), 3 * QUESTIONS):
            turn = asked.take(ids)
            questions += [turn.answer] if turn.answer is not None else []
            dropped |= {turn.drop} if turn.drop is not None else set()
            if asked.done:
                break
        if len(questions) < QUESTIONS // 4:
            raise ValueError(
                f"of {asked.drawn} questions that {name} was let ask itself {len(questions)} can be used (the others: "
                f"{', '.join(sorted(dropped))}): it was not tuned on questions; give --data"
            )
        self.asking = (time.perf_counter() - began) / len(questions) / max(1, self.machine.gpus)
        return [chat.prompt([{"role": "user", "content": question}])[0] for question in questions]

    def _answer(self, target: TargetModel, prompts: list[list[int]], rows: int) -> float:
        def waiting() -> Iterator[tuple[int, list[int]]]:
            yield from enumerate(prompts)

        left = waiting()
        made = generate_many(
            target,
            make_drafter("autoregressive", target),
            lambda: next(left, None),
            batch=rows,
            longest=max(map(len, prompts)),
            max_new_tokens=self.model.answer,
            eos_token_id=sorted(turn_ends(target, self.model.chat)),
        )
        return sum(len(one.tokens) for one in made) / len(prompts)

    def data(self, source: str, minutes: float, rates: Rates) -> Data:
        """As many dialogues as could be asked and answered in that time, the questions to be written to ``source``."""
        count = max(1, int(60 * minutes / (self.asking + self.answer / rates.many)))
        lengths = f"{self.question:.0f} and {self.answer:.0f} tokens"
        read = f"no --data: the target asks itself; {QUESTIONS} questions and their answers have {lengths} on average"
        tokens, answers = round(count * (self.question + self.answer)), max(1, round(count * self.answer))
        return Data(source, count, count, tokens, answers, False, read, 0.0, self.asking)
