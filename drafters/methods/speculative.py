"""Speculative decoding with a draft model (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023)."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from drafters.base import Promised
from drafters.config import DraftSize
from drafters.drafting.draft_model import DraftModelDrafter, DraftModelOptions
from drafters.loop.acceptance import Verdict
from drafters.loop.generate import DecodeState, last_of, padded
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.loop.waiting import trials
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.costs import Make, Run, behind, step_costs
from drafters.policy.kept_costs import Costs
from drafters.policy.shape import Chooser

LONGEST = 12  # tokens that gamma: auto drafts


class SpeculativeOptions(DraftModelOptions):
    """``gamma``: tokens a draft; auto: at most 12, as many as pay, by what forwards cost on this machine and what is
    accepted, or none where none pays.
    """

    gamma: Annotated[DraftSize, Field(ge=1)] | Literal["auto"] = 4


class SpeculativeDrafter(DraftModelDrafter):
    """Drafts ``gamma`` tokens one by one from a draft model's distribution q.

    Raises:
        ValueError: the draft model has another tokenizer than the target.
    """

    name = "speculative"
    options: ClassVar[type[SpeculativeOptions]] = SpeculativeOptions
    max_batch: ClassVar[int | None] = None
    rewinds = True
    follows = True

    def __init__(self, target: TargetModel, options: SpeculativeOptions) -> None:
        super().__init__(target, options)
        self.auto = Chooser(self._step_costs, LONGEST, LONGEST, 1) if options.gamma == "auto" else None
        self.gamma = self.max_draft = LONGEST if options.gamma == "auto" else options.gamma
        self.remembers = self.auto is not None

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self.prepare(state.batch, state.sampling, state.longest)

    def prepare(self, batch: int, sampling: Sampling, longest: int) -> None:
        if self.auto is not None:
            self.auto.begin(batch, sampling, longest)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        auto, self.auto = self.auto, None
        super().join(state, rows, part, output)
        self.auto = auto

    def promised(self) -> Promised | None:
        return self.auto.promised() if self.auto is not None else None

    def propose(self, state: DecodeState) -> DraftTree:
        gamma = state.longest_draft(self.gamma)
        if self.auto is not None:
            gamma = self.auto.chain(state.batch, state.sampling, state.length, gamma)
        if not gamma:  # what has come is read when something is drafted
            return state.nothing
        self.lm_head.read(state.tokens)
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        # The draft model catches up first: with the root, and after full acceptance with the last draft token.
        pending = [row[known:] for row, known in zip(state.tokens, self._cache.lengths, strict=True)]
        rows, counts = padded(pending, self.target.device), [len(row) for row in pending]
        for _ in range(gamma):
            logits = self._advance(rows, counts)
            rows = self.lm_head.tokens(state.sampling.pick(logits, state.generator, q))[:, None]
            tokens.append(rows)
            counts = [1] * state.batch
        return DraftTree.chain(torch.cat(tokens, 1), q=self.lm_head.spread(torch.stack(q, 1)) if q else None)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        right = [max(len(verdict.own_rows(row, draft.size)) - 1, 0) for row in range(state.batch)]
        rows = zip(self._cache.lengths, state.tokens, verdict.rows, right, strict=True)
        self._cache.crop([min(known, len(tokens) - max(len(path) - own, 1)) for known, tokens, path, own in rows])
        if self.auto is not None:
            self.auto.look_back(state, verdict)
            for count, finished, weight in zip(right, state.finished, trials(state.weights()), strict=True):
                if not finished:  # else cut short
                    self.auto.learn_chain(draft.size, count, weight)

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        """The draft model reads what it has not read before it drafts."""

    def rewind(self, state: DecodeState, kept: int) -> None:
        self._cache.crop([min(self._cache.lengths[0], kept)])

    def _advance(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Run the draft model over the first ``counts[b]`` of ``rows [B, R]``; logits of ``lm_head`` after them."""
        features = self.draft_model.run(rows, self._cache).features
        self._cache.commit_first(counts)
        return self.lm_head(last_of(features, counts))

    def _step_costs(self, batch: int, sampling: Sampling, length: int) -> Costs:
        """Of batches of this size, behind so many tokens."""
        model, generator = self.draft_model, torch.Generator(self.target.device)

        def drafting(context: int) -> tuple[Make, Make]:
            cache_behind = behind(model, batch, context)

            def begin(late: int) -> Run:
                tokens = torch.zeros(batch, 1 + late, dtype=torch.long, device=model.device)

                def once() -> object:
                    return sampling.pick(self.lm_head(model.run(tokens, cache_behind()).features[:, -1]), generator, [])

                return once

            return begin, lambda rows: begin(0)

        name = {"method": self.name, "draft_model": model.fingerprint()} | self.lm_head.options()
        return step_costs(self.target, name, batch, sampling, length, drafting, drawn=True)
