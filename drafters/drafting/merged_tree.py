"""Drafted sequences merged into one draft tree, and the walk down it, for methods whose drafts compete (SpecInfer,
SpecTr).

A merged node saves the target a row, but it stays as many trials as sequences drew it: each is a sample of its own.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.drafting.trie import Trie
from drafters.loop.acceptance import Verdict
from drafters.loop.sampling import Sampling, draw
from drafters.loop.tree import DraftTree, to_device

# (tree, p [U, V] at its inner rows) -> the chances [U, K] of each trial to be accepted given that those before it were
# not (above 1: certain; 0 for padding), and what of p is left where none is, [U, V], not normalised.
Trials = Callable[["MergedTree", Tensor], tuple[Tensor, Tensor]]


@dataclass
class MergedTree(DraftTree):
    """S sequences of up to gamma tokens, merged by common prefixes. One batch row.

    ``q [1, S * gamma, V]`` holds at row ``s * gamma + d`` what token d of sequence s was drawn from (``q_row`` is not
    used: a merged node was drawn from several). The sequences through a node propose its children: the node's trials.
    They are listed only where tokens were sampled; U inner rows have trials, at most K each.

    Attributes:
        trie: the tree on the host; ``trie.paths[s]`` are the nodes of sequence s.
        inner: the rows of [root, nodes] that have children, those with the most trials first.
        trials: the number of trials of each of them.
        rows: ``[U]`` the same as ``inner``.
        children: ``[U, K]`` the node that each trial proposes, in sequence order; -1 pads.
        q_rows: ``[U, K]`` the row of q that it was drawn from.
    """

    trie: Trie = field(default_factory=Trie)
    inner: list[int] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    children: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    q_rows: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))

    @classmethod
    def merge(cls, sequences: Tensor, q: Tensor | None, stop: frozenset[int]) -> "MergedTree":
        """Merge ``sequences [S, gamma]``, each cut behind its first token in ``stop`` (EOS).

        One copy to the host and one back. Verification then needs none but the verdict's.

        Args:
            q: ``[S, gamma, V]`` what the tokens were drawn from; None where they will be verified greedily.
        """
        (count, gamma), device = sequences.shape, sequences.device
        trie = Trie.of((tuple(line) for line in sequences.tolist()), gamma, stop)
        trials = _trials(trie.paths, gamma) if q is not None else {}
        inner = sorted(trials, key=lambda row: -len(trials[row]))
        numbers = [len(trials[row]) for row in inner]
        most = max(numbers, default=0)
        padded = [trials[row] + [(-1, 0)] * (most - len(trials[row])) for row in inner]
        children = [node for line in padded for node, _ in line]
        q_rows = [row for line in padded for _, row in line]
        tokens, rows, child_of, q_row_of = to_device(device, trie.tokens, inner, children, q_rows)
        return cls.from_parents(
            tokens[None],
            trie.parents,
            q=q.reshape(1, count * gamma, -1) if q is not None else None,
            trie=trie,
            inner=inner,
            trials=numbers,
            rows=rows,
            children=child_of.view(len(inner), most),
            q_rows=q_row_of.view(len(inner), most),
        )

    def walk(self, trials: Trials, logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Verdict:
        """From the root, draw the outcome of a node's trials, go on where one is accepted, else draw the bonus.

        All nodes are judged side by side, those too that are not reached, so that the device is asked once. (On a CPU
        too: what an operation costs there is mostly its launch.)

        Args:
            trials: how they are judged. logits: ``[1, N+1, V]`` of [root, nodes].
        """
        # Every node's trials at once, on the device, and a bonus drawn from what each leaves; one copy to the host.
        p = sampling.probabilities(logits[0])
        chances, p[self.rows] = trials(self, p[self.rows])
        passed = torch.rand(chances.shape, device=p.device, generator=generator) < chances
        first = passed.int().argmax(1, keepdim=True)
        child = torch.where(passed.gather(1, first), self.children.gather(1, first), -1)[:, 0]
        outcome = torch.cat([child, draw(p, generator)]).tolist()
        # Down from the root, on the host.
        after = dict(zip(self.inner, outcome, strict=False))
        rows, tokens = [0], []
        while (node := after.get(rows[-1], -1)) >= 0:
            rows.append(node + 1)
            tokens.append(self.trie.tokens[node])
        bonus = outcome[len(self.inner) + rows[-1]]
        return Verdict([rows], [[*tokens, bonus]], [max(map(len, self.trie.paths))])

    def shared(self, sequence: int, rows: Iterable[int]) -> int:
        """How many tokens of a sequence were accepted, given a verdict's ``rows``."""
        path = self.trie.paths[sequence]
        agreed = 0
        for node, row in zip(path, list(rows)[1:], strict=False):
            if node + 1 != row:
                break
            agreed += 1
        return agreed


def _trials(paths: list[list[int]], gamma: int) -> dict[int, list[tuple[int, int]]]:
    """Row -> its trials as (child node, row of q)."""
    trials: dict[int, list[tuple[int, int]]] = {}
    for sequence, path in enumerate(paths):
        row = 0
        for depth, node in enumerate(path):
            trials.setdefault(row, []).append((node, sequence * gamma + depth))
            row = node + 1
    return trials
