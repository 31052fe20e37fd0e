"""Prompt lookup: matches by hand and against a scan, going back, batches, and output distributed as the target's."""

import random

import conformance
import pytest
import tiny
import torch
from distribution import LIMIT, WARPS, deviation, toy
from rigged import perturbed

from drafters import FeatureOutput, TargetModel, make_drafter
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.methods.papers.cascade import CascadeDrafter
from drafters.methods.prompt_lookup import NgramIndex, PromptLookupDrafter


class PrimedIndex(NgramIndex):
    """Reads another text before its own."""

    def __init__(self, before: list[int]) -> None:
        super().__init__(1, 3)
        self.before = before

    def read(self, tokens: list[int]) -> None:
        super().read(self.before + tokens)

    def forget(self, kept: int) -> None:
        super().forget(len(self.before) + kept)


class Primed(PromptLookupDrafter):
    """Has read the answer, with every seventh token wrong: accepted in part."""

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        prompts = [row[:length] for row, length in zip(state.tokens, state.prompt_lengths, strict=True)]
        answers = [conformance.plain_greedy(self.target, ids, 40) for ids in prompts]
        for answer in answers:
            answer[6::7] = [(token + 1) % tiny.VOCAB_SIZE for token in answer[6::7]]
        self._rows = [PrimedIndex(ids[-1:] + answer) for ids, answer in zip(prompts, answers, strict=True)]


def in_cascade(target: TargetModel, kind: type[PromptLookupDrafter] = Primed) -> CascadeDrafter:
    draft_model = perturbed(target, 0.05)
    return CascadeDrafter.from_options(
        target, draft_model=draft_model, inner=kind.from_options(draft_model, gamma=3), gamma=4
    )


TestPromptLookup = conformance.brief(lambda t: make_drafter("prompt_lookup", t, gamma=3), longest_draft=3)
TestPrimed = conformance.suite(lambda t: Primed.from_options(t, gamma=5), accepts="some", longest_draft=5)
TestInCascade = conformance.brief(in_cascade, accepts="some", families=("llama",), longest_draft=7)


def continuation(tokens: list[int], longest: int, sizes: tuple[int, int] = (1, 3), eos: int = -1) -> list[int]:
    index = NgramIndex(*sizes)
    index.read(tokens)
    return index.continuation(longest, frozenset([eos]))


def test_matches_by_hand() -> None:
    """Catches a short match preferred to a longer one, an old one to a newer, and an end that matches itself."""
    # 3 followed by 9 is newer, but 1 2 3 was followed by 4 5.
    assert continuation([1, 2, 3, 4, 5, 3, 9, 1, 2, 3], 3) == [4, 5, 3]
    assert continuation([1, 2, 3, 4, 5, 3, 9, 1, 2, 3], 3, sizes=(1, 1)) == [9, 1, 2]
    assert continuation([7, 3, 4, 8, 3, 5, 9, 3], 2) == [5, 9]
    assert continuation([1, 2, 3], 4) == [] and continuation([1], 4) == []
    assert continuation([5, 3, 7, 3], 4, sizes=(2, 3)) == []
    assert continuation([3, 4, 3], 0) == []


def test_copies_run_into_themselves() -> None:
    """Catches drafts of a text in a loop cut at the text's end: one token instead of gamma."""
    assert continuation([9, 4, 4, 4, 4], 5) == [4] * 5
    assert continuation([9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize(
    ("shortest", "longest", "least"), [(2, 3, 500), (2, 4, 500), (1, 8, 500), (4, 4, 100), (5, 7, 40)]
)
def test_index_equals_a_scan(shortest: int, longest: int, least: int) -> None:
    """Catches an index that lags behind the text, forgets the wrong occurrence when tokens are taken back, or takes
    another match for the longest, whose places are not all listed."""

    def scan(tokens: list[int], most: int) -> list[int]:
        for n in range(longest, shortest - 1, -1):
            for end in range(len(tokens) - 1, n - 1, -1):
                if len(tokens) >= n and tokens[end - n : end] == tokens[-n:]:
                    copied = list(tokens)
                    for at in range(most):
                        copied.append(copied[end + at])
                    return copied[len(tokens) :]
        return []

    dice = random.Random(0)
    found = 0
    for _ in range(30):
        index, tokens = NgramIndex(shortest, longest), [0]
        for _ in range(40):
            if dice.random() < 0.3:
                kept = dice.randrange(len(tokens) + 1)
                index.forget(kept)
                tokens = tokens[:kept]
            tokens = tokens + [dice.randrange(3) for _ in range(dice.randrange(1, 6))]
            index.read(tokens)
            expected = scan(tokens, 5)
            assert index.continuation(5, frozenset()) == expected
            found += bool(expected)
    assert found > least


def test_rows_of_different_length() -> None:
    """Catches padding handed over as drafted tokens, and drafts for rows that are finished or have no room."""
    target, tokens = toy(), [[2, 3, 4, 2], [3, 4, 2], [4, 3, 4], [2, 3, 2], [3, 2, 4, 3]]
    state = DecodeState(target, tokens, 8, 4, Sampling(), torch.Generator(), frozenset())
    state.prompt_lengths, state.finished = [3, 2, 2, 2, 1], [False, False, False, True, False]
    drafter = PromptLookupDrafter.from_options(target, gamma=3)
    drafter.begin(state, FeatureOutput(torch.zeros(5, 0)))
    draft = drafter.propose(state)
    assert draft.valid is not None and draft.is_chain
    drafts = [row[valid].tolist() for row, valid in zip(draft.tokens, draft.valid, strict=True)]
    assert drafts == [[3, 4], [], [3, 4], [], []]


@pytest.mark.parametrize("warp", [0, 1])
def test_output_is_distributed_as_the_targets(warp: int) -> None:
    """Catches n-grams accepted as if they had been sampled, or kept in the distribution after they were rejected."""
    assert deviation(PromptLookupDrafter.from_options(toy(), gamma=3), WARPS[warp]) < LIMIT
