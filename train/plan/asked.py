"""Without dialogues: let the target ask itself a sample of questions, and estimate how many it can ask."""

import time
from itertools import islice

from data_prep.answers.questions import Asked, draw
from data_prep.common.ranks import Rank
from data_prep.configs import MagpieConfig
from data_prep.dialogues.reader import DroppedError
from drafters import TargetModel, make_drafter
from drafters.config import validate
from train.plan.configs import magpie
from train.plan.facts import Data, Machine, Model, Rates

QUESTIONS = 32  # usable questions in the sample, from at most three times as many


class Sample:
    """Lets the target ask a few questions, which are the prompts of ``measure``.

    Attributes (after the call):
        asking: seconds per usable question. question: mean tokens of a prompt.
    """

    def __init__(self, model: Model, machine: Machine) -> None:
        self.model, self.machine = model, machine
        self.asking = self.question = 0.0

    def __call__(self, target: TargetModel, rows: int) -> list[list[int]]:
        """The prompts of the questions; raises ValueError if too few are usable."""
        prompts = self._ask(target, rows)
        self.question = sum(map(len, prompts)) / len(prompts)
        return prompts

    def _ask(self, target: TargetModel, rows: int) -> list[list[int]]:
        chat, name = self.model.chat, self.model.name
        values, _ = magpie(self.model, min(rows, QUESTIONS // 2), "-", QUESTIONS, None)
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

    def data(self, source: str, minutes: float, rates: Rates) -> Data:
        """The dialogues that the target can ask and answer in that time; the questions will be in ``source``."""
        count = max(1, int(60 * minutes / (self.asking + rates.answer / rates.many)))
        lengths = f"{self.question:.0f} and {rates.answer:.0f} tokens"
        read = f"no --data: the target asks itself; {QUESTIONS} questions and their answers have {lengths} on average"
        tokens, answers = round(count * (self.question + rates.answer)), max(1, round(count * rates.answer))
        return Data(source, count, count, tokens, answers, False, read, 0.0, asking=self.asking)
