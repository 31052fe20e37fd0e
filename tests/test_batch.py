"""Several prompts at once: each row must give the tokens that it gives in a batch of one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance import NO_EOS, plain_greedy, prompt, rows_of, target_of
from rigged import eagle, medusa, perturbed

from drafters import Drafter, GenerateResult, TargetModel, generate, make_drafter
from drafters.drafting.retrieval import NOTHING, Copy, Retrieval
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT, DraftTree
from drafters.methods.speculative import SpeculativeDrafter


class Branching(Retrieval):
    """Finds what comes next among other things, in a tree whose shape the text decides: of each row another."""

    max_draft = 6

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        text, room = state.tokens[row], state.room(row) - 1
        right = plain_greedy(self.target, text, min(3, room)) if room > 0 else []
        wrong = [(token + 1) % self.target.vocab_size for token in right]
        shapes: list[tuple[list[int], list[int]]] = [
            (right, [ROOT, 0, 1]),
            ([*wrong[:1], *right[:1], *wrong[:1], *right[1:2]], [ROOT, ROOT, 1, 1]),
            ([*wrong[:1], *right[:1], *wrong[:1], *right[1:2], *wrong[2:], *right[2:]], [ROOT, ROOT, 0, 1, 3, 3]),
            ([], []),
        ]
        tokens, parents = shapes[len(text) % 4] if room >= 3 else ([], [])
        return Copy(tokens, parents[: len(tokens)], [0.5] * len(tokens), 3) if tokens else NOTHING


METHODS: dict[str, Callable[[TargetModel], Drafter]] = {
    "autoregressive": lambda t: make_drafter("autoregressive", t),
    "prompt_lookup": lambda t: make_drafter("prompt_lookup", t),
    "suffix": lambda t: make_drafter("suffix", t, memory=0, alpha=3.0, nodes=6),
    "branching": lambda t: Branching.from_options(t),
    "speculative": lambda t: SpeculativeDrafter.from_options(t, draft_model=perturbed(t, 0.05), gamma=4),
    "eagle-chain": lambda t: eagle(t, 0.4, "chain"),
    "eagle-static": lambda t: eagle(t, 0.4, "static"),
    "eagle-dynamic": lambda t: eagle(t, 0.4, "dynamic", top_k=4, nodes=12),
    "medusa-static": lambda t: medusa(t, 0.4, "static", nodes=12),
    "eagle-random": lambda t: eagle(t, None, "dynamic", top_k=4, nodes=12),
}


def prompts_of(count: int) -> list[list[int]]:
    """Of many lengths, one of a single token."""
    return [[5], *(prompt(3 + 5 * index % 17, index) for index in range(1, count))]


def full_steps(result: GenerateResult, row: int, limit: int) -> list[tuple[int, int]]:
    """Acceptance of a row's steps as long as a draft of full depth fits before the limit: alone, it is cut there."""
    steps, done = [], 1
    for step in result.trace.steps:
        if step.row == row and limit - done > 5:
            steps.append((step.accepted, step.committed))
            done += step.committed
    return steps


@pytest.mark.parametrize(
    ("method", "family"), [("autoregressive", "llama"), *((method, "mistral-sliding") for method in METHODS)]
)
def test_rows_go_as_alone(method: str, family: str) -> None:
    """Catches a row that sees padding or its neighbour's keys, is accepted by another's choice, or is fed twice after
    a step in which another was cut: tokens and every step's acceptance must be those of the row alone.
    """
    target = target_of(family)
    prompts = prompts_of(8)
    options: dict[str, Any] = {"max_new_tokens": 18, "eos_token_id": NO_EOS}
    together = generate(target, METHODS[method](target), prompts, **options)
    drafter = METHODS[method](target)
    for row, ids in enumerate(prompts):
        alone = generate(target, drafter, [ids], **options)
        assert rows_of(together)[row] == rows_of(alone)[0]
        assert full_steps(together, row, 18) == full_steps(alone, 0, 18) != []
    if method != "autoregressive" and method != "eagle-random":
        accepted = {step.accepted for step in together.trace.steps}
        assert len(accepted) > 1, "the rows must differ in acceptance for this test to mean anything"


@pytest.mark.parametrize("method", METHODS)
def test_rows_end_at_their_own_eos(method: str) -> None:
    """Catches a finished row that goes on (tokens, cache or drafter), or stops the others."""
    target = target_of("llama")
    prompts = prompts_of(6)
    free = rows_of(generate(target, METHODS[method](target), prompts, max_new_tokens=20, eos_token_id=NO_EOS))
    eos = [free[1][4], free[3][9]]
    expected = []
    for row in free:
        stops = [index for index, token in enumerate(row) if token in eos]
        expected.append(row[: stops[0] + 1] if stops else row)
    assert len({len(row) for row in expected}) > 1
    streamed: dict[int, list[int]] = {row: [] for row in range(6)}
    found = generate(
        target,
        METHODS[method](target),
        prompts,
        max_new_tokens=20,
        eos_token_id=eos,
        on_tokens=lambda row, new: streamed[row].extend(new),
    )
    assert rows_of(found) == expected == list(streamed.values())
    for row in range(6):
        assert sum(step.committed for step in found.trace.steps if step.row == row) == len(expected[row]) - 1


@pytest.mark.parametrize("method", [name for name in METHODS if name != "autoregressive"])
def test_batch_at_the_edge_of_the_context(method: str) -> None:
    """Catches buffers sized for the shortest row, and drafts of a row without room that reach past them."""
    target = target_of("llama")
    prompts = [prompt(target.max_context - 9, 1), prompt(4, 2), prompt(40, 3)]
    options: dict[str, Any] = {"max_new_tokens": 9, "eos_token_id": NO_EOS}
    rows = rows_of(generate(target, METHODS[method](target), prompts, **options))
    for ids, row in zip(prompts, rows, strict=True):
        assert row == rows_of(generate(target, METHODS[method](target), [ids], **options))[0] and len(row) == 9


def second_token(target: TargetModel, ids: list[int]) -> torch.Tensor:
    """``[V]`` distribution of the second new token: the first is sampled by the prefill, this one by a step."""
    with torch.inference_mode():
        first = target.lm_head(target.features(torch.tensor([ids])).features[0, -1]).softmax(-1)
        longer = torch.tensor([[*ids, token] for token in range(target.vocab_size)])
        second = target.lm_head(target.features(longer).features[:, -1]).softmax(-1)
    return first @ second


@pytest.mark.parametrize("method", ["speculative", "eagle-static", "eagle-dynamic", "prompt_lookup"])
def test_sampled_rows_follow_the_target(method: str) -> None:
    """Catches a row verified against another row's p or q: chi-square of the first verified token, by prompt."""
    target = target_of("llama")
    drafter = METHODS[method](target)
    prompts = [[4, 4, 4, 4, 4], prompt(3, 1)]
    counts = torch.zeros(2, target.vocab_size)
    for seed in range(8):
        batch = [prompts[row % 2] for row in range(120)]
        found = generate(target, drafter, batch, max_new_tokens=4, temperature=1.0, eos_token_id=NO_EOS, seed=seed)
        for row, tokens in enumerate(rows_of(found)):
            counts[row % 2, tokens[1]] += 1
    for seen, ids in zip(counts, prompts, strict=True):
        p = second_token(target, ids)
        keep = p * seen.sum() >= 5
        observed = torch.cat([seen[keep], seen[~keep].sum()[None]])
        wanted = torch.cat([p[keep], p[~keep].sum()[None]]) * seen.sum()
        chi = float(((observed - wanted) ** 2 / wanted.clamp_min(1e-9)).sum())
        degrees = len(observed) - 1
        assert degrees > 5 and chi < degrees + 4 * (2 * degrees) ** 0.5, f"{ids}: chi-square {chi:.0f} of {degrees}"


def test_trees_of_rows() -> None:
    """Catches a mask, a depth or a padding node of another row's tree."""
    shapes = [[ROOT, 0, 0, 2], [], [ROOT, ROOT]]
    draft = DraftTree.of_rows([[5, 6, 7, 8], [], [3, 4]], shapes, torch.device("cpu"))
    assert draft.tokens.tolist() == [[5, 6, 7, 8], [0] * 4, [3, 4, 0, 0]] and draft.valid is not None
    assert draft.valid.tolist() == [[True] * 4, [False] * 4, [True, True, False, False]]
    see = draft.ancestors()
    assert draft.depths(see).tolist() == [[0, 1, 2, 2, 3], [0, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert not draft.is_chain and draft.draws == (0, 0, 0)
    draft.see = None
    assert torch.equal(draft.ancestors(), see)  # as it follows from the parents
    alone = DraftTree.of_rows([[5, 6, 7, 8]], shapes[:1], torch.device("cpu"))
    assert torch.equal(alone.ancestors(), see[:1]) and alone.valid is None and alone.draws == (0, 0, 0)
    chains = DraftTree.of_rows([[5, 6], [7]], [[ROOT, 0], [ROOT]], torch.device("cpu"))
    assert chains.is_chain and chains.valid is not None and chains.valid.tolist() == [[True, True], [True, False]]
    assert DraftTree.of_rows([[], []], [[], []], torch.device("cpu")).size == 0
