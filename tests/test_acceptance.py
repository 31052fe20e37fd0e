"""verify_sampled commits tokens distributed as the target's own; verify_greedy takes the deepest path.

Measured on a toy vocabulary over hundreds of thousands of identical prompts decoded as one batch, and compared with the
exact joint distribution of the next three tokens. The same measurement of rules that are wrong on purpose must fail.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch

from drafters.loop import acceptance
from drafters.loop.acceptance import verify_greedy, verify_sampled
from drafters.loop.sampling import Sampling, draw_without_replacement
from drafters.loop.tree import ROOT, DraftTree

VOCAB, ROWS = 4, 200_000
LIMIT = 0.006  # total variation of the joint; right is about 0.003 at this many rows, wrong rules below start at 0.05
SAMPLED, TOP = "sampled", "top"


@dataclass
class Shape:
    """A draft's nodes in order, each (parent, how its token was chosen)."""

    nodes: list[tuple[int, str]]
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0))

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child to ``node``."""
        return [] if node == ROOT else [*self.path(self.nodes[node][0]), node]


SHAPES = {
    "chain": Shape([(ROOT, SAMPLED), (0, SAMPLED)]),
    "two siblings": Shape([(ROOT, SAMPLED), (ROOT, SAMPLED), (0, SAMPLED), (0, SAMPLED), (1, SAMPLED)]),
    "three siblings": Shape([(ROOT, SAMPLED)] * 3 + [(0, SAMPLED)] * 3),
    "as many siblings as tokens": Shape([(ROOT, SAMPLED)] * VOCAB),
    "depth first": Shape([(ROOT, SAMPLED), (0, SAMPLED), (0, SAMPLED), (ROOT, SAMPLED), (3, SAMPLED), (ROOT, SAMPLED)]),
    "top-k children": Shape([(ROOT, TOP), (ROOT, TOP), (0, TOP), (0, TOP), (1, TOP)]),
    "top then sampled": Shape([(ROOT, TOP), (ROOT, SAMPLED), (ROOT, SAMPLED), (0, SAMPLED), (1, TOP)]),
    "sampled, top, sampled": Shape([(ROOT, SAMPLED), (ROOT, TOP), (ROOT, SAMPLED), (2, SAMPLED), (2, SAMPLED)]),
    "exhausted by top-k": Shape([(ROOT, SAMPLED)] * 3 + [(0, SAMPLED)] * 3, Sampling(temperature=0.8, top_k=2)),
    "exhausted by top-p": Shape([(ROOT, SAMPLED)] * 3 + [(1, SAMPLED)] * 2, Sampling(temperature=1.3, top_p=0.6)),
}


class Toy:
    """Random target and draft logits for every context of up to two tokens: ``[V] * depth + [V]``."""

    def __init__(self, sampling: Sampling, seed: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = [(VOCAB,) * (depth + 1) for depth in range(3)]
        self.logits = [1.5 * torch.randn(shape, generator=generator) for shape in shapes]
        self.p = [sampling.probabilities(logits) for logits in self.logits]
        self.q = [sampling.probabilities(1.5 * torch.randn(shape, generator=generator)) for shape in shapes]

    def joint(self) -> torch.Tensor:
        """The target's own distribution of the next three tokens."""
        return self.p[0][:, None, None] * self.p[1][:, :, None] * self.p[2]


def build_draft(shape: Shape, toy: Toy, generator: torch.Generator) -> tuple[DraftTree, torch.Tensor]:
    """ROWS independent drafts of one shape, and the target's logits ``[ROWS, N+1, V]`` over them."""
    count = len(shape.nodes)
    tokens = torch.zeros(ROWS, count, dtype=torch.long)
    valid = torch.ones(ROWS, count, dtype=torch.bool)
    q_row = [-1] * count
    q = torch.zeros(ROWS, count + 1, VOCAB)
    for parent in range(ROOT, count):
        context = tuple(tokens[:, node] for node in shape.path(parent))
        if len(context) > 2:
            continue
        q[:, parent + 1] = toy.q[len(context)][context]
        children = [node for node in range(count) if shape.nodes[node][0] == parent]
        drawn = [node for node in children if shape.nodes[node][1] == SAMPLED]
        ranked = [node for node in children if shape.nodes[node][1] == TOP]
        tokens[:, ranked] = q[:, parent + 1].topk(len(ranked), dim=-1).indices
        tokens[:, drawn], valid[:, drawn] = draw_without_replacement(q[:, parent + 1], len(drawn), generator)
        for node in drawn:
            q_row[node] = parent + 1
    paths = [shape.path(row) for row in range(ROOT, count)]
    contexts = [tuple(tokens[:, node] for node in path) for path in paths]
    logits = torch.stack([toy.logits[len(c)][c].expand(ROWS, VOCAB) for c in contexts], dim=1)
    return DraftTree.from_parents(tokens, [parent for parent, _ in shape.nodes], q, q_row, valid=valid), logits


def measured(draft: DraftTree, logits: torch.Tensor, toy: Toy, shape: Shape, seed: int = 1) -> torch.Tensor:
    """The distribution ``[V, V, V]`` of the next three tokens; what one step leaves open is filled in exactly."""
    generator = torch.Generator().manual_seed(seed)
    # The verdict's lists are slow at this size; `collect` is tested below.
    with mock.patch.object(acceptance, "collect", lambda draft, see, best, bonus: (best, bonus)):
        best, bonus = verify_sampled(draft, logits, draft.ancestors(), shape.sampling, generator)
    result = torch.zeros(VOCAB, VOCAB, VOCAB)
    for row in range(len(shape.nodes) + 1):
        here = best == row
        found = [draft.tokens[here, node] for node in shape.path(row - 1)] + [bonus[here]]
        counts = torch.zeros((VOCAB,) * len(found))
        counts.index_put_(tuple(found), torch.ones(int(here.sum())), accumulate=True)
        if len(found) == 1:
            counts = counts[:, None] * toy.p[1]
        if len(found) <= 2:
            counts = counts[:, :, None] * toy.p[2]
        result += counts
    return result / len(logits)


def total_variation(a: torch.Tensor, b: torch.Tensor) -> float:
    return 0.5 * (a - b).abs().sum().item()


@pytest.mark.parametrize("name", SHAPES)
def test_committed_tokens_follow_the_target(name: str) -> None:
    """Catches a wrong conditional q, residual, bonus, or verdict on an invalid or deterministic child, in any tree."""
    shape = SHAPES[name]
    toy = Toy(shape.sampling)
    draft, logits = build_draft(shape, toy, torch.Generator().manual_seed(0))
    found = measured(draft, logits, toy, shape)
    assert total_variation(found, toy.joint()) < LIMIT
    assert total_variation(found.sum((1, 2)), toy.p[0]) < 0.004


def by_row(draft: DraftTree, logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor) -> Any:
    def after(row: int, at: int) -> torch.Tensor:
        return sampling.probabilities(logits[row, at])

    return acceptance.walk_by_row(draft, after, [True] * len(logits), uniform, None)


def at_once(draft: DraftTree, logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor) -> Any:
    return acceptance._walk_at_once(draft, sampling.probabilities(logits), uniform, None)


WALKS = (by_row, at_once)


@pytest.mark.parametrize("name", SHAPES)
def test_walking_by_row_equals_walking_at_once(name: str) -> None:
    """Catches the two ways of verifying drifting apart: small batches on a CPU would follow another rule than a GPU."""
    shape = SHAPES[name]
    draft, logits = build_draft(shape, Toy(shape.sampling), torch.Generator().manual_seed(3))
    few = {key: getattr(draft, key)[:1000] for key in ("tokens", "parents", "q", "q_row", "valid")}
    draft, uniform = replace(draft, **few), torch.rand(1000, draft.size, generator=torch.Generator().manual_seed(4))
    with mock.patch.object(acceptance, "draw", lambda p, generator: p.argmax(-1)):
        (ends, bonus), others = (walk(draft, logits[:1000], shape.sampling, uniform) for walk in WALKS)
    assert torch.equal(ends, others[0]) and torch.equal(bonus, others[1])
    assert len(set(ends.tolist())) > 1 or name == "top-k children", "all drafts are the same only without samples"


def test_a_large_batch_in_parts() -> None:
    """Catches rows of a batch that are verified against the draft or the numbers of others."""
    shape = SHAPES["three siblings"]
    toy = Toy(shape.sampling)
    draft, logits = build_draft(shape, toy, torch.Generator().manual_seed(0))
    with mock.patch.object(acceptance, "MOST_VALUES", 5000 * logits[0].numel()):
        assert total_variation(measured(draft, logits, toy, shape), toy.joint()) < LIMIT


def test_a_draft_of_unknown_width() -> None:
    """Catches trials that end too early where a draft does not say how many children it drew."""
    shape = SHAPES["three siblings"]
    toy = Toy(shape.sampling)
    draft, logits = build_draft(shape, toy, torch.Generator().manual_seed(0))
    draft.draws = None  # as deep and as wide as there are nodes
    assert total_variation(measured(draft, logits, toy, shape), toy.joint()) < LIMIT


def test_a_draft_is_worth_something() -> None:
    """Catches a rule that is lossless because it hardly accepts: a chain's first token must pass with sum min(p, q)."""
    shape = SHAPES["chain"]
    toy = Toy(shape.sampling)
    draft, logits = build_draft(shape, toy, torch.Generator().manual_seed(0))
    with mock.patch.object(acceptance, "collect", lambda draft, see, best, bonus: best):
        best = verify_sampled(draft, logits, torch.ones(1), shape.sampling, torch.Generator().manual_seed(2))
    assert (best >= 1).float().mean().item() == pytest.approx(torch.minimum(toy.p[0], toy.q[0]).sum().item(), abs=0.003)


def top_as_sampled(draft: DraftTree) -> DraftTree:
    """Top-k children verified as if they had been drawn from q."""
    return replace(draft, q_row=draft.parents + 1, draws=None)


def shifted_q(draft: DraftTree) -> DraftTree:
    """Nodes verified against their own row of q instead of their parent's."""
    return replace(draft, q_row=(draft.q_row + 1).clamp_max(draft.size))


@pytest.mark.parametrize(
    ("name", "wrong", "without", "least"),
    [
        ("top-k children", top_as_sampled, acceptance.without, 0.1),
        ("two siblings", shifted_q, acceptance.without, 0.1),
        ("three siblings", lambda draft: draft, lambda q, token: q, 0.1),  # each as if it were the first draw
    ],
)
def test_the_measurement_sees_wrong_rules(name: str, wrong, without, least: float) -> None:  # noqa: ANN001
    """Catches a test of the distribution that cannot fail: known mistakes must show well above LIMIT."""
    shape = SHAPES[name]
    toy = Toy(shape.sampling)
    draft, logits = build_draft(shape, toy, torch.Generator().manual_seed(0))
    with mock.patch.object(acceptance, "without", without):
        assert total_variation(measured(wrong(draft), logits, toy, shape), toy.joint()) > least


def test_one_row_of_q_for_two_levels() -> None:
    """Catches a child verified against what its parent's draw left of a q that both levels share."""
    shape = Shape([(ROOT, SAMPLED)] * 2 + [(0, SAMPLED)] * 2 + [(1, SAMPLED)] * 2)
    toy = Toy(shape.sampling)
    toy.q[1] = toy.q[0].expand(VOCAB, VOCAB)
    draft, logits = build_draft(shape, toy, torch.Generator().manual_seed(0))
    draft.q_row = torch.zeros_like(draft.q_row)
    assert total_variation(measured(draft, logits, toy, shape), toy.joint()) < LIMIT


def test_padding_is_no_draw() -> None:
    """Catches a draw beyond the support of q that is tried: with a q of nothing it would always be accepted."""
    rows, p = 3000, torch.full((4,), 0.25)
    q = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(rows, 1, -1)
    every = torch.zeros(rows, 2, dtype=torch.long)
    tokens, valid = torch.tensor([[0, 1]]).expand(rows, -1), torch.tensor([[True, False]]).expand(rows, -1)
    draft = DraftTree(tokens, every + ROOT, q=q, q_row=every, valid=valid)
    for walk in WALKS:
        ends, bonus = walk(draft, p.log().expand(rows, 3, -1), Sampling(1.0), torch.rand(rows, 2))
        assert set(ends.tolist()) == {0, 1} and (ends == 1).float().mean().item() == pytest.approx(0.25, abs=0.03)
        left = bonus[ends == 0].bincount(minlength=4) / (ends == 0).sum()
        torch.testing.assert_close(left, torch.tensor([0.0, 1.0, 1.0, 1.0]) / 3, atol=0.04, rtol=0)


def test_zero_probability_tokens_are_never_committed() -> None:
    """Catches a bonus or an exhausted draw from outside the support that top-k and top-p leave."""
    for name in ("exhausted by top-k", "exhausted by top-p"):
        shape = SHAPES[name]
        toy = Toy(shape.sampling)
        draft, logits = build_draft(shape, toy, torch.Generator().manual_seed(0))
        assert not bool(draft.valid.all()), "the rig must exhaust the support"
        assert measured(draft, logits, toy, shape)[toy.joint() == 0].max() == 0


def test_greedy_takes_the_deepest_matching_path() -> None:
    """Catches a verdict that takes the first match, crosses branches, or counts a match below a wrong token. By hand:

    root -> 5 -> 6 (argmax after 5 is 6, then 7), root -> 5 (again) -> 6 -> 7; 8 is wrong, its child 5 would match.
    """
    tokens = torch.tensor([[5, 8, 5, 6, 5, 6, 7]])
    parents = torch.tensor([[ROOT, ROOT, ROOT, 0, 1, 2, 5]])
    draft = DraftTree(tokens, parents)
    logits = torch.zeros(1, 8, 10)
    for row, choice in enumerate([5, 6, 5, 6, 7, 0, 7, 9]):
        logits[0, row, choice] = 1.0
    verdict = verify_greedy(draft, logits, draft.ancestors(), Sampling())
    assert (verdict.rows, verdict.tokens) == ([[0, 3, 6, 7]], [[5, 6, 7, 9]])
    draft.valid = torch.tensor([[True, True, False, True, True, True, True]])
    verdict = verify_greedy(draft, logits, draft.ancestors(), Sampling())
    assert (verdict.rows, verdict.tokens) == ([[0, 1, 4]], [[5, 6, 7]])


def test_rows_of_a_batch_are_judged_apart() -> None:
    """Catches a verdict read from another batch row, a host-side shortcut that skips too many nodes, and padding of a
    smaller tree that is accepted, or counted as a level. The reference walks down each row of random batches."""
    rng = random.Random(0)
    for _ in range(60):
        shapes = [[rng.randrange(ROOT, node) for node in range(rng.randrange(6))] for _ in range(rng.randint(1, 6))]
        shapes = [list(range(ROOT, len(row) - 1)) for row in shapes] if rng.random() < 0.3 else shapes
        # Siblings differ; the target takes tokens below 3, so that a fair share of the nodes is right.
        trees = [[row[:node].count(parent) for node, parent in enumerate(row)] for row in shapes]
        choices = [[rng.randrange(3) for _ in range(1 + max(map(len, shapes)))] for _ in shapes]
        logits = torch.tensor(choices)[..., None].eq(torch.arange(6)) * 100.0
        draft = DraftTree.of_rows(trees, shapes, torch.device("cpu"))
        for rule, sampling in ((verify_greedy, Sampling()), (verify_sampled, Sampling(temperature=1.0))):
            verdict = rule(draft, logits, draft.ancestors(), sampling, None)
            for row, (tokens, parents, choice) in enumerate(zip(trees, shapes, choices, strict=True)):
                at, path, depth = ROOT, [0], [0]
                for node, parent in enumerate(parents):
                    depth.append(depth[parent + 1] + 1)
                    if parent == at and tokens[node] == choice[at + 1]:
                        at = node
                        path.append(node + 1)
                assert (verdict.rows[row], verdict.depths[row]) == (path, max(depth))
                assert verdict.tokens[row] == [choice[node] for node in path]
