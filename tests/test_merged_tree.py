"""Merging drafted sequences into one tree, worked by hand, and the walk down it."""

import torch

from drafters import Sampling
from drafters.drafting.merged_tree import MergedTree

#   root -> 5 -> 6 -> 7     sequences 5 6 7, 8 9 (EOS), 5 6 4
#                  -> 4
#        -> 8 -> 9
SEQUENCES = torch.tensor([[5, 6, 7], [8, 9, 3], [5, 6, 4]])
EOS = frozenset([9])
TOKENS, PARENTS = [5, 6, 7, 8, 9, 4], [-1, 0, 1, -1, 3, 1]


def merged() -> MergedTree:
    return MergedTree.merge(SEQUENCES, torch.rand(3, 3, 10), EOS)


def test_sequences_share_their_prefixes() -> None:
    """Catches nodes verified twice, tokens drafted behind EOS, and a child before its parent."""
    tree = merged()
    assert (tree.tokens.tolist(), tree.parents.tolist()) == ([TOKENS], [PARENTS])
    assert tree.trie.paths == [[0, 1, 2], [3, 4], [0, 1, 5]]
    assert not tree.is_chain and tree.size == 6
    known, tree.see = tree.see, None
    assert known is not None and torch.equal(known, tree.ancestors())


def test_every_sequence_keeps_its_trial() -> None:
    """Catches merged nodes counted as one trial, a trial without its own row of q, and EOS with children. By hand:

    the root has three trials (sequences 0, 1, 2 at depth 0: rows 0, 3, 6 of q), row 1 and row 2 (tokens 5 and 6) the
    two of sequences 0 and 2, row 4 (token 8) the one of sequence 1; row 5 (EOS) none.
    """
    tree = merged()
    assert (tree.inner, tree.trials, tree.rows.tolist()) == ([0, 1, 2, 4], [3, 2, 2, 1], [0, 1, 2, 4])
    assert tree.children.tolist() == [[0, 3, 0], [1, 1, -1], [2, 5, -1], [4, -1, -1]]
    assert [line[:n] for line, n in zip(tree.q_rows.tolist(), tree.trials, strict=True)] == [
        [0, 3, 6],
        [1, 7],
        [2, 8],
        [4],
    ]
    assert tree.q is not None and tree.q.shape == (1, 9, 10)


def test_walk() -> None:
    """Catches a bonus from another row than the last accepted one, and a trial accepted after an accepted one."""
    tree = merged()
    logits = torch.full((1, 7, 10), -100.0)
    logits[0, torch.arange(7), torch.arange(7)] = 0.0  # row i's bonus is token i
    never, always = 0.0, 2.0

    def walk(*chances: list[float]) -> tuple[list[int], list[int]]:
        judged = lambda tree, p: (torch.tensor(chances), p)  # noqa: E731
        verdict = tree.walk(judged, logits, Sampling(1.0), torch.Generator().manual_seed(0))
        assert verdict.depths == [3]
        return verdict.rows[0], verdict.tokens[0]

    nothing = [never] * 3
    assert walk(nothing, [always, never, never], nothing, nothing) == ([0], [0])
    assert walk([never, never, always], nothing, nothing, [always, 0, 0]) == ([0, 1], [5, 1])
    assert walk([never, always, always], [always, 0, 0], nothing, [always, 0, 0]) == ([0, 4, 5], [8, 9, 5])
    assert walk([always, 0, 0], [0, always, 0], [never, always, 0], nothing) == ([0, 1, 2, 6], [5, 6, 4, 6])


def test_what_a_sequence_shares_with_the_accepted_path() -> None:
    """Catches a draft cache that keeps rows of a sequence beyond the accepted path, or drops rows that still hold."""
    tree = merged()
    assert [tree.shared(s, [0, 1, 2, 6]) for s in range(3)] == [2, 0, 3]
    assert [tree.shared(s, [0, 4]) for s in range(3)] == [0, 1, 0]
    assert [tree.shared(s, [0]) for s in range(3)] == [0, 0, 0]
