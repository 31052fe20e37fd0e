"""Suffix decoding: the automaton against a scan, trees by hand and against every place, what is remembered."""

import random
from types import SimpleNamespace
from typing import Any

import conformance
import pytest
import tiny
from conformance import NO_EOS, prompt, target_of
from distribution import LIMIT, WARPS, deviation, toy

from drafters import FeatureOutput, generate, make_drafter
from drafters.drafting.retrieval import BETWEEN, Copy
from drafters.drafting.suffix_automaton import SuffixAutomaton
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT
from drafters.methods.suffix import SuffixDrafter


class Primed(SuffixDrafter):
    """Remembers the answer, with every seventh token wrong: accepted in part."""

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self._past = read([])
        for text, length in zip(state.tokens, state.prompt_lengths, strict=True):
            answer = conformance.plain_greedy(self.target, text[:length], 40)
            answer[6::7] = [(token + 1) % tiny.VOCAB_SIZE for token in answer[6::7]]
            for token in (text[length - 1], *answer, BETWEEN):
                self._past.read(token)


TestSuffix = conformance.brief(lambda t: make_drafter("suffix", t, nodes=6), remembers=True, families=("llama",))
TestPrimed = conformance.suite(
    lambda t: Primed.from_options(t, alpha=4.0, nodes=5), accepts="some", longest_draft=5, remembers=True
)
TestWithoutMemory = conformance.brief(lambda t: make_drafter("suffix", t, memory=0, nodes=6), families=("llama",))


def read(tokens: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.read(token)
    return automaton


def places(text: list[int], part: list[int]) -> list[int]:
    """Where it ends."""
    return [end for end in range(len(part), len(text) + 1) if text[end - len(part) : end] == part]


def test_the_automaton_knows_every_part() -> None:
    """Catches counts lost where a state is split, a last place that is not the last, and an end that matches itself."""
    dice = random.Random(0)
    for _ in range(60):
        text = [dice.randrange(3) for _ in range(dice.randrange(1, 30))]
        automaton = read(text)
        for start in range(len(text)):
            state = 0
            for end in range(start + 1, len(text) + 1):
                state = automaton.follow[state][text[end - 1]]
                ends = places(text, text[start:end])
                assert (automaton.count[state], automaton.seen[state]) == (len(ends), ends[-1])
        before = [n for n in range(len(text)) if len(places(text, text[len(text) - n :])) > 1 or n == 0]
        assert automaton.end()[1] == max(before)
        assert len(automaton.follow) <= 2 * len(text) + 1
        other, at = [dice.randrange(4) for _ in range(30)], (0, 0)
        for end, token in enumerate(other, start=1):
            at = automaton.step(*at, token)
            assert at[1] == max(n for n in range(end + 1) if n == 0 or places(text, other[end - n : end]))


def state_of(tokens: list[int], eos: int = -9, room: int = 99) -> Any:
    return SimpleNamespace(tokens=[tokens], prompt_lengths=[1], eos=frozenset([eos]), room=lambda row: room)


def found(tokens: list[int], past: list[int] | None = None, eos: int = -9, room: int = 99, **options: Any) -> Copy:
    drafter = SuffixDrafter.from_options(toy(), **options)
    state = state_of(tokens, eos, room)
    drafter._answers, drafter._past = list(past or []), read(past or [])
    drafter.begin(state, FeatureOutput(None))  # type: ignore[arg-type]
    return drafter.retrieve(state)


def test_trees_by_hand() -> None:
    """Catches frequency taken for recency, chances that are not multiplied, a tree of another size than the match's."""
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 6, 7, 9, 1, 2]
    # After 9 1 2 (twice before): 3 5 and 6 7, one place each; the last place first. After 1 2: 3 twice, 6 once.
    after = found(text, alpha=1.0)
    assert after == Copy([6, 7, 9], [-1, 0, 1], [1 / 3, 0.5, 0.5], 3)
    assert found(text[:2] + text[5:], alpha=1.0, nodes=2)[:2] == ([6, 7], [-1, 0])
    assert found([2, 3, 4, 2, 3, 5, 2, 6, 2], alpha=3.0)[:2] == ([3, 6, 2], [-1, -1, 1])
    assert found([2, 3, 2, 3, 2, 6, 2], alpha=1.0) == Copy([3], [-1], [0.5], 1)
    assert found([7, 8, 9, 5, 7, 8, 9], alpha=2.0).tokens == [5, 7, 8, 9, 5, 7]
    assert found([7, 8, 9, 5, 7, 8, 9], alpha=2.0, nodes=4).tokens == [5, 7, 8, 9]
    assert found([1, 2, 3]).tokens == found([4]).tokens == found([5, 5], alpha=0.5).tokens == []


def test_the_ends_of_a_draft() -> None:
    """Catches nodes behind EOS, beyond the room, below the least chance, and drafts of a loop cut at the text's end."""
    assert found([3, 4, 5, 6, 3, 4], eos=5, alpha=4.0).tokens == [5]
    assert found([3, 4, 5, 6, 3, 4], room=3, alpha=4.0).tokens == [5, 6]
    assert found([3, 4, 5, 6, 3, 4], room=1, alpha=4.0).tokens == []
    assert found([9, 4, 4, 4, 4], alpha=1.5).tokens == [4] * 4
    assert found([9, 1, 2, 1, 2], alpha=2.5).tokens == [1, 2, 1, 2, 1]
    many = [2, 3, 9, 2, 4, 9, 2, 5, 8, 2, 6, 7, 2, 6, 1, 2]  # after 2 comes 6 twice, and once each of the others
    assert found(many, alpha=9.0, chance=0.3).tokens == [6]
    assert {3, 4, 5, 6, 7, 1} <= set(found(many, alpha=40.0, chance=0.15, nodes=40).tokens)


def test_past_answers() -> None:
    """Catches answers that are not found again or run into one another, and a worse match preferred for its place."""
    past = [5, 6, 7, 8, BETWEEN, 5, 6, 7, 9, BETWEEN]
    assert found([1, 5, 6, 7], past, alpha=9.0) == Copy([9, 8], [-1, -1], [1 / 3, 1 / 3], 3)
    assert found([1, 8], past, alpha=9.0).tokens == []
    # In the text 6 was followed by 1, for a match of one; in past answers 5 6 by 7 and more, for one of two.
    assert found([6, 1, 5, 6], past, alpha=1.0).match == 2
    assert found([6, 1, 5, 6], None, alpha=1.0) == Copy([1], [ROOT], [0.5], 1)


def test_what_is_remembered() -> None:
    """Catches memory that grows without bound or is lost, prompts taken for answers, and a memory of 0 that is some."""
    target, drafter = target_of("llama"), make_drafter("suffix", target_of("llama"), memory=70)
    assert isinstance(drafter, SuffixDrafter)
    for seed in range(6):
        result = generate(target, drafter, [prompt(9, seed)], max_new_tokens=20, eos_token_id=NO_EOS)
        assert drafter._past.size == len(drafter._answers) <= 70
    answer = result.tokens[0].tolist()
    again = generate(target, drafter, [prompt(9, 5)], max_new_tokens=20, eos_token_id=NO_EOS)
    assert again.tokens[0].tolist() == answer and drafter._answers[-21:] == [*answer, BETWEEN]
    assert len(again.trace.steps) < 0.6 * len(result.trace.steps)
    forgetful = make_drafter("suffix", target, memory=0)
    runs = [generate(target, forgetful, [prompt(9)], max_new_tokens=20, eos_token_id=NO_EOS) for _ in range(2)]
    assert runs[0].trace.steps == runs[1].trace.steps and not forgetful.remembers


@pytest.mark.parametrize("memory", [10, 99])
def test_a_joined_row_leaves_an_answer_to_the_others(memory: int) -> None:
    """Catches answers of ended rows that are not remembered, and states of past answers from before these grew or
    were forgotten: a match that is lost, or one that does not exist."""
    drafter = SuffixDrafter.from_options(toy(), alpha=4.0, memory=memory)
    drafter._answers, drafter._past = [7, 7, 5, 6, 8, BETWEEN], read([7, 7, 5, 6, 8, BETWEEN])
    state = state_of([1, 2, 3])
    state.tokens, state.prompt_lengths = [[1, 5, 6, 4, 3], [9, 2, 5, 6]], [1, 4]
    drafter.begin(state, FeatureOutput(None))  # type: ignore[arg-type]
    assert drafter.retrieve(state, 1).tokens == [8]
    state.tokens[0], state.prompt_lengths[0] = [6, 4], 2
    drafter.join(state, [0], state, FeatureOutput(None))  # type: ignore[arg-type]
    again = drafter.retrieve(state, 1)
    assert again.match == 2 and sorted(again.tokens) == ([3, 4, 8] if memory == 99 else [3, 4])
    assert drafter.retrieve(state, 0).tokens == [3]
    state.tokens[1].append(4)
    assert drafter.retrieve(state, 1) == Copy([3], [ROOT], [0.5], 3)


@pytest.mark.parametrize("memory", [0, 40])
def test_output_is_distributed_as_the_targets(memory: int) -> None:
    """Catches siblings that are copied and not removed from p when they are rejected."""
    drafter = SuffixDrafter.from_options(toy(), alpha=3.0, nodes=8, memory=memory)
    assert deviation(drafter, WARPS[memory == 0], tokens=2_000) < LIMIT
