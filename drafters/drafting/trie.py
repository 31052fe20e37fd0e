"""Token sequences merged by common prefixes, on the host (Lookahead, Ouroboros, SpecInfer, SpecTr)."""

from collections.abc import Iterable


class Trie:
    """Token sequences merged by common prefixes, each cut to ``longest`` tokens and after its first token in ``stop``.

    Nodes are in topological order.

    Attributes:
        tokens: token of each node.
        parents: parent of each node, -1 for the first tokens.
        paths: the nodes of each sequence.
        children: (node, token) -> its child with that token.
    """

    def __init__(
        self, sequences: Iterable[tuple[int, ...]] = (), longest: int = 0, stop: frozenset[int] = frozenset()
    ) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.paths: list[list[int]] = []
        self.children: dict[tuple[int, int], int] = {}
        for sequence in sequences:
            at, path = -1, []
            for token in sequence[: max(longest, 0)]:
                node = self.children.setdefault((at, token), len(self.tokens))
                if node == len(self.tokens):
                    self.tokens.append(token)
                    self.parents.append(at)
                path.append(node)
                at = node
                if token in stop:
                    break
            self.paths.append(path)
