"""Hybrid: copy where the text repeats itself, use a learned head elsewhere (SuffixDecoding, Oliaro et al. 2024).

The paper decides by a threshold on the copy's score. ``match: auto`` decides by expected tokens per second, from the
rate at which similar copies were right and from the acceptance of the head's drafts.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf

from drafters.base import Drafter
from drafters.config import Config, Length
from drafters.drafting.retrieval import NOTHING, Copy, Retrieval, draft_of
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods import inner_drafter
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.copies import CopyPolicy
from drafters.policy.shape import ShapePolicy

LOOKUP: dict[str, Any] = {"drafter": "prompt_lookup", "gamma": 16, "max_ngram": 8}


class HybridOptions(Config):
    """Options.

    ``head``: the drafter of steps without a copy and its options, for example ``{drafter: eagle, checkpoint: ...}``.
    ``lookup``: the retrieval drafter and its options; by default prompt lookup of 16 tokens and matches of up to 8.
    ``match``: least length in tokens of a match to copy from; auto copies where, and as many tokens as, that is
    more profitable than the head's draft. A batch copies if half of its unfinished sequences have such a match.

    ``head`` and ``lookup`` may also be drafters built for the same target.
    """

    head: InstanceOf[Drafter] | dict[str, Any]
    lookup: InstanceOf[Drafter] | dict[str, Any] = Field(default_factory=lambda: dict(LOOKUP))
    match: Annotated[Length, Field(ge=1)] | Literal["auto"] = "auto"


class HybridDrafter(Drafter):
    """Drafts each step by the retrieval drafter or by the head. All sequences of a batch copy, or none.

    The choice depends only on the text before the step, so it is lossless if both drafters are.

    Raises:
        ValueError: ``lookup`` is no retrieval drafter; ``head`` must draft every step itself, or has a fixed shape with
            ``match: auto``.
    """

    name = "hybrid"
    options = HybridOptions
    max_batch = None

    def __init__(self, target: TargetModel, options: HybridOptions) -> None:
        super().__init__(target, options)
        self.head, self.match = inner_drafter(options.head, target), options.match
        self.lookup = _copying(inner_drafter(options.lookup, target))
        self.parts = self.head, self.lookup
        _check(self.head, self.match)
        most = [one.max_batch for one in (self.head, self.lookup) if one.max_batch is not None]
        self.max_batch = min(most, default=None)  # type: ignore[misc]
        self.max_draft = max(self.head.max_draft, self.lookup.max_draft)
        self.max_context = min(self.head.max_context, self.lookup.max_context)
        self.taps = self.head.taps
        self.remembers = self.head.remembers or self.lookup.remembers
        self.policy: CopyPolicy | None = CopyPolicy() if self.match == "auto" else None
        self._copies: list[Copy] = []  # of the latest step, before the policy cut them
        self._head_drafted = False

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self.head.begin(state, output)
        self.lookup.begin(state, output)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        self.head.join(state, rows, part, output)
        self.lookup.join(state, rows, part, output)

    def propose(self, state: DecodeState) -> DraftTree:
        self._copies = self.lookup.retrieve_all(state)
        if self.policy is not None:
            assert isinstance(self.head.policy, ShapePolicy)  # _check has refused others
            copies = self.policy.select(self._copies, state, other=self.head.policy.outlook(state))
        else:
            copies = _matching(self._copies, state.finished.count(False), self.match)
        self._head_drafted = not any(copy.tokens for copy in copies)
        draft = self.head.propose(state) if self._head_drafted else draft_of(copies, self.target.device)
        draft.extra.source = self.head.name if self._head_drafted else self.lookup.name
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if self.policy is not None:
            self.policy.learn(self._copies, verdict)
        if self._head_drafted:
            self.head.observe(state, draft, output, verdict)
        else:
            self.head.follow(state, output, verdict)
        self.lookup.follow(state, output, verdict)


def _matching(copies: list[Copy], unfinished: int, match: int | str) -> list[Copy]:
    """Copies with a match of ``match`` tokens or more; none unless half of the unfinished sequences have one."""
    long = [isinstance(match, int) and bool(copy.tokens) and copy.match >= match for copy in copies]
    copied = 2 * sum(long) >= unfinished
    return [copy if copied and enough else NOTHING for copy, enough in zip(copies, long, strict=True)]


def _copying(lookup: Drafter) -> Retrieval:
    if not isinstance(lookup, Retrieval):
        raise ValueError(f"lookup is {lookup.name!r}, which does not copy; use prompt_lookup, suffix or rest")
    return lookup


def _check(head: Drafter, match: int | str) -> None:
    if not head.follows:
        raise ValueError(f"the head {head.name!r} must draft every step; use one that can skip steps, such as eagle")
    if match == "auto" and not isinstance(head.policy, ShapePolicy):
        raise ValueError(f"match: auto needs a head with tree: auto or gamma: auto; {head.name!r} has a fixed shape")
