"""How often something of a kind was right, counted while decoding."""

DOUBT = 6.0  # cases that the guess beforehand counts for
WINDOW = 400.0  # cases of a kind that are remembered: the next prompt may be another kind of text


class Counted:
    """Shares by kind, from counts that fade.

    Args:
        kinds: how many there are.
    """

    def __init__(self, kinds: int) -> None:
        self._tried, self._right = [0.0] * kinds, [0.0] * kinds

    def share(self, kind: int, guess: float) -> float:
        """Of a kind; before anything is counted the ``guess``."""
        return (self._right[kind] + DOUBT * guess) / (self._tried[kind] + DOUBT)

    def learn(self, kind: int, right: bool) -> None:
        """One case more."""
        if self._tried[kind] >= WINDOW:
            self._tried[kind] *= 1 - 1 / WINDOW
            self._right[kind] *= 1 - 1 / WINDOW
        self._tried[kind] += 1
        self._right[kind] += right
