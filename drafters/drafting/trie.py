"""Token sequences merged by common prefixes, on the host (Lookahead, Ouroboros, SpecInfer, SpecTr)."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Trie:
    """Token sequences merged by common prefixes; nodes are in topological order.

    Attributes:
        tokens: token of each node.
        parents: parent of each node, -1 for the first tokens.
        paths: the nodes of each sequence.
        children: (node, token) -> its child with that token.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, sequences: Iterable[tuple[int, ...]], longest: int, stop: frozenset[int] = frozenset()) -> "Trie":
        """Merge sequences, each cut to ``longest`` tokens and after its first token in ``stop`` (EOS)."""
        trie = cls()
        for sequence in sequences:
            at, path = -1, []
            for token in sequence[: max(longest, 0)]:
                node = trie.children.setdefault((at, token), len(trie.tokens))
                if node == len(trie.tokens):
                    trie.tokens.append(token)
                    trie.parents.append(at)
                path.append(node)
                at = node
                if token in stop:
                    break
            trie.paths.append(path)
        return trie
