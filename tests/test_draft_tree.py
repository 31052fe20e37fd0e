"""Draft trees: ancestors, fixed plans, and EAGLE-2's dynamic tree against a plain reference."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance import prompt, target_of
from rigged import eagle, eagle3, kangaroo, medusa
from test_draft_head import with_ids

from drafters import generate
from drafters.drafting.grow import fill, likeliest
from drafters.drafting.tree_plan import EAGLE_TREE, TreePlan
from drafters.learned import LearnedDrafter
from drafters.loop.sampling import Sampling
from drafters.loop.tree import ROOT, DraftTree, Extra, tree_mask
from drafters.methods.eagle import FeatureSlots
from drafters.model.draft_head import Scores
from drafters.model.rows import Rows

CPU = torch.device("cpu")
VOCAB = 13
Logits = Callable[[tuple[int, ...]], torch.Tensor]


def brute_ancestors(parents: list[int]) -> torch.Tensor:
    see = torch.zeros(len(parents) + 1, len(parents) + 1, dtype=torch.bool)
    for row in range(len(parents) + 1):
        node = row - 1
        while node != ROOT:
            see[row, node + 1] = True
            node = parents[node]
        see[row, 0] = True
    return see


def test_ancestors_equal_brute_force() -> None:
    """Catches a reach that stops at a power of two, and a mask transposed or mixed between batch rows."""
    for n in (1, 2, 3, 7, 8, 9, 25, 64):
        batch = [[random.randint(max(ROOT, node - spread), node - 1) for node in range(n)] for spread in (1, 3, 70)]
        draft = DraftTree(torch.zeros(3, n, dtype=torch.long), torch.tensor(batch))
        expected = torch.stack([brute_ancestors(parents) for parents in batch])
        assert torch.equal(draft.ancestors(), expected)
        assert torch.equal(draft.depths(draft.ancestors()), expected.sum(-1) - 1)
        for parents, mask in zip(batch, expected, strict=True):
            see, depths = tree_mask(tuple(parents), CPU)
            assert torch.equal(see[0], mask) and torch.equal(depths[0], mask.sum(-1) - 1)


def test_what_the_host_knows_of_a_tree() -> None:
    """Catches levels that verification would not reach, siblings it would not try, and a chain taken for a tree."""
    tokens, q = torch.arange(6).repeat(2, 1), torch.rand(2, 3, 9)
    #   root -> 0 -> 2, 3 (sampled), 4 (deterministic); root -> 1 (both sampled); 3 -> 5 (scratch)
    draft = DraftTree.from_parents(tokens, [ROOT, ROOT, 0, 0, 0, 3], q, [0, 0, 1, 1, -1, 2], extra=Extra(scratch=1))
    assert draft.draws == (2, 2) and draft.extra.scratch == 1 and not draft.is_chain
    assert draft.parents.tolist() == [[ROOT, ROOT, 0, 0, 0, 3]] * 2
    assert draft.q_row is not None and draft.q_row.tolist() == [[0, 0, 1, 1, -1, 2]] * 2
    assert torch.equal(draft.ancestors(), DraftTree(draft.tokens, draft.parents).ancestors())
    assert DraftTree.from_parents(tokens, [ROOT, 0, 1, 1, 0, 3]).levels == (0, 0, 0, 0)
    assert DraftTree.from_parents(tokens, range(ROOT, 5)).is_chain
    assert DraftTree(tokens, draft.parents, q, draft.q_row).levels == (6,) * 6, "unknown: the most there can be"


def test_eagle_tree_is_the_papers() -> None:
    """Catches a wrong shape: EAGLE (Li et al. 2024), Figure 9 has 25 nodes, 4/8/8/3/2 a level, drafted in 5 passes."""
    plan = TreePlan(EAGLE_TREE, CPU)
    assert plan.size == 25 and len(plan.levels) == 5
    assert [len(level.rank) for level in plan.levels] == [4, 8, 8, 3, 2]
    assert plan.parents[4:8] == (0, 0, 0, 1)


@pytest.mark.parametrize(
    "paths", [[[0], [0, 0, 0]], [[1]], [[0], [0, 1]], [[0], [0]], [[]], [[0], [-1]], [[0], [0, 0], [1, 0]]]
)
def test_paths_that_are_no_tree_are_refused(paths: list[list[int]]) -> None:
    """Catches orphans, gaps among siblings and doubles, which would be drafted from another node's logits."""
    with pytest.raises(ValueError, match="tree path"):
        TreePlan(paths, CPU)


WIDE = [[0], [1], [2], [0, 0]]
STATIC: dict[str, Any] = {
    "eagle": lambda t, count: of_few(eagle(t, None, "static", paths=WIDE), count),
    "eagle3": lambda t, count: eagle3(t, None, "static", count, paths=WIDE),
    "medusa": lambda t, count: of_few(medusa(t, None, "static", paths=WIDE), count),
    "kangaroo": lambda t, count: of_few(kangaroo(t, False, eta=0.0, paths=WIDE), count),
}


def of_few(drafter: LearnedDrafter, count: int) -> Any:
    """The drafter again, with a draft vocabulary of ``count`` tokens, one of them the text's."""
    return with_ids(drafter, torch.arange(8, dtype=torch.int32), {"draft_vocab": count - 1, "draft_text": 1})


@pytest.mark.parametrize("kind", STATIC)
def test_a_tree_wider_than_the_draft_vocabulary_is_refused(kind: str) -> None:
    """Catches a tree with more children of a node than tokens to draft, which would end the first step."""
    target = target_of("llama")
    with pytest.raises(ValueError, match="a node of the static tree has 3 children, and the drafter drafts with 2"):
        STATIC[kind](target, 2)
    for temperature in (0.0, 1.0):
        found = generate(target, STATIC[kind](target, 3), [prompt(9)], max_new_tokens=6, temperature=temperature)
        assert found.trace.steps[0].drafted == 4


class FakeHead:
    """A head whose logits are a function of the path alone; features carry the path, so misrouted rows show."""

    def __init__(self, logits_of: Logits) -> None:
        self.logits_of = logits_of
        self.paths: list[tuple[int, ...]] = [()]  # a feature is the index of its path
        self.nodes: list[int] = []
        self.forwards: list[int] = []

        self.lm_head: Any = self

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.logits_of(self.paths[int(f)]) for f in features[0, :, 0]])[None]

    def scored(self, features: torch.Tensor) -> Scores:
        return Scores(self(features))

    def tokens(self, places: torch.Tensor) -> torch.Tensor:
        return places

    def slots(self, plan: TreePlan | None) -> FeatureSlots:
        return FeatureSlots(self, torch.zeros(1, 1, 1), plan)  # type: ignore[arg-type]

    def extend(self, features: torch.Tensor, tokens: torch.Tensor, rows: Rows) -> torch.Tensor:
        see, depths, offset = rows
        assert offset == len(self.nodes), "rows must go where the last level's ended"
        self.nodes += tokens[0].tolist()
        self.forwards.append(tokens.shape[1])
        made = []
        for row, token in enumerate(tokens[0].tolist()):
            path = (*self.paths[int(features[0, row, 0])], token)
            if see is not None and depths is not None:
                seen = tuple(self.nodes[j] for j in range(len(self.nodes)) if see[0, row, j])
                assert seen == path, "a row must attend to its own path"
                assert depths[0, offset + row] == len(path) - 1
            self.paths.append(path)
            made.append(len(self.paths) - 1)
        return torch.tensor(made, dtype=torch.float32)[None, :, None]


def random_logits(path: tuple[int, ...], scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(path) % (1 << 31))
    return scale * torch.randn(VOCAB, generator=generator)


def path_of(draft: DraftTree, node: int) -> tuple[int, ...]:
    if node == ROOT:
        return ()
    return (*path_of(draft, int(draft.parents[0, node])), int(draft.tokens[0, node]))


PLANS = [
    EAGLE_TREE,
    [[0], [0, 0], [0, 0, 0]],
    [[0], [1], [2], [1, 0], [2, 0], [2, 1], [2, 1, 0], [1, 0, 0], [1, 0, 1]],
    [[0]],
]


@pytest.mark.parametrize("paths", PLANS)
def test_static_greedy_takes_top_children(paths: list[list[int]]) -> None:
    """Catches children taken from another node's logits, and leaves forwarded for nothing."""
    head = FakeHead(random_logits)
    plan = TreePlan(paths, CPU)
    draft = fill(head.slots(plan), plan, Sampling(), None)
    ranks: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for path in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
        before = ranks[path[:-1]]
        ranks[path] = (*before, int(random_logits(before).topk(path[-1] + 1).indices[-1]))
    found = [path_of(draft, node) for node in range(draft.size)]
    assert sorted(found) == sorted(path for path in ranks.values() if path)
    assert sum(head.forwards) == len({path[:-1] for path in map(tuple, paths)} - {()})


@pytest.mark.parametrize("paths", PLANS)
def test_static_sampled_names_the_q_it_drew_from(paths: list[list[int]]) -> None:
    """Catches a q_row that points at another node's distribution: the output would be biased, and only at T > 0."""
    sampling = Sampling(temperature=1.5, top_k=6)
    head = FakeHead(random_logits)
    plan = TreePlan(paths, CPU)
    draft = fill(head.slots(plan), plan, sampling, torch.Generator().manual_seed(3))
    assert draft.q is not None and draft.q_row is not None and draft.valid is not None and bool(draft.valid.all())
    for node in range(draft.size):
        parent = int(draft.parents[0, node])
        expected = sampling.probabilities(random_logits(path_of(draft, parent)))
        assert torch.equal(draft.q[0, draft.q_row[0, node]], expected)
        siblings = [other for other in range(draft.size) if int(draft.parents[0, other]) == parent]
        assert len({int(draft.tokens[0, other]) for other in siblings}) == len(siblings)


def test_static_marks_exhausted_support() -> None:
    """Catches zero-probability children handed to verification when top-k leaves fewer tokens than the tree wants."""
    head = FakeHead(random_logits)
    plan = TreePlan([[0], [1], [2], [3], [0, 0], [0, 1], [0, 2]], CPU)
    draft = fill(head.slots(plan), plan, Sampling(1.0, top_k=2), torch.Generator())
    assert draft.valid is not None
    assert draft.valid[0].tolist() == [True, True, False, False, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["constant", "certain", "coarse"])
def test_dynamic_is_closed_under_ties(kind: str, dtype: torch.dtype) -> None:
    """Catches a child kept without its parent on an exact tie of scores (18 of 400 trees of EAGLE's released code)."""

    def logits_of(path: tuple[int, ...]) -> torch.Tensor:
        if kind == "constant":
            return torch.ones(VOCAB, dtype=dtype)
        if kind == "certain":  # log-probability 0 in floating point: child and parent tie
            return torch.nn.functional.one_hot(torch.tensor(len(path)), VOCAB).to(dtype) * 1000
        return (random_logits(path, 1.0) * 1.5).round().to(dtype)

    for depth, top_k, nodes in ((5, 10, 59), (6, 4, 9), (5, 3, 5), (4, 5, 2), (5, 10, 14)):
        head = FakeHead(logits_of)
        draft = likeliest(head.slots(None), depth, top_k, nodes)
        parents = draft.parents[0].tolist()
        assert all(ROOT <= parent < node for node, parent in enumerate(parents))
        paths = [path_of(draft, node) for node in range(draft.size)]
        assert len(set(paths)) == draft.size and all(path[:-1] in paths for path in paths if len(path) > 1)
        for path in paths:  # every token is one of its parent's top children, or ties with one
            logits = logits_of(path[:-1]).float()
            assert logits[path[-1]] >= logits.topk(top_k).values[-1]
