"""Continuous batching: decode many prompts in a batch of fixed size, and give the place of an ended one to the next.

The steps are those of ``generate``. Between two steps, the next prompts are prefilled in a batch of their own and their
cache slots are copied to the free places. ``generate_many`` is the whole; ``Refilled`` are its parts.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from drafters.loop.call import check_call, check_seed, eos_ids
from drafters.loop.generate import Step, prefill, start, step
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState

if TYPE_CHECKING:
    from drafters.base import Drafter
    from drafters.model.target import TargetModel

Prompt = tuple[Hashable, list[int]]


@dataclass
class Continued:
    """A prompt's new tokens, and the steps that produced them."""

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
    """Continue prompts as ``generate`` does, ``batch`` of them at a time, and yield each when it ends.

    Args:
        next_prompt: returns a key and a prompt's ids, or None if no prompt is ready. Called when places are free, also
            after a yielded answer, so that an answer can lead to the next prompt. None while all places are free ends
            the generation.
        batch: number of places.
        longest: tokens of the longest prompt.

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
        yield from rows.ended()  # sequences that ended with the token of the prefill
        if rows.at_work():
            rows.step()
            yield from rows.ended()


@dataclass
class Refilled:
    """A batch whose free places take new prompts.

    Attributes:
        batch, longest, max_new_tokens, seed: arguments of ``generate_many``.
        at: the prompt at each place of the batch; None at a free place.
    """

    target: "TargetModel"
    drafter: "Drafter"
    batch: int
    longest: int
    max_new_tokens: int
    sampling: Sampling
    eos: frozenset[int]
    seed: int
    state: DecodeState | None = None
    at: list[Continued | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Free places that start a prefill. A prefill reads all weights once, as a step does, and a free place wastes
        # its share of every step.
        self.enough = max(1, self.batch // 8)
        self.generator = torch.Generator(device=self.target.device).manual_seed(check_seed(self.seed))
        self.rule = self.drafter.rule(self.sampling)

    def at_work(self) -> bool:
        """True if any place has a prompt."""
        return any(self.at)

    def free(self) -> int:
        """Number of places without a prompt."""
        return self.at.count(None) if self.at_work() else self.batch

    def fill(self, next_prompt: Callable[[], Prompt | None]) -> bool:
        """Give prompts to the free places if there are ``enough``. Returns False if ``next_prompt`` returned None."""
        free = self.free()
        if free < self.enough and self.at_work():
            return True
        prompts = [prompt for _ in range(free) if (prompt := next_prompt()) is not None]
        if prompts:
            self.take(prompts)
        return len(prompts) == free

    def take(self, prompts: list[Prompt]) -> None:
        """Prefill prompts and put them into free places. If all are free, the prompts become the new batch."""
        check_call(self.target, self.drafter, [list(prompt) for _, prompt in prompts], self.max_new_tokens)
        if (length := max(len(prompt) for _, prompt in prompts)) > self.longest:
            raise ValueError(f"longest is {self.longest}, found a prompt of {length} tokens; set longest to its length")
        if self.state is None or not self.at_work():
            capacity = self.longest + self.max_new_tokens + self.drafter.max_draft + 1
            self.state = self._state([list(prompt) for _, prompt in prompts], capacity)
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
            self.state.replace(row, part.tokens[number])
            self.state.prompt_lengths[row], self.state.finished[row] = (
                part.prompt_lengths[number],
                part.finished[number],
            )
            self.at[row] = Continued(prompts[number][0])
        self.drafter.join(self.state, rows, part, output)

    def step(self) -> None:
        """Run one step of the loop for all sequences."""
        assert self.state is not None
        for done in step(self.state, self.drafter, self.rule):
            if (one := self.at[done.row]) is not None:
                one.steps.append(done)

    def ended(self) -> Iterator[Continued]:
        """Yield the prompts that have ended since the last call, and free their places."""
        state = self.state
        for row, one in enumerate(self.at):
            if one is not None and state is not None and state.finished[row]:
                one.tokens, self.at[row] = state.tokens[row][state.prompt_lengths[row] :], None
                yield one

    def _state(self, prompts: list[list[int]], capacity: int) -> DecodeState:
        arguments = self.max_new_tokens, self.sampling, self.generator, self.eos
        state = DecodeState(self.target, prompts, capacity, *arguments)
        state.reach = self.longest + self.max_new_tokens
        return state


def alike_in_length(prompts: list[Prompt]) -> list[list[Prompt]]:
    """Group prompts for prefills with little padding: in a group, none is shorter than 3/4 of the longest."""
    groups: list[list[Prompt]] = []
    for prompt in sorted(prompts, key=lambda one: -len(one[1])):
        if not groups or len(prompt[1]) < 0.75 * len(groups[-1][0][1]):
            groups.append([])
        groups[-1].append(prompt)
    return groups
