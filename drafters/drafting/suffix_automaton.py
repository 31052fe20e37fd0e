"""A suffix automaton (Blumer et al. 1985): every part of a growing text, how often it stood there, and what followed.

A state stands for all parts that end at the same places of the text. Reading a token takes amortised constant time, and
one count more for each state of the text's end; memory is at most two states a token. A suffix tree holds the same.
"""


class SuffixAutomaton:
    """Of one text.

    Attributes:
        follow: of each state, token -> the state that it leads to. link: of each state, that of its longest suffix that
            ends at more places; -1 of the root's, which is state 0 and stands for the empty part.
        length: of the longest part that each state stands for. count: at how many places it ends. seen: the last one.
        last: the state of the whole text. size: its tokens.
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
            if length[after] != length[at] + 1:  # its shorter parts end here, too, and so stand no longer for the same
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
        """The longest end of another text that stands in this one, as its state and its length, a token later."""
        while state > 0 and token not in self.follow[state]:
            state = self.link[state]
            match = self.length[state]
        if token not in self.follow[state]:
            return 0, 0
        return self.follow[state][token], match + 1

    def end(self) -> tuple[int, int]:
        """The longest end of this text that stood in it before, likewise."""
        state = max(self.link[self.last], 0)
        return state, self.length[state]
