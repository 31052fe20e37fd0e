"""Token sequences merged by their common prefixes, on the host (Lookahead, Ouroboros, SpecInfer, SpecTr)."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Trie:
    """Tails merged by common prefixes: nodes in topological order, hanging from the token that all tails follow.

    Attributes:
        tokens: each node's token. parents: each node's parent, -1 at the top.
        paths: the nodes of each tail.
        children: (node, token) -> the child of that node that holds the token.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    children: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, tails: Iterable[tuple[int, ...]], longest: int, stop: frozenset[int] = frozenset()) -> "Trie":
        """Merge tails, each cut to ``longest`` tokens and behind its first token in ``stop`` (EOS)."""
        trie = cls()
        for tail in tails:
            at, path = -1, []
            for token in tail[: max(longest, 0)]:
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
