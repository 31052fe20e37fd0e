"""Exact distributions of one step of a method whose drafts are merged into one tree: every draft, every outcome.

A toy of three tokens with hand-set tables in float64; what one step leaves open of the next three tokens is filled in
from the target. A right rule gives the target's joint distribution to rounding, so that the smallest bias shows.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from drafters.drafting.merged_tree import MergedTree, Trials
from drafters.loop.tree import DraftTree

VOCAB, GAMMA = 3, 2
NEW = GAMMA + 1
# After no token, and after each of the three; deeper contexts are those of the last two tokens, rotated.
P = [[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.4, 0.0], [0.25, 0.25, 0.5]]
Q = [
    [[0.2, 0.5, 0.3], [0.4, 0.5, 0.1], [0.3, 0.3, 0.4], [0.25, 0.25, 0.5]],
    [[0.6, 0.1, 0.3], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.9, 0.05, 0.05]],
    [[0.1, 0.1, 0.8], [0.3, 0.0, 0.7], [0.5, 0.1, 0.4], [0.4, 0.4, 0.2]],
]


def after(table: list[list[float]], context: tuple[int, ...]) -> torch.Tensor:
    """``[V]`` distribution of the next token."""
    row = torch.tensor(table[context[-1] + 1 if context else 0], dtype=torch.float64)
    return row.roll(context[0]) if len(context) > 1 else row


def joint() -> torch.Tensor:
    """``[V] * NEW``: the target's own."""
    result = torch.ones((VOCAB,) * NEW, dtype=torch.float64)
    for path in itertools.product(range(VOCAB), repeat=NEW):
        for depth, token in enumerate(path):
            result[path] *= after(P, path[:depth])[token]
    return result


def drafts(tables: list[list[list[float]]]) -> Iterator[tuple[float, MergedTree, torch.Tensor]]:
    """Every combination of one sequence from each table of q: its probability, its tree, and p ``[N+1, V]`` over it."""
    for tails in itertools.product(itertools.product(range(VOCAB), repeat=GAMMA), repeat=len(tables)):
        pairs = list(zip(tables, tails, strict=True))
        q = torch.stack([torch.stack([after(table, tail[:d]) for d in range(GAMMA)]) for table, tail in pairs])
        weight = float(q.gather(2, torch.tensor(tails)[..., None]).prod())
        if weight > 0:
            tree = MergedTree.merge(torch.tensor(tails), q, frozenset())
            yield weight, tree, torch.stack([after(P, context) for context in contexts(tree)])


def contexts(tree: MergedTree) -> list[tuple[int, ...]]:
    """The draft tokens up to each of [root, nodes]."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.trie.tokens, tree.trie.parents, strict=True):
        found.append((*found[parent + 1], token))
    return found


def deduplicated(tree: MergedTree) -> MergedTree:
    """Wrong on purpose: a node that several sequences drew is one trial, with the q of the first."""
    lines = zip(tree.inner, tree.children.tolist(), tree.q_rows.tolist(), strict=True)
    unique = {row: dict(reversed(list(zip(nodes, q_rows, strict=True)))) for row, nodes, q_rows in lines}
    trials = {row: sorted((node, q_row) for node, q_row in line.items() if node >= 0) for row, line in unique.items()}
    inner = sorted(trials, key=lambda row: -len(trials[row]))
    most = len(trials[inner[0]])
    padded = torch.tensor([trials[row] + [(-1, 0)] * (most - len(trials[row])) for row in inner])
    numbers = [len(trials[row]) for row in inner]
    tables = {"rows": torch.tensor(inner), "children": padded[..., 0], "q_rows": padded[..., 1]}
    return replace(tree, inner=inner, trials=numbers, **tables)


def outcomes(tree: MergedTree, chances: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """``[V] * NEW``: the next tokens, when each trial passes with its chance and the bonus comes from what is left."""
    result = torch.zeros((VOCAB,) * NEW, dtype=torch.float64)
    known = contexts(tree)
    trials = {
        row: list(zip(nodes, passing, strict=True))
        for row, nodes, passing in zip(tree.rows.tolist(), tree.children.tolist(), chances.tolist(), strict=True)
    }

    def walk(row: int, weight: float) -> None:
        for node, chance in trials.get(row, []):
            assert chance >= 0 and (node >= 0 or chance == 0)
            if node >= 0:
                walk(node + 1, weight * min(chance, 1.0))
                weight *= 1.0 - min(chance, 1.0)
        for token in range(VOCAB):
            spread((*known[row], token), weight * float(left[row, token] / left[row].sum()))

    def spread(path: tuple[int, ...], weight: float) -> None:
        if len(path) == NEW:
            result[path] += weight
        elif weight > 0:
            for token, probability in enumerate(after(P, path).tolist()):
                spread((*path, token), weight * probability)

    walk(0, 1.0)
    return result


def committed(
    tables: list[list[list[float]]], trials: Trials, change: Callable[[MergedTree], MergedTree] = lambda tree: tree
) -> torch.Tensor:
    """``[V] * NEW``: what a method commits that drafts one sequence from each table and verifies by ``trials``.

    Args:
        change: made to every tree before it is verified.
    """
    result = torch.zeros((VOCAB,) * NEW, dtype=torch.float64)
    for weight, drafted, p in drafts(tables):
        tree = change(drafted)
        chances, p[tree.rows] = trials(tree, p[tree.rows])
        result += weight * outcomes(tree, chances, p)
    return result


def bias(found: torch.Tensor) -> float:
    """Total variation between a distribution of the next tokens and the target's."""
    return 0.5 * float((found - joint()).abs().sum())


def accepted(tables: list[list[list[float]]], trials: Trials) -> float:
    """Probability that the first token of some draft is accepted."""
    result = 0.0
    for weight, tree, p in drafts(tables):
        passing = trials(tree, p[tree.rows])[0][tree.inner.index(0)].clamp_max(1.0)
        result += weight * (1.0 - float((1.0 - passing).prod()))
    return result


def sampled(tables: list[list[list[float]]], rule: Callable[..., object], runs: int, seed: int = 0) -> float:
    """How far a whole rule's first two tokens over ``runs`` random drafts are from the target's distribution.

    In standard deviations of the chi-square statistic above its mean.
    """
    generator = torch.Generator().manual_seed(seed)
    every = list(drafts(tables))
    weights = torch.tensor([weight for weight, _, _ in every])
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for index in torch.multinomial(weights, runs, replacement=True, generator=generator).tolist():
        _, tree, p = every[index]
        verdict = rule(tree, p.log()[None], DraftTree.ancestors(tree), _AS_IT_IS, generator)
        first, *more = verdict.tokens[0]  # type: ignore[attr-defined]
        if more:
            counts[first, more[0]] += 1
        else:
            counts[first] += after(P, (first,))
    expected = joint().sum(2) * runs
    cells = expected > 0
    assert counts[~cells].sum() == 0, "a token that the target excludes was committed"
    degrees = int(cells.sum()) - 1
    statistic = float(((counts - expected)[cells] ** 2 / expected[cells]).sum())
    return (statistic - degrees) / (2 * degrees) ** 0.5


class _AsItIs:
    """A ``Sampling`` that leaves float64 alone."""

    greedy = False

    @staticmethod
    def probabilities(logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)


_AS_IT_IS = _AsItIs()
