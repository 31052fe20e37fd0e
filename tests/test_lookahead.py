"""Lookahead: a window worked by hand, guesses that are the target's, what the pool takes in, and sampled output."""

import itertools
from typing import Any

import conformance
import pytest
import torch
from conformance import NO_EOS, prompt, target_of
from distribution import LIMIT, WARPS, deviation, toy
from test_conformance_lookahead import Primed

from drafters import FeatureOutput, TargetModel, generate
from drafters.loop.acceptance import Verdict
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.papers.lookahead import LookaheadDrafter


def state_of(target: TargetModel, tokens: list[int], eos: frozenset[int] = frozenset(), new: int = 99) -> DecodeState:
    state = DecodeState(target, [tokens], 4, new, Sampling(), torch.Generator(), eos)
    state.prompt_lengths = [len(tokens) - 1]
    return state


def said(*tokens: int) -> FeatureOutput:
    """A forward whose scratch rows predict ``tokens``."""
    scratch = torch.nn.functional.one_hot(torch.tensor([tokens], dtype=torch.long), 97).float()
    return FeatureOutput(torch.zeros(1, 1, 1), scratch=scratch)


def commit(drafter: LookaheadDrafter, state: DecodeState, rows: list[int], tokens: list[int], *guesses: int) -> None:
    """A step as the loop would have it: accept ``rows``, append ``tokens``, hand over the window's predictions."""
    state.append(0, tokens)
    draft, output = DraftTree.empty(1, drafter.target.device), said(*guesses)
    drafter.while_verifying(state, draft, output)
    drafter.observe(state, draft, output, Verdict([rows], [tokens], [0]))


def test_window_by_hand() -> None:
    """Catches rows of the window misplaced behind the n-grams, predictions read off the wrong rows, and n-grams lost.

    W = 2, N = 3: a window of two levels. The prompt is 50 51 52, the first token 10; nothing is in the pool.
    """
    drafter = LookaheadDrafter.from_options(target_of("llama"), window=2, ngram=3, guesses=2, from_prompt=False)
    state = state_of(drafter.target, [50, 51, 52, 10])
    drafter.begin(state, said())
    # Level 0 are the root 10 and placeholders, one column more than W: the first level gained costs one.
    draft = drafter.propose(state)
    assert draft.tokens.tolist() == [[52, 10]] and draft.extra.scratch == draft.extra.scratch_outputs == 2
    assert draft.parents.tolist() == [[-1, 0]]
    commit(drafter, state, [0], [11], 21, 22)
    assert len(drafter.pool) == 0
    # Root 11 and placeholder 10; above them 21 and 22.
    draft = drafter.propose(state)
    assert draft.tokens.tolist() == [[10, 21, 22]] and (draft.extra.scratch, draft.extra.scratch_outputs) == (3, 2)
    assert draft.parents.tolist() == [[-1, -1, 0]]
    commit(drafter, state, [0], [12], 31, 32)
    # 10 is a placeholder and makes no n-gram.
    assert list(drafter.pool.items()) == [(11, (21, 31))]
    # Root 12 and 22; above them 31 and 32. Once more 11 follows: (21, 31) is verified, in front of the window.
    commit(drafter, state, [0], [11], 41, 42)
    assert list(drafter.pool.items()) == [(11, (21, 31)), (12, (31, 41)), (22, (32, 42))]
    draft = drafter.propose(state)
    assert draft.tokens.tolist() == [[21, 31, 32, 41, 42]]
    assert (draft.extra.scratch, draft.extra.scratch_outputs) == (3, 2)
    assert draft.parents.tolist() == [[-1, 0, -1, -1, 2]]
    assert draft.ancestors()[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],  # 11
        [1, 1, 0, 0, 0, 0],  # 21
        [1, 1, 1, 0, 0, 0],  # 31
        [1, 0, 0, 1, 0, 0],  # 32, level 0: one place behind the root
        [1, 0, 0, 0, 1, 0],  # 41, level 1 above the root
        [1, 0, 0, 1, 0, 1],  # 42, level 1 above 32
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
def test_guesses_are_the_targets(family: str, temperature: float) -> None:
    """Catches window rows at a wrong position or with a wrong mask: output stays right, only acceptance falls."""
    target = target_of(family)
    drafter = Primed.from_options(target, window=3, ngram=4, guesses=2)
    propose, observe, seen = drafter.propose, drafter.observe, []
    before: list[int] = []

    def note(state: DecodeState) -> DraftTree:
        before[:] = state.tokens[0]
        return propose(state)

    def check(state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if draft.extra.scratch:
            assert output.scratch is not None and output.scratch.shape[1] == draft.extra.scratch_outputs
            rows = draft.ancestors()[0, -draft.extra.scratch_outputs :, 1:]
            for sees, logits in zip(rows, output.scratch[0], strict=True):
                text = torch.tensor([before + draft.tokens[0][sees].tolist()])
                assert int(logits.argmax()) == int(target.model(text).logits[0, -1].argmax())
                seen.append(text)
        observe(state, draft, output, verdict)

    drafter.propose, drafter.observe = note, check  # type: ignore[method-assign]
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": NO_EOS, "temperature": temperature}
    traces = [generate(target, drafter, [prompt(9, seed)], seed=seed, **options).trace for seed in range(3)]
    assert len(seen) > 40 and any(step.accepted for trace in traces for step in trace.steps)


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 3, 2), (4, 2, 1), (2, 6, 3)])
def test_every_shape_is_exact(shape: tuple[int, int, int]) -> None:
    """Catches sizes whose buffers or rows were only right for the usual ones; W = 1 with N = 2 has no scratch rows."""
    target = target_of("llama")
    window, ngram, guesses = shape
    drafter = Primed.from_options(target, window=window, ngram=ngram, guesses=guesses)
    ids, propose, sizes = prompt(target.max_context - 30), drafter.propose, [(0, 0)]

    def note(state: DecodeState) -> DraftTree:
        draft = propose(state)
        sizes.append((draft.size, draft.extra.scratch))
        return draft

    drafter.propose = note  # type: ignore[method-assign]
    result = generate(target, drafter, [ids], max_new_tokens=30, eos_token_id=NO_EOS)
    assert result.tokens[0].tolist() == conformance.plain_greedy(target, ids, 30)
    assert result.trace.tau > 1
    assert max(size for size, _ in sizes) <= drafter.max_draft
    assert max(scratch for _, scratch in sizes) == drafter.window.most_tokens


def test_eos_in_phrases() -> None:
    """Catches nodes drafted behind an EOS, and n-grams that begin with one or go on behind it."""
    target, eos = target_of("llama"), frozenset([7])
    drafter = LookaheadDrafter.from_options(target, window=1, ngram=4, guesses=2)
    state = state_of(target, [5, 6, 7, 8, 9, 5], eos)
    drafter.begin(state, said())
    assert list(drafter.pool.items()) == [(5, (6, 7)), (6, (7,))]
    assert drafter.propose(state).tokens[0, :2].tolist() == [6, 7]
    drafter.pool.add(5, (7, 1, 2))  # from a file, or another EOS
    assert drafter.propose(state).tokens[0, :3].tolist() == [7, 6, 7]


def test_what_the_pool_takes_in() -> None:
    """Catches switches without effect: the text's own n-grams, and phrases that outlive a prompt or do not."""
    target, ids = target_of("llama"), prompt(12)
    first = conformance.plain_greedy(target, ids, 20)
    text = ids + first
    names = ("from_prompt", "from_output", "from_history")
    for switches in itertools.product((True, False), repeat=3):
        given = dict(zip(names, switches, strict=True))
        drafter = LookaheadDrafter.from_options(target, window=1, ngram=3, guesses=8, **given)  # type: ignore[arg-type]
        generate(target, drafter, [ids], max_new_tokens=20, eos_token_id=NO_EOS)
        held = set(drafter.pool.items())
        grams = [(text[at], tuple(text[at + 1 : at + 3])) for at in range(28)]
        generate(target, drafter, [[5]], max_new_tokens=2, eos_token_id=NO_EOS)
        assert (set(grams[:10]) <= held, set(grams[12:]) <= held, len(drafter.pool) > 0) == switches


@pytest.mark.parametrize("warp", [0, 1])
def test_output_is_distributed_as_the_targets(warp: int) -> None:
    """Catches n-grams accepted as if they had been sampled, and rejected siblings left in the distribution."""
    drafter = LookaheadDrafter.from_options(toy(), window=2, ngram=3, guesses=3, from_history=True)
    assert deviation(drafter, WARPS[warp]) < LIMIT
