"""Ouroboros: the phrase pool and window by hand, the draft model's exactness, what is learnt, and losslessness."""

import conformance
import pytest
import torch
from distribution import LIMIT, WARPS, deviation, toy
from rigged import perturbed

from drafters import Sampling, TargetModel, generate
from drafters.drafting.phrase_pool import PhrasePool
from drafters.drafting.trie import Trie
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.papers.ouroboros import OuroborosDrafter

SMALL = {"gamma": 3, "window": 3, "beta": 3, "k": 2, "guesses": 2}


def itself(target: TargetModel, **options: object) -> OuroborosDrafter:
    """The target as its own draft model: every drafted token is accepted, so phrases are what is put to the test."""
    return OuroborosDrafter.from_options(target, draft_model=target, **(SMALL | options))  # type: ignore[arg-type]


def near(target: TargetModel, **options: object) -> OuroborosDrafter:
    """A draft model that is sometimes right."""
    return OuroborosDrafter.from_options(target, draft_model=perturbed(target, 0.05), **(SMALL | options))  # type: ignore[arg-type]


class Counting(OuroborosDrafter):
    """Notes how many tokens each forward of the draft model gave: more than one where a phrase was matched."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.gains: list[int] = []

    def _advance(self, *args: object) -> list[int]:
        new = super()._advance(*args)  # type: ignore[arg-type]
        self.gains.append(len(new))
        return new


class Poisoned(Counting):
    """Its pool begins full of wrong phrases, and of right ones, which the text to come will bear out."""

    def begin(self, state: DecodeState, output: object) -> None:
        super().begin(state, output)  # type: ignore[arg-type]
        prompt = state.tokens[0][: state.prompt_lengths[0]]
        future = prompt + conformance.plain_greedy(self.target, prompt, 24)
        for at in range(len(future) - 1):
            self.pool.add(future[at], [(token + 1) % 90 for token in future[at + 1 : at + self.beta]])
            self.pool.add(future[at], future[at + 1 : at + self.beta])


def poisoned(target: TargetModel) -> OuroborosDrafter:
    return Poisoned.from_options(target, draft_model=perturbed(target, 0.05), gamma=3, window=2, beta=4, k=2, guesses=2)


TestItself = conformance.brief(itself, families=("llama", "qwen3"), longest_draft=7, remembers=True)
TestItselfChain = conformance.brief(
    lambda target: itself(target, lengthen=False, from_history=False),
    accepts="all",
    families=("llama",),
    longest_draft=5,
)
TestPoisoned = conformance.suite(poisoned, accepts="some", longest_draft=9, remembers=True)


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 4, 2), (5, 2, 5), (7, 3, 4), (1, 16, 4)])
def test_every_shape_is_exact(shape: tuple[int, int, int]) -> None:
    """Catches window and phrase sizes whose masks, scratch rows or buffers were only right for the default ones, among
    them a window much wider than a draft, for which the draft model's cache needs room of its own."""
    target = conformance.target_of("llama")
    gamma, window, beta = shape
    drafter = near(target, gamma=gamma, window=window, beta=beta)
    ids = conformance.prompt(5)
    for limit in range(1, gamma + beta + 3):
        tokens = generate(target, drafter, [ids], max_new_tokens=limit, eos_token_id=[]).tokens[0].tolist()
        assert tokens == conformance.plain_greedy(target, ids, limit)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_accelerated_drafts_are_the_draft_models_own(family: str) -> None:
    """Catches scratch rows seen by committed ones, or accepted phrase rows at the wrong slot, in the draft model."""
    target = conformance.target_of(family)
    draft_model = perturbed(target, 0.05)
    drafter = Poisoned.from_options(target, draft_model=draft_model, gamma=4, window=3, beta=4, k=2, guesses=2)
    drafts: list[tuple[list[int], list[int]]] = []
    propose = drafter.propose

    def record(state: DecodeState) -> DraftTree:
        tree = propose(state)
        drafts.append((list(state.tokens[0]), list(drafter._drafted)))
        return tree

    drafter.propose = record  # type: ignore[method-assign]
    generate(target, drafter, [conformance.prompt(9)], max_new_tokens=30, eos_token_id=[])
    for before, drafted in drafts:
        assert drafted == conformance.plain_greedy(draft_model, before, len(drafted))
    assert max(drafter.gains) > 2  # phrases were matched


# Sampling.


@pytest.mark.parametrize("warp", [0, 1])
def test_output_is_distributed_as_the_targets(warp: int) -> None:
    """Catches phrases accepted as if sampled from q, and samples that a matched phrase biases."""
    drafter = Counting.from_options(toy(), draft_model=perturbed(toy(), 0.5), gamma=2, window=2, beta=3, k=2, guesses=2)
    assert deviation(drafter, WARPS[warp]) < LIMIT
    assert sum(gain > 1 for gain in drafter.gains) > len(drafter.gains) / 10


# The pool, the trie and the window, by hand.


def test_pool_keeps_the_most_recent() -> None:
    """Catches a pool that returns the oldest phrases first, or drops the one just used."""
    pool = PhrasePool(tail=2, per_token=2)
    pool.add(1, [2, 3])
    pool.add(1, [4, 5, 6])  # cut to two tokens
    assert pool.get(1, 5) == [(4, 5), (2, 3)]
    pool.add(1, [2, 3])  # used again
    pool.add(1, [7, 8])
    assert pool.get(1, 5) == [(7, 8), (2, 3)] and pool.get(1, 1) == [(7, 8)]
    assert pool.get(2, 5) == [] and len(pool) == 2
    pool.add(2, [])
    assert len(pool) == 2 and list(pool.items()) == [(1, (2, 3)), (1, (7, 8))]
    pool.add(4, [5, 6], eos=frozenset([5]))  # EOS ends a phrase
    pool.add(5, [6, 7], eos=frozenset([5]))  # and begins none
    assert pool.get(4, 5) == [(5,)] and pool.get(5, 5) == []


def test_pool_merges_prefixes_and_is_bounded() -> None:
    """Catches slots wasted on a phrase that another one contains, a total that grows for ever, and miscounting."""
    pool = PhrasePool(tail=3, per_token=3, capacity=3)
    pool.add(1, [2])
    pool.add(1, [2, 3])
    pool.add(1, [2])
    assert pool.get(1, 5) == [(2, 3)] and len(pool) == 1
    pool.replace(1, (2, 3), (2, 9))
    assert pool.get(1, 5) == [(2, 9)] and len(pool) == 1
    pool.replace(1, (5, 5), (6, 6))  # nothing to overwrite any more: only added
    pool.add(2, [1])
    pool.add(1, [2, 9])
    assert len(pool) == 3
    pool.add(3, [1])  # full: token 2 was used longest ago
    assert len(pool) == 3 and pool.get(2, 1) == [] and pool.get(1, 5) == [(2, 9), (6, 6)]
    assert len(pool) == sum(1 for _ in pool.items())


def test_trie_merges_and_stops() -> None:
    """Catches shared prefixes verified twice, and nodes behind an EOS inside a phrase."""
    trie = Trie([(1, 2, 3), (1, 4), (1, 2, 0, 7), (0, 5)], longest=4, stop=frozenset([0]))
    assert trie.tokens == [1, 2, 3, 4, 0, 0] and trie.parents == [-1, 0, 1, 0, 1, -1]
    assert trie.paths == [[0, 1, 2], [0, 3], [0, 1, 4], [5]]
    assert trie.children[(1, 0)] == 4 and (0, 3) not in trie.children
    assert Trie([(1, 2)], longest=0).tokens == [] and Trie([(1, 2)], longest=1).tokens == [1]


# Phrases from verification (section 3.3).


def state_of(target: TargetModel, eos: frozenset[int] = frozenset()) -> DecodeState:
    return DecodeState(target, [[1]], 4, 99, Sampling(), torch.Generator(), eos)


def test_agreements_of_a_rejected_draft() -> None:
    """Catches runs read one position off, runs that span a disagreement, and the rejected token taken along (Figure 4).

    Draft 5 6 7 8 9 10 11, target's word after each prefix 5 3 7 8 4 10 11: 6 is rejected; 7 8 and 10 11 agree.
    """
    drafter = itself(conformance.target_of("llama"))
    drafter._drafted = [5, 6, 7, 8, 9, 10, 11]
    drafter._learn_agreements(1, [5, 3, 7, 8, 4, 10, 11, 60], state_of(drafter.target))
    assert list(drafter.pool.items()) == [(7, (8,)), (10, (11,))]


def test_corrections_of_phrases_not_chosen() -> None:
    """Catches the chosen phrase overwritten, the others left, or corrected from another phrase's rows.

    Draft 4 5; phrases 5 -> (6 7), (6 8), (9 1). Rows: root, 4, 5, then 6, 7, 8, 9, 1. The target says 6 after 5, 8
    after 6, 3 after 9: (6 8) is chosen, (6 7) becomes (6 8) too, and (9 1) becomes (6 3).
    """
    drafter = itself(conformance.target_of("llama"))
    for tail in ((9, 1), (6, 8), (6, 7)):
        drafter.pool.add(5, tail)
    drafter._drafted, drafter._tails = [4, 5], drafter.pool.get(5, 3)
    drafter._trie = Trie(drafter._tails, 9)
    assert drafter._trie.tokens == [6, 7, 8, 9, 1]
    choice = [4, 5, 6, 8, 77, 55, 3, 44]
    drafter._learn_corrections([2, 4], choice, state_of(drafter.target))
    assert drafter.pool.get(5, 9) == [(6, 8), (6, 3)]
