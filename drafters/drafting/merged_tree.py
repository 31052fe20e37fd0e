"""Sampled sequences merged into one draft tree, and its verification (SpecInfer, SpecTr).

Merging saves target tokens. A node that n sequences drew still has n trials in verification, since each is an
independent sample.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafters.drafting.trie import Trie
from drafters.loop.acceptance import Verdict
from drafters.loop.sampling import Sampling, draw
from drafters.loop.tree import DraftTree, to_device

# (tree, p [U, V] at its inner rows) -> chances [U, K] and residuals [U, V]. A chance is the acceptance probability of a
# trial after those before it failed (1 or more: certain; 0: padding). A residual is p after all trials failed, not
# normalised.
Trials = Callable[["MergedTree", Tensor], tuple[Tensor, Tensor]]


@dataclass
class MergedTree(DraftTree):
    """S sequences of up to gamma tokens, merged by common prefixes, in a batch of one.

    Row ``s * gamma + d`` of ``q [1, S * gamma, V]`` is the distribution of token d of sequence s. ``q_row`` is unused,
    since several rows of q may have drawn a merged node. Each sequence through a row proposes one of its children: a
    trial. U inner rows have trials, at most K each; without q there are none.

    Attributes:
        trie: the tree on the host; ``trie.paths[s]`` are the nodes of sequence s.
        inner: the rows of [root, nodes] that have children, those with the most trials first.
        trials: number of trials of each inner row.
        rows: ``[U]`` ``inner`` on the device.
        children: ``[U, K]`` the node that each trial proposes, in sequence order; -1 is padding.
        q_rows: ``[U, K]`` the row of q that drew it.
    """

    trie: Trie = field(default_factory=Trie)
    inner: list[int] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)
    rows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    children: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    q_rows: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))

    @classmethod
    def merge(cls, sequences: Tensor, q: Tensor | None, stop: frozenset[int]) -> "MergedTree":
        """Merge ``sequences [S, gamma]``, each cut after its first token in ``stop`` (EOS).

        It copies to the host once and back once. Verification then copies only its result.

        Args:
            q: ``[S, gamma, V]`` the distributions that drew the tokens; None for greedy verification.
        """
        (count, gamma), device = sequences.shape, sequences.device
        trie = Trie((tuple(line) for line in sequences.tolist()), gamma, stop)
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
        """Walk from the root: continue at the child that a node's trials accept, otherwise draw the bonus.

        The trials of all rows run in parallel, also of rows that the walk does not reach, to copy to the host once.

        Args:
            trials: the method's rule for the trials of a row.
            logits: ``[1, N+1, V]`` of [root, nodes].
        """
        # Run the trials of all rows, and draw a bonus from each residual; one copy to the host.
        p = sampling.probabilities(logits[0])
        chances, p[self.rows] = trials(self, p[self.rows])
        passed = torch.rand(chances.shape, dtype=torch.float32, device=p.device, generator=generator) < chances
        first = passed.int().argmax(1, keepdim=True)
        child = torch.where(passed.gather(1, first), self.children.gather(1, first), -1)[:, 0]
        outcome = torch.cat([child, draw(p, generator)]).tolist()
        # Walk down from the root, on the host.
        after = dict(zip(self.inner, outcome, strict=False))
        rows, tokens = [0], []
        while (node := after.get(rows[-1], -1)) >= 0:
            rows.append(node + 1)
            tokens.append(self.trie.tokens[node])
        bonus = outcome[len(self.inner) + rows[-1]]
        return Verdict([rows], [[*tokens, bonus]], [max(map(len, self.trie.paths))])

    def shared(self, sequence: int, rows: Iterable[int]) -> int:
        """Number of accepted tokens of a sequence, given a verdict's ``rows``."""
        path = self.trie.paths[sequence]
        agreed = 0
        for node, row in zip(path, list(rows)[1:], strict=False):
            if node + 1 != row:
                break
            agreed += 1
        return agreed


def _trials(paths: list[list[int]], gamma: int) -> dict[int, list[tuple[int, int]]]:
    """Row of [root, nodes] -> its trials as (child node, row of q)."""
    trials: dict[int, list[tuple[int, int]]] = {}
    for sequence, path in enumerate(paths):
        row = 0
        for depth, node in enumerate(path):
            trials.setdefault(row, []).append((node, sequence * gamma + depth))
            row = node + 1
    return trials
