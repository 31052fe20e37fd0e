"""On-policy text: answers sampled by the draft model replace the dialogues' own (DistillSpec, Zhou et al. 2023: its
mixture of fixed and on-policy data).

A chosen dialogue keeps its text up to its first answer. The sampled rest is at most as long as the replaced text, so
the batches stay the same. The choice and the samples depend only on the seed, the epoch, the dialogues, the ranks and
the weights.
"""

import gc
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from data_prep.store.reader import StoredDialogue
from drafters.loop.call import eos_ids
from drafters.loop.generate import generate
from drafters.methods import make_drafter
from drafters.model.target import TargetModel
from train.configs import OnPolicy
from train.data.online import OnlineFeatures
from train.data.packing import Batch, Position, StepData, TrainData, collate


class OnPolicyText:
    """Samples the answers of the next ``options.every`` steps together, with the current weights.

    Args:
        options: the config's ``on_policy``.
        data: the run's batches, before their features are computed.
        draft_model: makes a draft model of the current weights; a collective.
        step: returns the number of steps so far.
    """

    def __init__(
        self, options: OnPolicy, data: TrainData, draft_model: Callable[[], TargetModel], step: Callable[[], int]
    ) -> None:
        assert isinstance(data.store, OnlineFeatures)
        self.options, self.data, self.store, self.draft_model, self.step = options, data, data.store, draft_model, step
        self._answers: dict[tuple[int, int], list[int]] = {}  # by epoch and dialogue
        self._until = 0  # the first step without answers

    def rewrite(self, position: Position, data: StepData) -> list[Batch]:
        """The batches of the step at ``position``, with the draft model's answers."""
        step, every = self.step(), self.options.every
        if step >= self._until or step % every == 0:  # also after a resume
            self._until = step - step % every + every
            self._answer(self.draft_model(), position, self._until - step)
            gc.collect()  # reference cycles would hold the model's GPU memory
        return [self._rewritten(batch, data.epoch) for batch in data.batches]

    def chosen(self, epoch: int, dialogue: int) -> bool:
        """Whether the dialogue gets another answer in this epoch."""
        draw = torch.rand((), generator=self._generator(epoch, dialogue))
        return bool(draw < self.options.share)

    def _answer(self, model: TargetModel, position: Position, steps: int) -> None:
        """Sample the answers of ``steps`` steps from ``position`` on, prompts of similar lengths together."""
        wanted = []
        for dialogues, epoch, _ in islice(self.data.plan(position), steps):
            for index in (index for share in self.data.shares(dialogues) for index in share):
                prompt = self._prompt(index)
                if 0 < len(prompt) < model.max_context and self.chosen(epoch, index):
                    wanted.append((prompt, epoch, index))
        wanted.sort(key=lambda one: len(one[0]))
        self._answers = {}
        for first in range(0, len(wanted), self.options.batch):
            prompts, epochs, indices = zip(*wanted[first : first + self.options.batch], strict=True)
            rooms = [len(self.store[i].input_ids) - len(prompt) for prompt, i in zip(prompts, indices, strict=True)]
            most = min(max(rooms), self.options.max_new_tokens, model.max_context - max(map(len, prompts)))
            outputs = generate(
                model,
                make_drafter("autoregressive", model),
                list(prompts),
                max_new_tokens=most,
                temperature=self.options.temperature,
                eos_token_id=sorted(eos_ids(self.store.target, None)),
                seed=int(torch.randint(2**62, (2,), generator=self._generator(epochs[0], indices[0]))[1]),
            )
            keys = zip(epochs, indices, strict=True)
            for key, room, row, length in zip(keys, rooms, outputs.tokens, outputs.lengths, strict=True):
                self._answers[key] = row[: min(room, length)].tolist()

    def _rewritten(self, batch: Batch, epoch: int) -> Batch:
        answers = {span.dialogue: self._answers.get((epoch, span.dialogue)) for span in batch.spans}
        if not any(answers.values()):
            return batch
        texts: Any = {index: self._with(index, answer) for index, answer in answers.items()}
        return collate(texts, list(answers), self.data.config.taps)

    def _prompt(self, index: int) -> list[int]:
        """The text up to the first answer; empty where there is no answer."""
        dialogue = self.store[index]
        answers = dialogue.loss_mask.nonzero()
        ids: list[int] = dialogue.input_ids[: int(answers[0]) if len(answers) else 0].tolist()
        return ids

    def _with(self, index: int, answer: list[int] | None) -> StoredDialogue:
        dialogue, prompt = self.store[index], self._prompt(index)
        if not answer:
            return dialogue
        ids = torch.tensor(prompt + answer)
        taps = {layer: states[: len(ids)] for layer, states in dialogue.taps.items()}
        return StoredDialogue(ids, torch.arange(len(ids)) >= len(prompt), dialogue.features[: len(ids)], taps)

    def _generator(self, epoch: int, dialogue: int) -> torch.Generator:
        seed = (self.data.config.seed * 1_000_003 + epoch) * 2_654_435_761 + dialogue
        return torch.Generator().manual_seed(seed % 2**63)
