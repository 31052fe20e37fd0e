"""LLMCad: budgets and thresholds by hand, and trees against whole forwards."""

import conformance
import pytest
import torch
from distribution import LIMIT, WARPS, deviation, toy
from rigged import perturbed

from drafters import GenerateResult, TargetModel, generate
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT, DraftTree
from drafters.methods.papers.llmcad import LLMCadDrafter, TokenTree, next_alpha

TestChain = conformance.brief(
    lambda target: LLMCadDrafter.from_options(target, draft_model=target, nodes=4, branches=1, alpha=1e-9),
    accepts="all",
    families=("llama", "mistral-sliding"),
    longest_draft=4,
)
TestTree = conformance.suite(
    lambda target: LLMCadDrafter.from_options(
        target, draft_model=perturbed(target, 0.02), nodes=9, branches=3, alpha=1e-3
    ),
    accepts="some",
    longest_draft=6,
)


def tree_of(nodes: int, branches: int, alpha: float = 1e-9, depth: int = 99) -> TokenTree:
    return TokenTree(nodes, branches, alpha, depth, torch.zeros(0))


# Budgets: f(x) = M * C_x / sum(C_i) - T_x.


def test_branches_go_on_while_they_are_due() -> None:
    """Catches a budget that grows with the length (the product), shares of the wrong sum, and a lost parent.

    M = 6, N = 3. After the root C = .5, .3, .1: shares of 6 tokens 3.33, 2 and 0.67, so two branches are due one. They
    have .30, .15 and .27 as likeliest children: shares 2.5, 2.25 and 1.25 for a length of 2: one child each. Then
    .24, .2025 and .0675 have shares 2.8, 2.4 and 0.8 for a length of 3: none is due, and the likeliest goes on.
    """
    tree = tree_of(6, 3)
    tree.extend([[0.5, 0.3, 0.1]], [[10, 11, 12]])
    assert (tree.tokens, tree.parents, tree.level) == ([10, 11], [ROOT, ROOT], [0, 1])
    tree.extend([[0.6, 0.3, 0.05], [0.9, 0.05, 0.0]], [[13, 14, 15], [16, 17, 18]])
    assert (tree.tokens, tree.parents) == ([10, 11, 13, 16], [ROOT, ROOT, 0, 1])
    assert tree.confidence == pytest.approx([0.3, 0.27]) and not tree.done
    tree.extend([[0.8, 0.1, 0.1], [0.75, 0.25, 0.0]], [[19, 20, 21], [22, 23, 24]])
    assert (tree.tokens[4:], tree.parents[4:], tree.lengths) == ([19], [2], [1, 1, 2, 2, 3])
    assert (tree.branch_length(ROOT), tree.branch_length(0), tree.branch_length(1)) == (3, 3, 2)


def test_trees_end() -> None:
    """Catches a tree larger than the buffers, deeper than the room, or drafted on below the threshold."""
    full = tree_of(3, 2)
    full.extend([[0.5, 0.5]], [[1, 2]])
    full.extend([[0.5, 0.5], [0.5, 0.5]], [[3, 4], [5, 6]])
    assert full.tokens == [1, 2, 3] and full.done
    deep = tree_of(9, 1, depth=2)
    for _ in range(2):
        assert not deep.done
        deep.extend([[0.9]], [[1]])
    assert deep.done and tree_of(9, 1, depth=0).done
    doubtful = tree_of(9, 2, alpha=0.3)
    doubtful.extend([[0.5, 0.4]], [[1, 2]])
    assert not doubtful.done  # the likeliest branch counts: 0.5
    doubtful.extend([[0.5, 0.5], [0.7, 0.1]], [[3, 4], [5, 6]])
    assert doubtful.done and doubtful.confidence[0] == pytest.approx(0.28) and doubtful.tokens == [1, 2, 5, 3]


def test_threshold_learns() -> None:
    """Catches a threshold that moves the wrong way, leaves (0, 1], or jumps to 1 at the first mistake.

    All of 4 right: halved. 1 of 4 right at T_c = 0.0001: divided by 0.0001^(3/4) = 0.001. None right: by T_c itself.
    """
    assert next_alpha(0.01, 4, 4, 0.5) == 0.005
    assert next_alpha(0.0001, 1, 4, 0.0001) == pytest.approx(0.1)
    assert next_alpha(0.01, 0, 3, 0.05) == pytest.approx(0.2)
    assert next_alpha(0.5, 0, 2, 0.1) == 1.0
    alpha = 1.0
    for _ in range(2000):
        alpha = next_alpha(alpha, 1, 1, 0.5)
    assert 0 < alpha < 1e-300 and next_alpha(alpha, 1, 1, 0.5) > 0


# Trees of a draft model.


def reference(model: TargetModel, known: list[int], like: TokenTree) -> TokenTree:
    """The same tree grown by whole forwards of each branch."""
    tree = tree_of(like.nodes, like.branches, like.alpha, like.depth)
    while not tree.done:
        found = []
        for end in tree.level:
            branch = [tree.tokens[node] for node in range(len(tree.tokens)) if tree.see[end + 1, node + 1]]
            logits = model.model(torch.tensor([known + branch])).logits[0, -1]
            found.append(logits.softmax(-1).topk(tree.branches))
        tree.extend([q.tolist() for q, _ in found], [tokens.tolist() for _, tokens in found])
    return tree


def watched(drafter: LLMCadDrafter, temperature: float = 0.0, new_tokens: int = 40) -> tuple[GenerateResult, list]:
    """A generation, and for each step the tokens before it and its tree."""
    seen = []
    go = drafter.propose

    def record(state: DecodeState) -> DraftTree:
        draft = go(state)
        if draft.size:
            assert draft.q is None and drafter._tree is not None
            assert draft.tokens[0].tolist() == drafter._tree.tokens
            assert torch.equal(draft.ancestors(), DraftTree(draft.tokens, draft.parents).ancestors())
            seen.append((list(state.tokens[0]), drafter._tree))
        return draft

    drafter.propose = record  # type: ignore[method-assign]
    ids = conformance.prompt(9)
    options = {"max_new_tokens": new_tokens, "temperature": temperature, "eos_token_id": []}
    return generate(drafter.target, drafter, [ids], **options), seen  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "temperature"), [("llama", 0.0), ("mistral-sliding", 1.0)])
def test_trees_are_the_draft_models(family: str, temperature: float) -> None:
    """Catches branches that see each other, wrong positions, and a draft cache that drifts from the text unseen."""
    target = conformance.target_of(family)
    draft_model = perturbed(target, 0.02)
    drafter = LLMCadDrafter.from_options(target, draft_model=draft_model, nodes=9, branches=3, alpha=1e-3)
    result, seen = watched(drafter, temperature)
    for known, tree in seen:
        expected = reference(draft_model, known, tree)
        assert (tree.tokens, tree.parents) == (expected.tokens, expected.parents)
        assert tree.confidence == pytest.approx(expected.confidence, rel=1e-3)
    accepted = {step.accepted for step in result.trace.steps}
    assert len(accepted) > (1 if temperature else 2) and len({len(tree.tokens) for _, tree in seen}) > 2


@pytest.mark.parametrize("warp", [0, 1])
def test_output_is_distributed_as_the_targets(warp: int) -> None:
    """Catches nodes accepted because they are likely, and rejected siblings left in the distribution."""
    drafter = LLMCadDrafter.from_options(toy(), draft_model=perturbed(toy(), 0.3), nodes=6, branches=2)
    assert deviation(drafter, WARPS[warp]) < LIMIT
