"""One block of three tokens by enumeration: all drafts, all trials and all bonus tokens of the code that decodes.

``fill``, ``likeliest``, the slots of DFlash, DSpark and DFlash2, and ``verify_sampled`` run as they are. Only their
random numbers are replaced: a draw returns each of its outcomes in turn, and the chance of a trial is the uniform
number at which its verdict changes, found by bisection. So the smallest bias shows.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from enumeration import VOCAB, P, after
from torch import Tensor

from drafters.drafting import grow, tree_plan
from drafters.drafting.grow import Marginals, fill, likeliest
from drafters.heads.block.dspark import MarkovHead
from drafters.heads.dflash2.module import CandidateSelector
from drafters.loop import acceptance
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.methods.block import MarkovSlots
from drafters.methods.dflash2 import SelectorSlots

DEPTH, RANK, HIDDEN = 2, 4, 6
NEW = DEPTH + 1  # tokens that are compared
# How tokens are chosen, and what the slots' scores are multiplied by: where q is peaked, a node may lie outside of its
# support, though p, which is flat, has the node's token.
WARPS = [
    (Sampling(0.7), 1.0),
    (Sampling(1.3, top_p=0.7), 1.0),
    (Sampling(1.0, top_p=0.9), 8.0),
    (Sampling(1.2, top_k=2), 1.0),
]
PLANS = {
    "chain": ((0,), (0, 0)),
    "auto": ((0,), (1,), (0, 0), (0, 1), (1, 0)),
    "wide": ((0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (2, 0)),
}
REJECTED = 1e30  # a uniform number that no trial passes
Ordered = tuple[float, list[int], list[bool]]  # a draw without replacement: its chance, the tokens, which are real


def slots_of(kind: str, scale: float) -> Any:
    """Slots of random scores times ``scale``, new ones in each call; ``kind``: dflash, selector
    (two candidates), or a kind of Markov head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        logits, states = torch.randn(1, DEPTH, VOCAB), torch.randn(1, DEPTH, HIDDEN)
        if kind == "dflash":
            return Marginals(scale * logits)
        if kind == "selector":
            selector = CandidateSelector(VOCAB, HIDDEN, RANK, 0.6)
            return SelectorSlots(selector, scale * logits, states, torch.tensor([[1]]), 2)
        head: Any = MarkovHead(kind, VOCAB, VOCAB, RANK, HIDDEN)  # type: ignore[arg-type]
        for weights in head.parameters():
            torch.nn.init.normal_(weights)
    drafter: Any = SimpleNamespace(lm_head=SimpleNamespace(tokens=lambda places: places))
    drafter.markov_w2 = lambda latent: scale * head.markov_w2(latent)
    drafter.module = SimpleNamespace(markov_head=head, confidence_head=None)
    return MarkovSlots(drafter, scale * logits, states, torch.tensor([[1]]))


def ordered(q: Tensor, count: int) -> Iterator[Ordered]:
    """All draws of ``count`` tokens without replacement from ``q [V]``; beyond its support, the last ids."""
    for tokens in itertools.permutations(range(VOCAB), count):
        chance, left, real = 1.0, 1.0, list[bool]()
        for token in tokens:
            real.append(left > 1e-6)
            chance *= float(q[token]) / left if real[-1] else 1.0
            left -= float(q[token])
        others = [token for token in reversed(range(VOCAB)) if token not in tokens[: sum(real)]]
        if chance > 0 and list(tokens[sum(real) :]) == others[: real.count(False)]:
            yield chance, list(tokens), real


class Draws:
    """``draw_without_replacement`` that takes the outcomes ``path``, then first ones; ``others``: paths to all else."""

    def __init__(self, path: list[int]) -> None:
        self.path, self.taken, self.chance = path, list[int](), 1.0
        self.others: list[list[int]] = []

    def __call__(self, q: Tensor, count: int, generator: Any) -> tuple[Tensor, Tensor]:
        every = list(itertools.product(*(list(ordered(row, count)) for row in q[0])))
        known = len(self.taken) < len(self.path)
        if not known:
            self.others += [[*self.taken, other] for other in range(1, len(every))]
        self.taken.append(self.path[len(self.taken)] if known else 0)
        rows = every[self.taken[-1]]
        for chance, _, _ in rows:
            self.chance *= chance
        return torch.tensor([[row[1] for row in rows]]), torch.tensor([[row[2] for row in rows]])


def drafts(kind: str, tree: str, sampling: Sampling, scale: float) -> Iterator[tuple[float, DraftTree]]:
    """All drafts, and the chance of each."""
    if tree == "tree":
        yield 1.0, likeliest(slots_of(kind, scale), DEPTH, 2, 4)
        return
    plan, todo = tree_plan.tree_plan(PLANS[tree], torch.device("cpu")), [list[int]()]
    while todo:
        draws = Draws(todo.pop())
        with mock.patch.object(grow, "draw_without_replacement", draws):
            draft = fill(slots_of(kind, scale), plan, sampling, None)
        todo += draws.others
        yield draws.chance, draft


def verdicts(draft: DraftTree, logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Any, Tensor]:
    """``verify_sampled`` with these uniform numbers ``[B, N]``, and what the bonus is drawn from, ``[B, N + 1, V]``."""
    seen: list[Tensor] = []

    def drawn(p: Tensor, generator: Any) -> Tensor:
        seen.append(p)
        return torch.full(p.shape[:-1], -1)  # no draft token

    with (
        mock.patch.object(acceptance, "draw", drawn),
        mock.patch.object(acceptance, "FEW_ROWS", 0),  # all rows at once
        mock.patch.object(torch, "rand", lambda *given, **options: uniform),
    ):
        verdict = acceptance.verify_sampled(draft, logits, draft.ancestors(), sampling)
    return verdict, seen[0]


def chances(draft: DraftTree, logits: Tensor, sampling: Sampling) -> Tensor:
    """``[B, N]``: the chance that each node's trial passes, when its ancestors are accepted and its earlier siblings
    rejected."""
    count, size = draft.tokens.shape
    every = draft.of(torch.arange(count).repeat_interleave(size))
    node, logits = torch.arange(size).repeat(count), logits.repeat_interleave(size, 0)
    above = draft.ancestors()[0, 1:, 1:][node]  # [B * N, N], the node itself included
    low, high = torch.zeros(count * size), torch.ones(count * size)

    def passes(numbers: Tensor) -> Tensor:
        uniform = torch.where(above, 0.0, REJECTED)
        uniform[torch.arange(len(node)), node] = numbers
        verdict, _ = verdicts(every, logits, sampling, uniform)
        return torch.tensor([at + 1 in rows for at, rows in zip(node.tolist(), verdict.rows, strict=True)])

    always, ever = passes(high), passes(low)
    for _ in range(24):  # to the rounding of float32
        middle = (low + high) / 2
        below = passes(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.where(always, 1.0, torch.where(ever, low, 0.0)).view(count, size)


@torch.inference_mode()
def committed(
    kind: str,
    tree: str,
    sampling: Sampling,
    scale: float,
    change: Callable[[DraftTree], DraftTree] = lambda draft: draft,
) -> Tensor:
    """``[V] * NEW``: exact distribution of the next tokens; ``change``: made to every draft before it is verified."""
    weights, every = zip(*drafts(kind, tree, sampling, scale), strict=True)
    assert sum(weights) == pytest.approx(1, abs=1e-5)
    parts = {name: torch.cat([getattr(draft, name) for draft in every]) for name in ("tokens", "parents", "q", "q_row")
             if getattr(every[0], name) is not None}  # fmt: skip
    valid = None if every[0].valid is None else torch.cat([draft.valid for draft in every])
    draft = replace(every[0], **parts, valid=valid, see=None)
    draft = draft if change is None else change(draft)
    parents, tokens = draft.parents.tolist(), draft.tokens.tolist()
    contexts: list[list[tuple[int, ...]]] = [[()] for _ in every]  # of each draft, the tokens up to [root, nodes]
    for row, known in enumerate(contexts):
        for parent, token in zip(parents[row], tokens[row], strict=True):
            known.append((*known[parent + 1], token))
    logits = torch.stack([torch.stack([after(P, context).log() for context in known]) for known in contexts]).float()
    trials = chances(draft, logits, sampling) if draft.q is not None else torch.zeros(len(every), draft.size)
    _, left = verdicts(draft, logits, sampling, torch.full(draft.tokens.shape, REJECTED))
    result = torch.zeros((VOCAB,) * NEW, dtype=torch.float64)

    def spread(path: tuple[int, ...], weight: float) -> None:
        if len(path) == NEW:
            result[path] += weight
        elif weight > 0:
            for token, probability in enumerate(warped(path, sampling).tolist()):
                spread((*path, token), weight * probability)

    def walk(row: int, at: int, weight: float) -> None:
        children = [node for node, parent in enumerate(parents[row]) if parent + 1 == at]
        children = [node for node in children if draft.valid is None or draft.valid[row, node]]
        for node in children:
            passing = float(trials[row, node])
            walk(row, node + 1, weight * passing) if passing else None
            weight *= 1 - passing
        rest = left[row, at].double()
        for token, probability in enumerate((rest / rest.sum()).tolist()):
            node = next((node for node in children if tokens[row][node] == token), None)
            if node is None or draft.q is not None:
                spread((*contexts[row][at], token), weight * probability)
            elif probability:
                walk(row, node + 1, weight * probability)

    for row, weight in enumerate(weights):
        walk(row, 0, weight)
    return result


def warped(context: tuple[int, ...], sampling: Sampling) -> Tensor:
    """``[V]``: the target's distribution after a context."""
    return sampling.probabilities(after(P, context).log())


def bias(found: Tensor, sampling: Sampling) -> float:
    """Total variation between a distribution of the next tokens and the target's."""
    expected = torch.ones_like(found)
    for path in itertools.product(range(VOCAB), repeat=NEW):
        for depth, token in enumerate(path):
            expected[path] *= warped(path[:depth], sampling)[token]
    return 0.5 * float((found - expected).abs().sum())


@pytest.mark.parametrize(
    ("tree", "warp"), [*itertools.product(["chain", "auto", "tree"], range(len(WARPS))), ("wide", 2), ("wide", 3)]
)
@pytest.mark.parametrize("kind", ["dflash", "vanilla", "rnn", "selector"])
def test_the_output_is_the_targets(kind: str, tree: str, warp: int) -> None:
    """Catches a q before the Markov head or of another temperature, a Markov head that follows another node, a q of
    all tokens where a selector drew from two, siblings whose q is not without the earlier ones, accepted nodes outside
    of q's support: any bias, also one that no sample shows.
    """
    assert bias(committed(kind, tree, *WARPS[warp]), WARPS[warp][0]) < 1e-5


@pytest.mark.parametrize("tree", ["chain", "auto"])
@pytest.mark.parametrize("kind", ["dflash", "rnn"])
def test_a_q_of_another_slot_shows(kind: str, tree: str) -> None:
    """Catches an enumeration that finds no bias: here each node is verified with the q of another slot."""

    def shifted(draft: DraftTree) -> DraftTree:
        assert draft.q is not None
        return replace(draft, q=draft.q.roll(1, dims=1))

    assert bias(committed(kind, tree, *WARPS[0], shifted), WARPS[0][0]) > 0.01


@pytest.mark.parametrize("tree", ["auto", "wide"])
@pytest.mark.parametrize("kind", ["dflash", "rnn"])
def test_a_node_outside_of_its_support_shows(kind: str, tree: str) -> None:
    """Catches an enumeration whose q always has all drafted tokens: here all nodes count as real draws."""

    def all_real(draft: DraftTree) -> DraftTree:
        assert draft.valid is not None and not bool(draft.valid.all())
        return replace(draft, valid=torch.ones_like(draft.valid))

    assert bias(committed(kind, tree, *WARPS[2], all_real), WARPS[2][0]) > 0.01
