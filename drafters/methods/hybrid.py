"""A hybrid: a copy where the text repeats itself, a trained head's draft elsewhere (so combines SuffixDecoding, Oliaro
et al. 2024, with EAGLE).

Nothing here knows which two drafters those are. There, a threshold on the copy's score decides; here, what either is
worth: of a copy it is counted how often such a one is right, of the head's drafts, what they promised of late.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf

from drafters.base import Drafter, Promised
from drafters.config import Config, Length
from drafters.drafting.one_tree import Held, held_nodes, with_copies
from drafters.drafting.retrieval import NOTHING, Found, Retrieval, draft_of
from drafters.loop.acceptance import Verdict
from drafters.loop.generate import DecodeState
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.methods import inner_drafter
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.weighing import Weighing

LOOKUP: dict[str, Any] = {"drafter": "prompt_lookup", "gamma": 16, "max_ngram": 8}
NOT_DRAFTED = Promised(0, 0, 0, ""), Promised(1, 1, 1, "")  # before and after a step that the head leaves as it is


class HybridOptions(Config):
    """``head``: the drafter where nothing is copied and its options, for example ``{drafter: eagle, checkpoint: ...}``,
    or one built for the same target. ``lookup``: what copies, likewise; by default prompt lookup of up to 16 tokens
    after a match of up to 8.

    ``match``: a step is drafted by copying where so many of the text's last tokens were found (of a batch, in half of
    the rows or more); auto: where, and as far as, that is worth more time than the head's draft.

    ``one_tree``: where the head drafts, a copy hangs behind its draft, in the same tree, and one forward verifies both;
    with ``match: auto`` as much of it as pays for its rows, and what pays most alone is still copied alone, with a
    number the head drafts every step.
    """

    head: InstanceOf[Drafter] | dict[str, Any]
    lookup: InstanceOf[Drafter] | dict[str, Any] = Field(default_factory=lambda: dict(LOOKUP))
    match: Annotated[Length, Field(ge=1)] | Literal["auto"] = "auto"
    one_tree: bool = False


class HybridDrafter(Drafter):
    """Copies or has the head draft, step by step; the head takes in the tokens that were copied when it drafts next.

    Which of the two it is hangs on the text before the step alone, so that either's lossless drafts stay lossless; why
    both in one tree are is said in ``drafting/one_tree.py``. The rows of a batch, which go through the head together,
    copy together, too.

    Raises:
        ValueError: a ``lookup`` that does not copy; a head that has to draft every step itself, or that for ``match:
            auto`` does not say what its drafts promise.
    """

    name = "hybrid"
    options = HybridOptions
    max_batch = None

    def __init__(self, target: TargetModel, options: HybridOptions) -> None:
        super().__init__(target, options)
        self.head, self.match = inner_drafter(options.head, target), options.match
        self.one_tree = options.one_tree
        self.lookup = _copying(inner_drafter(options.lookup, target))
        _check(self.head, self.match)
        most = [one.max_batch for one in (self.head, self.lookup) if one.max_batch is not None]
        self.max_batch = min(most, default=None)  # type: ignore[misc]
        sizes = self.head.max_draft, self.lookup.max_draft
        self.max_draft = sum(sizes) if self.one_tree else max(sizes)
        self.max_context = min(self.head.max_context, self.lookup.max_context)
        self.taps = self.head.taps
        self.remembers = self.match == "auto" or self.head.remembers or self.lookup.remembers
        self.weighing = Weighing(target, self.lookup) if self.match == "auto" else None
        self._found: list[Found] = []
        self._by: Literal["head", "lookup", "no one"] = "head"  # whose the latest draft is; the head's may be empty
        self._rests = False  # whether the head's latest was, in these texts
        self._own: DraftTree  # the head's part of the latest draft
        self._held: list[Held] | None = None  # with one_tree, what of the copies is in that

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self._rests = False
        self.head.begin(state, output)
        self.lookup.begin(state, output)
        if self.weighing is not None:
            self.weighing.begin(state)

    def prepare(self, batch: int, sampling: Sampling, longest: int) -> None:
        self.head.prepare(batch, sampling, longest)
        if self.weighing is not None:
            self.weighing.prepare(batch, sampling, longest)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        self.head.join(state, rows, part, output)
        self.lookup.join(state, rows, part, output)
        if self.weighing is not None:
            self.weighing.join()

    def promised(self) -> Promised | None:
        head = self.head.promised()
        return None if head is None or self.weighing is None else self.weighing.promised(head)

    def propose(self, state: DecodeState) -> DraftTree:
        if self.weighing is not None:
            self._found = self.weighing.found(self.lookup, state)
            copies = self.weighing.best_parts(self._found, state)
        else:
            self._found = self.lookup.retrieve_all(state)
            copies = _matching(self._found, state.finished.count(False), self.match)
        copied = any(one.tokens for one in copies) and not (self.one_tree and self.weighing is None)
        self._held = None
        if copied:
            self._by = "lookup"
            draft = draft_of(copies, self.target.device)
            draft.source = self.lookup.name
            return draft
        draft = self._own = self._of_head(state)
        draft.source = self.head.name
        return self._with_copies(state, draft, copies) if self.one_tree else draft

    def _of_head(self, state: DecodeState) -> DraftTree:
        """The head's draft; it is not asked for one that it knows to be none."""
        if self._rests and self.weighing is not None and self.head.may_rest():
            self._spare_head(self.weighing, 1)
            return state.nothing
        before = self.head.promised()
        draft = self.head.propose(state)
        self._by, self._rests = "head", not draft.size
        if self.weighing is not None and before is not None:
            self.weighing.note_head(before, self.head.promised() or before)
        return draft

    def _with_copies(self, state: DecodeState, draft: DraftTree, copies: list[Found]) -> DraftTree:
        """The head's draft, and behind it what of the copies is not in it and pays, or matches."""
        if self.weighing is not None:
            copies = self._found
        held = held_nodes(draft, copies)
        if self.weighing is not None:
            self._held, kept = held, self.weighing.beside(copies, held, draft.size, state)
        else:
            pairs = zip(copies, held, strict=True)
            kept = [[node for node in range(len(one.tokens)) if node not in has] for one, has in pairs]
        whole = with_copies(draft, copies, held, kept)
        if whole is not draft:
            whole.source = f"{self.head.name} and {self.lookup.name}"
        return whole

    def may_rest(self) -> int:
        return 0 if self.weighing is None else min(self.head.may_rest(), self.weighing.may_rest())

    def rest(self, steps: int) -> None:
        if self.weighing is not None:
            self._found, self._held = [NOTHING] * len(self._found), None
            self.weighing.rest(steps)
            self._spare_head(self.weighing, steps)

    def _spare_head(self, weighing: Weighing, steps: int) -> None:
        self._by = "no one"
        self.head.rest(steps)
        weighing.note_head(*NOT_DRAFTED, steps)

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        """Of a step of its own that nothing was drafted for."""
        self.head.follow(state, output, verdict)
        self.lookup.follow(state, output, verdict)
        if self.weighing is not None:
            self.weighing.pass_by()

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if self.weighing is not None:
            self.weighing.learn(state, self._found, verdict, self._held)
        if self._by == "head" or (self._by == "no one" and state.ended_by(verdict)):
            self.head.observe(state, self._own, output, verdict)
        else:
            self.head.follow(state, output, verdict)
        self.lookup.follow(state, output, verdict)


def _matching(found: list[Found], going: int, match: int | str) -> list[Found]:
    """As ``best_parts``, by the length of the match alone."""
    long = [isinstance(match, int) and bool(one.tokens) and one.match >= match for one in found]
    copied = 2 * sum(long) >= going
    return [one if copied and enough else NOTHING for one, enough in zip(found, long, strict=True)]


def _copying(lookup: Drafter) -> Retrieval:
    if not isinstance(lookup, Retrieval):
        raise ValueError(f"lookup is {lookup.name!r}, which does not copy; use prompt_lookup, suffix or rest")
    return lookup


def _check(head: Drafter, match: int | str) -> None:
    if not head.follows:
        raise ValueError(
            f"the head is {head.name!r}, which has to draft every step itself; use one that can follow another's, for "
            "example eagle or speculative"
        )
    if match == "auto" and head.promised() is None:
        raise ValueError(
            f"match: auto weighs a copy against what the head promises, and {head.name!r} promises nothing as it is: "
            "let it choose its drafts, too (eagle: tree: auto; speculative: gamma: auto), or give match a number"
        )
