"""Continuous batching: a prompt put into a running batch goes as it would alone, and no other row notices."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from conformance import NO_EOS, prompt, rows_of, target_of
from rigged import dflash, medusa
from test_batch import METHODS, prompts_of

from drafters import Drafter, TargetModel, generate, generate_many, make_drafter
from drafters.loop.refill import Continued, Prompt
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree

LIMIT = 18


def ask(prompts: list[list[int]]) -> Any:
    """What ``generate_many`` asks for the next prompt: one after the other, with their numbers as keys."""
    waiting = deque(enumerate(prompts))
    return lambda: waiting.popleft() if waiting else None


def continued(
    target: TargetModel, method: str, prompts: list[list[int]], batch: int, **options: Any
) -> list[Continued]:
    """In the order of the prompts."""
    drafter, longest = METHODS[method](target), max(map(len, prompts))
    made = generate_many(target, drafter, ask(prompts), batch=batch, longest=longest, **options)
    return sorted(made, key=lambda one: int(str(one.key)))


def steps_before_the_limit(one: list[Any]) -> list[int]:
    """Drafts accepted in each step, as long as a draft of full depth fits: alone, it is cut at the limit."""
    found, done = [], 1
    for step in one:
        if LIMIT - done > 5:
            found.append(step.accepted)
        done += step.committed
    return found


@pytest.mark.parametrize(
    ("method", "family"), [("autoregressive", "llama"), *((method, "mistral-sliding") for method in METHODS)]
)
def test_prompts_go_as_alone(method: str, family: str) -> None:
    """Catches a joined row that sees what its forerunner left (keys, features, n-grams, a finished flag), one whose
    drafter still has the old row's state (drafts that are not accepted), and neighbours that a join disturbs."""
    target, prompts = target_of(family), [*prompts_of(6), *(prompt(9, index) for index in range(6, 13))]
    plain = make_drafter("autoregressive", target)  # whose tokens are every method's
    free = rows_of(generate(target, plain, prompts, max_new_tokens=LIMIT, eos_token_id=NO_EOS))
    eos = [free[1][4], free[3][9], free[6][0]]  # rows end at different times, one with its first token
    options: dict[str, Any] = {"max_new_tokens": LIMIT, "eos_token_id": eos}
    found = continued(target, method, prompts, 4, **options)
    assert [one.key for one in found] == list(range(13))
    drafter = METHODS[method](target)
    for ids, one in zip(prompts, found, strict=True):
        alone = generate(target, drafter, [ids], **options)
        assert one.tokens == alone.tokens[0, : alone.lengths[0]].tolist()
        assert steps_before_the_limit(one.steps) == steps_before_the_limit(alone.trace.steps)
        assert 1 + sum(step.committed for step in one.steps) == len(one.tokens)
    assert len({len(one.tokens) for one in found}) > 3


def recorded(drafter: Drafter) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """Fills with each draft's tokens, by the row's prompt and how many new tokens it had."""
    found: dict[tuple[tuple[int, ...], int], list[int]] = {}
    propose = drafter.propose

    def recording(state: DecodeState) -> DraftTree:
        draft = propose(state)
        for row, (tokens, start) in enumerate(zip(state.tokens, state.prompt_lengths, strict=True)):
            if not state.finished[row] and LIMIT - (len(tokens) - start) > 8:  # near the limit drafts are shorter
                found[tuple(tokens[:start]), len(tokens) - start] = draft.tokens[row].tolist()
        return draft

    drafter.propose = recording  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    "make",
    [
        METHODS["eagle-random"],
        lambda target: medusa(target, None, "static", nodes=12),
        lambda target: dflash(target, None, "chain", sliding_window=6),
    ],
    ids=["eagle-random", "medusa-random", "windows-random"],
)
def test_drafts_are_those_of_the_row_alone(make: Callable[[TargetModel], Drafter]) -> None:
    """Catches a head that goes on from the features, the cache or the positions of the answer that was there before, or
    from those of padding where prompts of several lengths join together: its drafts are lossless, and wrong."""
    target, prompts = target_of("llama"), [*prompts_of(11), *(prompt(10 - index % 3, index) for index in range(11, 19))]
    longest = max(map(len, prompts))
    plain = make_drafter("autoregressive", target)
    free = rows_of(generate(target, plain, prompts, max_new_tokens=LIMIT, eos_token_id=NO_EOS))
    options: dict[str, Any] = {"max_new_tokens": LIMIT, "eos_token_id": [free[1][4], free[3][9], free[6][2]]}
    drafter = make(target)
    together = recorded(drafter)
    list(generate_many(target, drafter, ask(prompts), batch=4, longest=longest, **options))
    drafter = make(target)
    alone = recorded(drafter)
    for ids in prompts:
        generate(target, drafter, [ids], **options)
    assert len(together) > 25 and together == alone


@pytest.mark.parametrize("method", ["speculative", "eagle-chain", "medusa-static", "prompt_lookup"])
def test_rows_whose_first_token_is_their_last(method: str) -> None:
    """Catches a step without unfinished rows, for which the drafter has not begun, and an answer that goes on behind
    its EOS, is lost, or comes twice. Random prompts of the queue end so, also all at once."""
    target, prompts, rng = target_of("llama"), prompts_of(7), random.Random(0)
    plain = make_drafter("autoregressive", target)
    free = rows_of(generate(target, plain, prompts, max_new_tokens=5, eos_token_id=NO_EOS))
    for _ in range(6):
        at_once = [index for index in range(7) if rng.random() < rng.choice([0.3, 0.7, 1.0])]
        eos = [*{free[index][0] for index in at_once}, free[rng.randrange(7)][rng.randrange(5)]]
        found = continued(target, method, prompts, rng.randint(1, 3), max_new_tokens=5, eos_token_id=eos)
        ends = [next((i + 1 for i, token in enumerate(row) if token in eos), 5) for row in free]
        assert [(one.key, one.tokens) for one in found] == [(i, free[i][:end]) for i, end in enumerate(ends)]
        assert all(bool(one.steps) is (len(one.tokens) > 1) for one in found)


def test_an_answer_may_bring_the_next_prompt() -> None:
    """Catches a generator that asks ahead, or ends while an answer could still bring a turn of its dialogue."""
    target = target_of("llama")
    drafter = make_drafter("autoregressive", target)
    waiting: deque[Prompt] = deque([("a", [5, 6]), ("b", [7])])
    asked = {"a": 0, "b": 0}
    for one in generate_many(
        target, drafter, lambda: waiting.popleft() if waiting else None, batch=2, longest=40, max_new_tokens=5,
        eos_token_id=NO_EOS,
    ):  # fmt: skip
        key = str(one.key)
        asked[key] += 1
        if asked[key] < 3:
            waiting.append((key, [*one.tokens, 9]))
    assert asked == {"a": 3, "b": 3}


def test_bad_calls() -> None:
    """Catches a prompt that does not fit found as an assertion of the cache, and methods of one row run on many."""
    target = target_of("llama")
    plain = make_drafter("autoregressive", target)
    with pytest.raises(ValueError, match=r"longest is 4, found a prompt of 9 tokens"):
        list(generate_many(target, plain, ask([prompt(9, 1)]), batch=2, longest=4))
    with pytest.raises(ValueError, match="decodes at most 1 row"):
        lookahead = make_drafter("lookahead", target)
        list(generate_many(target, lookahead, ask(prompts_of(3)), batch=2, longest=40, max_new_tokens=4))
    with pytest.raises(ValueError, match="seed must fit in 64 bits"):
        list(generate_many(target, plain, ask([prompt(4, 1)]), batch=2, longest=4, seed=1 << 64))
    assert list(generate_many(target, plain, lambda: None, batch=2, longest=4)) == []
