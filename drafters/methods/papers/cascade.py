"""Cascade speculative decoding: another drafter accelerates the draft model (Chen et al. 2023b; Ouroboros, Table 13).

The draft model decodes by steps of the same loop, with any inner drafter that can go back.
"""

from typing import Any

import torch
from pydantic import Field, InstanceOf
from torch import Tensor

from drafters.base import Drafter
from drafters.config import DraftSize
from drafters.drafting.draft_model import DraftModelDrafter, DraftModelOptions
from drafters.loop.acceptance import Verdict
from drafters.loop.generate import step
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState, until
from drafters.loop.tree import DraftTree
from drafters.methods import inner_drafter
from drafters.model.target import FeatureOutput, TargetModel


class CascadeOptions(DraftModelOptions):
    """Options.

    ``inner``: the inner drafter and its options, for example ``{drafter: speculative, draft_model: ..., gamma: 2}``.
    It may also be a drafter built for the loaded draft model.
    ``gamma``: tokens that are drafted before the target verifies; the last inner step may add a few.
    """

    inner: InstanceOf[Drafter] | dict[str, Any]
    gamma: DraftSize = Field(4, ge=1)


class CascadeDrafter(DraftModelDrafter):
    """Speculative decoding whose drafts are decoded speculatively too. ``inner`` may be another cascade.

    The inner drafter is lossless, so every draft token is an exact sample of the draft model's q, or its argmax when
    greedy. The target verifies them as usual, with q from the inner verification.

    Raises:
        ValueError: the draft model has another tokenizer than the target; an inner drafter that is lossy, cannot
            rewind, or was built for another model.
    """

    name = "cascade"
    options = CascadeOptions
    rewinds = True

    def __init__(self, target: TargetModel, options: CascadeOptions) -> None:
        super().__init__(target, options)
        self.inner, self.gamma = inner_drafter(options.inner, self.draft_model), options.gamma
        _check(self.inner)
        self.parts = (self.inner,)
        self.max_draft, self.remembers = self.gamma + self.inner.max_draft, self.inner.remembers
        self.max_context = min(self.max_context, self.inner.max_context)
        self._drafting = self.lm_head.as_model()  # the target of the inner drafter
        self._state: DecodeState  # of the draft model's decoding
        self._shared = 0  # committed tokens when the last draft began
        self._q: list[Tensor] = []  # of the current draft, [accepted tokens, V] per inner step

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        prompt, capacity = state.tokens[0][:-1], state.cache.capacity + self.inner.max_draft + 1
        # Without EOS: the loop does not call ``observe`` after it, so ``propose`` checks for it instead.
        decoding = capacity, capacity, state.sampling, state.generator, frozenset[int]()
        self._state = DecodeState(self._drafting, [list(state.tokens[0])], *decoding)
        self._state.prompt_lengths, self.inner.back = [len(prompt)], self.max_draft + self.back
        self._state.cache.rewinds = 1 + self.inner.back
        rows = torch.tensor([prompt], device=self.draft_model.device)
        known = self.draft_model.run(rows, self._state.cache, taps=self.inner.taps)
        self._state.cache.commit_first([len(prompt)])
        self._shared = len(prompt)
        self.lm_head.read(state.tokens)
        self.inner.begin(self._state, known)

    def propose(self, state: DecodeState) -> DraftTree:
        room, inner = state.room() - 1, self._state
        self._follow(state.tokens[0])
        self.lm_head.read(state.tokens)
        start, rule = self._shared, self._rule(state.sampling)
        self._q = []
        while (drafted := len(inner.tokens[0]) - start) < min(self.gamma, room):
            step(inner, self.inner, rule)
            if not state.eos.isdisjoint(inner.tokens[0][start + drafted :]):
                break
        tokens = until(inner.tokens[0][start : start + max(room, 0)], state.eos)
        if not tokens:
            return state.nothing
        q = torch.cat(self._q)[None, : len(tokens)] if self._q else None
        return DraftTree.chain(torch.tensor([tokens], device=self.target.device), q=q)

    def rewind(self, state: DecodeState, length: int) -> None:
        self._shared = min(self._shared, length)

    def _follow(self, tokens: list[int]) -> None:
        """Rewind the draft model to the last token that it shares with the committed ``tokens``, and read the rest."""
        inner, shared = self._state, self._shared
        drafted, cache = inner.tokens[0], inner.cache
        while shared < min(len(drafted), len(tokens) - 1) and drafted[shared] == tokens[shared]:
            shared += 1
        cache.crop([min(cache.lengths[0], shared)])
        pending = tokens[cache.lengths[0] : -1]
        if pending:
            self.draft_model.run(torch.tensor([pending], device=self.draft_model.device), cache)
            cache.commit_first([len(pending)])
        inner.replace(0, list(tokens))
        self.inner.rewind(inner, shared)
        self._shared = len(tokens)

    def _rule(self, sampling: Sampling) -> Any:
        """The inner drafter's rule, which also appends q, the distribution of each committed token, to ``_q``."""
        lossless = self.inner.rule(sampling)

        def verify(
            draft: DraftTree, logits: Tensor, see: Tensor, sampling: Sampling, generator: torch.Generator | None = None
        ) -> Verdict:
            verdict = lossless(draft, logits, see, sampling, generator)
            if not sampling.greedy:
                rows = torch.tensor(verdict.rows[0], device=logits.device)
                self._q.append(sampling.probabilities(logits[0].index_select(0, rows)))
            return verdict

        return verify


def _check(inner: Drafter) -> None:
    if not inner.lossless:
        raise ValueError(f"the inner drafter {inner.name!r} is lossy; use a lossless one")
    if not inner.rewinds:
        raise ValueError(f"the inner drafter {inner.name!r} cannot take back tokens; use for example speculative")
