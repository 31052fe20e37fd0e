"""Many prompts through a batch of one size: a row that has ended is given to the next prompt (continuous batching).

In a batch that stays together, rows that ended early are computed on until the longest ends. Here the loop's steps are
the same, and between two of them the next prompts are prefilled beside the batch and put into the free rows.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from drafters.loop.call import check_call, check_seed, eos_ids
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.step import prefill, start, step
from drafters.loop.trace import Step

if TYPE_CHECKING:
    from drafters.base import Drafter
    from drafters.model.target import TargetModel

Prompt = tuple[Hashable, list[int]]


@dataclass
class Continued:
    """A prompt's new tokens, and the steps that they took."""

    key: Hashable
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@torch.inference_mode()
def generate_many(
    target: "TargetModel",
    drafter: "Drafter",
    next_prompt: Callable[[], Prompt | None],
    *,
    batch: int,
    longest: int,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | list[int] | None = None,
    seed: int = 0,
) -> Iterator[Continued]:
    """Continue prompts as ``generate`` does, ``batch`` of them at a time, and yield each as it ends.

    Args:
        next_prompt: gives a key and a prompt's ids; None: none for now. It is asked whenever rows are free, also after
            answers were yielded, so that an answer may bring the next prompt. With no row at work, None ends it all.
        longest: tokens of the longest prompt that will come.

    Raises:
        ValueError: as ``generate``, or a prompt longer than ``longest``.
        NotImplementedError: the drafter cannot take prompts into a running batch.
    """
    sampling, eos = Sampling(temperature, top_k, top_p), eos_ids(target, eos_token_id)
    rows = Refilled(target, drafter, batch, longest, max_new_tokens, sampling, eos, seed)
    while True:
        rows.fill(next_prompt)
        if not rows.at_work():
            return
        yield from rows.ended()  # whose first token was their last
        if rows.at_work():
            rows.step()
            yield from rows.ended()


class Refilled:
    """The batch: a ``DecodeState`` whose free rows take new prompts.

    Attributes:
        enough: free rows for which a prefill is worth its time. A prefill reads all weights once, as a step does; a
            free row wastes its share of every step.
    """

    def __init__(
        self,
        target: "TargetModel",
        drafter: "Drafter",
        batch: int,
        longest: int,
        max_new_tokens: int,
        sampling: Sampling,
        eos: frozenset[int],
        seed: int,
    ) -> None:
        self.target, self.drafter, self.batch, self.longest = target, drafter, batch, longest
        self.max_new_tokens, self.sampling, self.eos = max_new_tokens, sampling, eos
        self.enough = max(1, batch // 8)
        self.capacity = longest + max_new_tokens + drafter.max_draft + 1
        self.generator = torch.Generator(device=target.device).manual_seed(check_seed(seed))
        self.rule = drafter.rule(sampling)
        self.state: DecodeState | None = None
        self.at: list[Continued | None] = []  # which prompt each row works on

    def at_work(self) -> bool:
        """Whether any row has a prompt."""
        return any(self.at)

    def free(self) -> int:
        """Rows without a prompt."""
        return self.at.count(None) if self.at_work() else self.batch

    def under_way(self) -> int:
        """New tokens of the rows at work."""
        if self.state is None:
            return 0
        made = zip(self.at, self.state.tokens, self.state.prompt_lengths, strict=True)
        return sum(len(tokens) - prompt for one, tokens, prompt in made if one is not None)

    def fill(self, next_prompt: Callable[[], Prompt | None]) -> bool:
        """Give free rows prompts, once they are enough; whether there may be more prompts for now."""
        free = self.free()
        if free < self.enough and self.at_work():
            return True
        given = [prompt for _ in range(free) if (prompt := next_prompt()) is not None]
        if given:
            self.take(given)
        return len(given) == free

    def take(self, prompts: list[Prompt]) -> None:
        """Prefill prompts beside the batch and put them into free rows; if none is at work, make a batch of them."""
        check_call(self.target, self.drafter, [list(prompt) for _, prompt in prompts], self.max_new_tokens)
        if (length := max(len(prompt) for _, prompt in prompts)) > self.longest:
            raise ValueError(f"a prompt of {length} tokens came, and longest is {self.longest}; give the right one")
        if self.state is None or not self.at_work():
            self.state = self._state([list(prompt) for _, prompt in prompts], self.capacity)
            self.at = [Continued(key) for key, _ in prompts]
            start(self.state, self.drafter)
            return
        for alike in alike_in_length(prompts):
            self._join(alike)

    def _join(self, prompts: list[Prompt]) -> None:
        assert self.state is not None
        part = self._state([list(prompt) for _, prompt in prompts], max(len(prompt) for _, prompt in prompts))
        output = prefill(part, self.drafter.taps)
        rows = [row for row, one in enumerate(self.at) if one is None][: len(prompts)]
        for number, row in enumerate(rows):
            self.state.cache.copy_row(row, part.cache, number)
            self.state.give(row, part, number)
            self.at[row] = Continued(prompts[number][0])
        self.drafter.join(self.state, rows, part, output)

    def step(self) -> None:
        """One step of the loop for all rows."""
        assert self.state is not None
        for done in step(self.state, self.drafter, self.rule):
            if (one := self.at[done.row]) is not None:
                one.steps.append(done)

    def ended(self) -> Iterator[Continued]:
        """Those that have ended since; their rows are free."""
        state = self.state
        for row, one in enumerate(self.at):
            if one is not None and state is not None and state.finished[row]:
                one.tokens, self.at[row] = state.tokens[row][state.prompt_lengths[row] :], None
                yield one

    def _state(self, prompts: list[list[int]], capacity: int) -> DecodeState:
        arguments = self.max_new_tokens, self.sampling, self.generator, self.eos
        return DecodeState.of(self.target, prompts, capacity, *arguments)


def alike_in_length(prompts: list[Prompt]) -> list[list[Prompt]]:
    """The prompts in groups, none with much padding: a forward over many rows costs what its rows do."""
    groups: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda one: -len(one[1])):
        if not groups or len(prompt[1]) < 0.75 * len(groups[-1][0][1]):
            groups.append([])
        groups[-1].append(prompt)
    return groups
