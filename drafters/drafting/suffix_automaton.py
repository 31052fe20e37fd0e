"""Suffix automaton (Blumer et al. 1985) of a growing text: counts of every substring and of the tokens after it.

A state represents all substrings that end at the same positions of the text. Memory is at most two states per token.
Reading a token takes amortised constant time, plus one count for each state of a suffix of the text. Used by suffix
decoding, whose paper keeps the same data in a suffix tree.
"""


class SuffixAutomaton:
    """The automaton of one text. State 0 is the root: the empty substring. Each list has one entry per state.

    Attributes:
        follow: next states, by token.
        link: state of its longest suffix that ends at more positions; -1 for the root.
        length: tokens of its longest substring.
        count: number of positions where its substrings end.
        seen: last of these positions.
        last: the state of the whole text.
        size: number of tokens of the text.
    """

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]
        self.link, self.length, self.count, self.seen = [-1], [0], [0], [0]
        self.last = self.size = 0

    def read(self, token: int) -> None:
        """Append a token."""
        follow, link, length = self.follow, self.link, self.length
        new, at = len(follow), self.last
        self._add({}, self.size + 1, 0, 0, 0)
        while at >= 0 and token not in follow[at]:
            follow[at][token] = new
            at = link[at]
        if at >= 0:
            link[new] = after = follow[at][token]
            if length[after] != length[at] + 1:  # only its shorter substrings end here too: split the state
                link[new] = short = len(follow)
                self._add(dict(follow[after]), length[at] + 1, link[after], self.count[after], self.seen[after])
                link[after] = short
                while at >= 0 and follow[at].get(token) == after:
                    follow[at][token] = short
                    at = link[at]
        self.last, self.size = new, self.size + 1
        at, count, seen, now = new, self.count, self.seen, self.size
        while at >= 0:
            count[at] += 1
            seen[at] = now
            at = link[at]

    def _add(self, follow: dict[int, int], length: int, link: int, count: int, seen: int) -> None:
        self.follow.append(follow)
        self.length.append(length)
        self.link.append(link)
        self.count.append(count)
        self.seen.append(seen)

    def step(self, state: int, match: int, token: int) -> tuple[int, int]:
        """Follow another text by one ``token``.

        Args:
            state: state of the longest suffix of the other text that occurs in this one.
            match: length of that suffix.

        Returns:
            The same two after ``token``.
        """
        while state > 0 and token not in self.follow[state]:
            state = self.link[state]
            match = self.length[state]
        if token not in self.follow[state]:
            return 0, 0
        return self.follow[state][token], match + 1

    def end(self) -> tuple[int, int]:
        """State and length of the longest suffix of this text that occurred in it before."""
        state = max(self.link[self.last], 0)
        return state, self.length[state]
