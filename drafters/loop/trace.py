"""Steps and times of one generation, and the metrics derived from them.

tau, the average acceptance length, is the number of tokens committed per target forward, bonus included: 1.0 in plain
decoding. The prefill and its token are timed separately and not counted.
"""

from dataclasses import dataclass, field

from drafters.model.runner import Clock


@dataclass
class Step:
    """One step of one batch row.

    Attributes:
        row: index of the batch row.
        drafted: nodes of the draft.
        depth: nodes of its longest path.
        accepted: draft tokens accepted by the rule.
        committed: tokens appended, bonus included, after the cut at EOS and limits.
        forwards: target forwards: the loop's one, and those that the drafter spent on its draft (MJGD).
        source: name of the inner drafter that made the draft (hybrids).
    """

    row: int
    drafted: int
    depth: int
    accepted: int
    committed: int
    forwards: int = 1
    source: str = ""


@dataclass
class Trace:
    """Steps of one ``generate`` call, and their times in seconds.

    A step's time is the sum of its draft, verify and other seconds. ``model_seconds`` is the part spent in forward
    passes of the target, draft models and trained heads. The remainder is overhead: pools, trees, masks, rules.
    """

    steps: list[Step] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    other_seconds: list[float] = field(default_factory=list)
    model_seconds: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0

    def read(self, clock: Clock) -> None:
        """Read the times of a finished clock: one lap for the prefill, then three laps per step."""
        laps, models = clock.laps()
        self.prefill_seconds = laps[0]
        self.draft_seconds, self.verify_seconds, self.other_seconds = laps[1::3], laps[2::3], laps[3::3]
        self.model_seconds = [sum(models[i : i + 3]) for i in range(1, len(models), 3)]

    @property
    def forwards(self) -> int:
        """Target forwards after the prefill (of the longest row of a batch)."""
        by_row: dict[int, int] = {}
        for step in self.steps:
            by_row[step.row] = by_row.get(step.row, 0) + step.forwards
        return max(by_row.values(), default=0)

    @property
    def overhead(self) -> float | None:
        """Share of the time after the prefill outside of forward passes; None if there was no step."""
        total = self.decode_seconds
        return 1.0 - sum(self.model_seconds) / total if self.model_seconds and total > 0 else None

    @property
    def decode_seconds(self) -> float:
        """Seconds after the prefill."""
        return sum(self.draft_seconds) + sum(self.verify_seconds) + sum(self.other_seconds)

    @property
    def decoded_tokens(self) -> int:
        """Tokens committed after the token of the prefill."""
        return sum(step.committed for step in self.steps)

    @property
    def tau(self) -> float:
        """Average acceptance length; 1.0 if there was no step."""
        return self.decoded_tokens / sum(step.forwards for step in self.steps) if self.steps else 1.0

    def ctar(self, w: int) -> float:
        """CTAR(w): share of steps that commit more than w tokens, bonus included (Kangaroo)."""
        return sum(step.committed > w for step in self.steps) / max(len(self.steps), 1)

    def n_alpha(self, n: int) -> float | None:
        """Share of steps that accept depth n + 1 among those that accept depth n and drafted deeper; None without any.

        For a chain this is n-alpha of the EAGLE paper; for a tree it is the acceptance rate per level.
        """
        reached = [step for step in self.steps if step.accepted >= n and step.depth > n]
        return sum(step.accepted > n for step in reached) / len(reached) if reached else None

    def joint_alpha(self, n: int) -> float | None:
        """Share of all drafts that are accepted to depth n + 1 or deeper; None if no draft is deeper than n.

        It is counted, not multiplied: the product of the n-alphas leaves out drafts that are shorter.
        """
        drafts = [step for step in self.steps if step.depth]
        reached = any(step.depth > n for step in drafts)
        return sum(step.accepted > n for step in drafts) / len(drafts) if reached else None
