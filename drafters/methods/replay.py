"""Replay: measure the speed of untrained weights, with an acceptance profile from a trained drafter.

Random weights of a 7B shape show the cost of a step, but their drafts are never accepted. Here every forward, tree and
cache of the inner drafter runs as usual, and only the accepted depth is drawn from the profile. The output is not the
target's, and reports of its figures must say "replay".
"""

from typing import Annotated, Any

import torch
from pydantic import Field, InstanceOf
from torch import Tensor

from drafters.base import Drafter
from drafters.config import Config, Seed
from drafters.loop.acceptance import Rule, Verdict, verdict_of
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods import inner_drafter
from drafters.model.backend import most_likely
from drafters.model.target import FeatureOutput, TargetModel

Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class ReplayOptions(Config):
    """Options.

    ``inner``: the drafter to measure: its name and options, or one built for the same target.
    ``profile``: n-alpha for n = 0, 1, ...: the acceptance rate at depth n + 1, given that the tokens above were
    accepted; the last value applies to all greater depths.
    ``seed``: seed of the draws from the profile.
    """

    inner: InstanceOf[Drafter] | dict[str, Any]
    profile: list[Rate] = Field(min_length=1)
    seed: Seed = 0


class ReplayDrafter(Drafter):
    """Runs the inner drafter with accepted depths from a profile. Greedy only.

    Raises:
        ValueError: the inner drafter cannot be built, or was built for another target; a temperature above 0.
    """

    name = "replay"
    options = ReplayOptions
    lossless = False
    max_batch = None

    def __init__(self, target: TargetModel, options: ReplayOptions) -> None:
        super().__init__(target, options)
        self.inner = inner = inner_drafter(options.inner, target)
        self.profile, self.seed = options.profile, options.seed
        self.max_batch = inner.max_batch  # type: ignore[misc]
        self.max_draft, self.max_context = inner.max_draft, inner.max_context
        self.taps, self.remembers = inner.taps, inner.remembers

    def rule(self, sampling: Sampling) -> Rule:
        if not sampling.greedy:
            raise ValueError(f"replay decodes greedily only, found temperature {sampling.temperature:g}; use 0")

        def verify(
            draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None = None
        ) -> Verdict:
            # As the greedy rule, its copy to the host included, without the comparison of tokens.
            return verdict_of(draft, most_likely(logits), self._accepted)

        return verify

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)
        self.inner.begin(state, output)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        self.inner.join(state, rows, part, output)

    def propose(self, state: DecodeState) -> DraftTree:
        return self.inner.propose(state)

    def while_verifying(self, state: DecodeState, draft: DraftTree, output: FeatureOutput) -> None:
        self.inner.while_verifying(state, draft, output)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        self.inner.observe(state, draft, output, verdict)

    def _accepted(
        self, tokens: list[int], parents: list[int], valid: list[int] | None, choices: list[int]
    ) -> tuple[int, int]:
        """Return a random row of the depth that the profile draws, and the target's choice after it."""
        depth = [0]
        for node, parent in enumerate(parents):
            depth.append(depth[parent + 1] + 1 if valid is None or valid[node] else -1)
        deepest, reached = max(depth), 0
        while reached < deepest and self._uniform() < self._rate(reached):
            reached += 1
        rows = [row for row, level in enumerate(depth) if level == reached]
        best = rows[int(torch.randint(len(rows), (), generator=self._generator))]
        return best, choices[best]

    def _uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float32, generator=self._generator))

    def _rate(self, level: int) -> float:
        return self.profile[min(level, len(self.profile) - 1)]
