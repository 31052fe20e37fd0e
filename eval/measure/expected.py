"""What a drafter that chooses options itself (``auto``) expects of its steps: the only place that asks a drafter."""

from typing import NamedTuple

from drafters import Drafter
from drafters.loop.sampling import Sampling


class Expected(NamedTuple):
    """Expected ``tokens`` over ``steps``, and the time of these steps in units of one plain step.

    ``choice`` is the latest choice, in words.
    """

    steps: float
    tokens: float
    plain_steps: float
    choice: str


def prepare(drafter: Drafter, batch: int, sampling: Sampling, longest: int) -> None:
    """Measure the costs of steps for texts of up to ``longest`` tokens, so that no prompt's time contains it."""
    drafter.prepare(batch, sampling, longest)


def expected_of(drafter: Drafter, before: Expected | None = None) -> Expected | None:
    """Return what the drafter has expected so far, or since ``before``; None if it chooses nothing."""
    found = drafter.promised()
    if found is None:
        return None
    start = before[:3] if before is not None else (0.0, 0.0, 0.0)
    steps, tokens, plain = (now - then for now, then in zip(found[:3], start, strict=True))
    return Expected(steps, tokens, plain, found.choice)
