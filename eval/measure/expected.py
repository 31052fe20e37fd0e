"""What a drafter that chooses options itself (``auto``) expects of its steps: the only place that asks its policy."""

from drafters import Drafter
from drafters.base import Expected
from drafters.loop.sampling import Sampling
from drafters.policy import costs


def prepare(drafter: Drafter, batch: int, sampling: Sampling, longest: int) -> None:
    """Measure the costs of steps for texts of up to ``longest`` tokens, so that no prompt's time contains it."""
    costs.prepare(drafter, batch, sampling, longest)


def expected_of(drafter: Drafter, before: Expected | None = None) -> Expected | None:
    """Return what the drafter has expected so far, or since ``before``; None if it chooses nothing."""
    found = drafter.policy.expected() if drafter.policy else None
    if found is None or before is None:
        return found
    steps, tokens, plain = (now - then for now, then in zip(found[:3], before[:3], strict=True))
    return Expected(steps, tokens, plain, found.choice)
