"""When to look for copies: where a step takes a millisecond, looking takes some hundredths of it in vain."""

import math

HOPE = 0.25  # steps without a draft that a look is taken to gain before anything is known
# Of the past looks, by which the next one is judged. Copies come in runs: on the bundled target, suffix decoding was 4%
# faster by the last hundred looks and rests of 32 steps than by the last thirty and rests of 64.
MEMORY = 0.99
PROBES, REST = 0.01, 32  # of the time, that may be lost; steps without a look, at most
FRUITLESS = 0.65  # times as long as a step that copies takes to find, weigh and draft it: one that finds none worth it


class Looking:
    """Looks in every step while that gains more than it takes; else not in the next steps, so that no more than
    ``PROBES`` of the time is lost, but in every ``REST``-th at least.

    By what weighing a copy takes, measured beforehand, and what looks have gained, never by the clock.
    """

    def __init__(self) -> None:
        self._gained, self._took, self._rest = HOPE, 0.0, 0
        self.now = True  # whether the present step does

    def begin(self) -> None:
        """Another text, or one more."""
        self._rest = 0

    def step(self) -> bool:
        """Whether the next step does."""
        self.now = self._rest == 0
        self._rest = max(self._rest - 1, 0)
        return self.now

    def rest(self, steps: int) -> None:
        """The last so many did not."""
        self.now, self._rest = False, max(self._rest - steps, 0)

    @property
    def rests(self) -> int:
        """How many of the next steps do not."""
        return self._rest

    def judge(self, took: float, gained: float) -> None:
        """What the step's look took and gained, in steps without a draft."""
        self._took = MEMORY * self._took + (1 - MEMORY) * took
        self._gained = MEMORY * self._gained + (1 - MEMORY) * gained
        if gained <= 0.0:
            self._rest = min(max(math.ceil((self._took - self._gained) / PROBES) - 1, 0), REST)

    def gained_more(self, steps: float) -> None:
        """What it has brought beside a head's draft."""
        self._gained += (1 - MEMORY) * steps
        if steps > 0.0:
            self._rest = 0
