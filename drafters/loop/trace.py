"""What each step of a generation did and how long it took, and the figures derived from it.

tau, the average acceptance length, is tokens committed per target forward, bonus included: plain decoding is 1.0. The
prefill and the first token, which it gives, are timed apart and not counted.
"""

from dataclasses import dataclass, field

from drafters.model.runner import Clock


@dataclass
class Step:
    """One step of one batch row.

    Attributes:
        drafted: nodes proposed. depth: length of the longest path among them.
        accepted: draft tokens accepted by the rule. committed: tokens kept, after EOS and limits cut them.
        forwards: target forwards it took: the loop's one, and those that a drafter spent on its draft (MJGD).
        source: which of several drafters made the draft.
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
    """Steps and times (seconds) of one ``generate`` call.

    A step's draft, verify and other seconds are all of it; ``model_seconds`` is the part of it that went into forward
    passes, of the target, draft models and trained heads alike. The rest is overhead: pools, trees, masks, rules.
    """

    steps: list[Step] = field(default_factory=list)
    draft_seconds: list[float] = field(default_factory=list)
    verify_seconds: list[float] = field(default_factory=list)
    other_seconds: list[float] = field(default_factory=list)
    model_seconds: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0

    def read(self, clock: Clock) -> None:
        """Take over a finished clock's times: the prefill's lap, then three laps a step."""
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
        """Share of the time after the prefill that went into no forward pass; None where nothing was decoded."""
        total = self.decode_seconds
        return 1.0 - sum(self.model_seconds) / total if self.model_seconds and total > 0 else None

    @property
    def decode_seconds(self) -> float:
        """Seconds of everything after the prefill."""
        return sum(self.draft_seconds) + sum(self.verify_seconds) + sum(self.other_seconds)

    @property
    def decoded_tokens(self) -> int:
        """Tokens committed after the prefill's."""
        return sum(step.committed for step in self.steps)

    @property
    def tau(self) -> float:
        """Average acceptance length; 1.0 where no step was needed."""
        return self.decoded_tokens / sum(step.forwards for step in self.steps) if self.steps else 1.0

    def ctar(self, w: int) -> float:
        """CTAR(w): share of steps that accept more than w tokens, bonus included (Kangaroo)."""
        return sum(step.committed > w for step in self.steps) / max(len(self.steps), 1)

    def n_alpha(self, n: int) -> float | None:
        """Share of steps accepting depth n + 1 among those that accepted n and drafted deeper; None if there is none.

        For a chain it is the EAGLE paper's n-alpha; for a tree, the rate per level.
        """
        reached = [step for step in self.steps if step.accepted >= n and step.depth > n]
        return sum(step.accepted > n for step in reached) / len(reached) if reached else None

    def joint_alpha(self, n: int) -> float | None:
        """Share of drafts accepted to depth n + 1 or deeper: counted, for the n-alphas' product is of deeper drafts
        alone where some are shorter. None where no draft is so deep.
        """
        drafts = [step for step in self.steps if step.depth]
        reached = any(step.depth > n for step in drafts)
        return sum(step.accepted > n for step in drafts) / len(drafts) if reached else None
