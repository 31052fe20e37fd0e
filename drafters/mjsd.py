"""Multi-token joint speculative decoding (MJSD: Qin et al. 2024, section 3.2 and Algorithm 1). Lossy by design.

It gives up the target's distribution token by token for text of a higher joint likelihood: drafts come from a beam
search, and the longest prefix that the target finds jointly likely enough is accepted, even past a
shorter one that fails.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from .config import Config
from .decoding.acceptance import Rule, Verdict, collect
from .decoding.draft_tree import DraftTree
from .decoding.kv_cache import KVCache
from .decoding.loop import DecodeState
from .decoding.sampling import Sampling, draw, draw_without_replacement
from .decoding.target import FeatureOutput, TargetModel
from .draft_model import DraftModel, DraftModelDrafter, prefill


class MJSDOptions(Config):
    """Options; the defaults are the paper's (Appendix D, Table 5).

    ``draft_model``: folder or Hub repository of a smaller LM of the same tokenizer. ``gamma``: tokens a draft.
    ``beams``: hypotheses kept by the beam search. ``threshold``: the least ratio of joint likelihoods, target to draft
    model, that is accepted; 0 accepts every draft, 1 none. ``top_k``, ``top_p``: how the draft model's distribution is
    warped where beams are sampled (temperature above 0).
    """

    draft_model: DraftModel
    gamma: int = Field(4, ge=1)
    beams: int = Field(8, ge=1)
    threshold: float = Field(0.1, ge=0.0, le=1.0)
    top_k: int = Field(20, ge=0)
    top_p: float = Field(0.9, gt=0.0, le=1.0)


class MJSDDrafter(DraftModelDrafter):
    """Beam search with the draft model; the best beam is verified by joint likelihood.

    Likelihoods are those of the models' own distributions, not warped (footnote 5). Greedy decoding extends each beam
    by its most likely tokens, sampling by tokens drawn from the warped distribution without replacement; in both the
    hypotheses of highest joint likelihood are kept (section 2.1). The last token of every step is the target's,
    greedy or drawn as the generation says.

    Args:
        draft_model: a loaded draft model, or where to load one from (in the target's dtype).

    Raises:
        ValueError: the draft model's vocabulary differs from the target's.
    """

    name = "mjsd"
    options = MJSDOptions
    lossless: ClassVar[bool] = False

    def __init__(
        self,
        target: TargetModel,
        draft_model: str | TargetModel,
        gamma: int = 4,
        beams: int = 8,
        threshold: float = 0.1,
        top_k: int = 20,
        top_p: float = 0.9,
    ) -> None:
        super().__init__(target, draft_model)
        self.gamma, self.threshold = gamma, threshold
        self.beams = min(beams, target.vocab_size)
        self.top_k, self.top_p = top_k, top_p
        levels = torch.arange(gamma, device=target.device)
        self._depths = levels.repeat_interleave(self.beams)[None]
        self._cache: KVCache
        self._rows = torch.zeros(0)

    @property
    def max_draft(self) -> int:
        return self.gamma

    def rule(self, sampling: Sampling) -> Rule:
        return JointLikelihood(self.threshold)

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        # Beams lie side by side in one cache, as a tree; the last level's tokens get no row.
        self._cache = self.draft_model.new_cache(1, state.cache.capacity + self.gamma * self.beams)
        prefill(self.draft_model, self._cache, state)

    def propose(self, state: DecodeState) -> DraftTree:
        gamma = min(self.gamma, state.room() - 1)
        if gamma < 1:
            return DraftTree.empty(1, self.target.device)
        pending = torch.tensor([state.tokens[0][self._cache.lengths[0] :]], device=self.target.device)
        features = self.draft_model.run(pending, self._cache).features[:, -1]
        self._cache.commit([list(range(pending.shape[1]))])
        best = self._search(features, gamma, state)
        self._rows = best.rows[0]
        # Nodes after EOS only pad the beam.
        ends = _is_end(best.tokens, state.eos).long()
        draft = DraftTree.chain(best.tokens, valid=ends.cumsum(1) == ends)
        draft.log_q = best.log_q
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        if draft.size:
            accepted = len(verdict.rows[0]) - 1
            self._cache.commit([self._rows[:accepted].tolist()])

    def _search(self, features: torch.Tensor, gamma: int, state: DecodeState) -> "_Beams":
        """The best beam after ``gamma`` tokens; nothing is copied to the host.

        Args:
            features: ``[1, H]`` of the draft model after the last committed token.
        """
        device, width = features.device, self.beams
        beams = self._extend(_Beams.root(device), features, state)
        see = torch.zeros(width, 0, dtype=torch.bool, device=device)  # which rows of the levels before are ancestors
        itself = torch.eye(width, dtype=torch.bool, device=device)
        for level in range(1, gamma):
            offset = (level - 1) * width
            see = torch.cat([see[beams.parent] if level > 1 else see, itself], 1)
            depths = self._depths[:, : offset + width]
            tokens = beams.tokens[None, :, -1]
            output = self.draft_model.run(tokens, self._cache, see=see[None], depths=depths, offset=offset)
            beams.rows = torch.cat([beams.rows, offset + torch.arange(width, device=device)[:, None]], 1)
            beams = self._extend(beams, output.features[0], state)
        return beams.take(beams.score.argmax()[None])

    def _extend(self, beams: "_Beams", features: torch.Tensor, state: DecodeState) -> "_Beams":
        """The likeliest beams one token longer; a beam that ended repeats EOS at no cost.

        Args:
            features: ``[M, H]`` of the draft model after each beam.
        """
        logits = self.draft_model.lm_head(features)
        log_q = logits.float().log_softmax(-1)
        sampling = Sampling(state.sampling.temperature, self.top_k, self.top_p)
        q = sampling.probabilities(logits) if not sampling.greedy else None
        if state.eos and beams.tokens.shape[1]:
            last = beams.tokens[:, -1:]
            ended = _is_end(last, state.eos)
            again = torch.zeros_like(log_q).scatter_(1, last, 1.0)
            log_q = torch.where(ended, again.log(), log_q)
            q = torch.where(ended, again, q) if q is not None else None
        if q is None:
            step, tokens = log_q.topk(self.beams, -1)
        else:
            tokens, valid = draw_without_replacement(q, self.beams, state.generator)
            step = log_q.gather(1, tokens).masked_fill(~valid, -torch.inf)
        score, index = (beams.score[:, None] + step).flatten().topk(self.beams)
        kept = beams.take(index // self.beams)
        kept.score = score
        kept.tokens = torch.cat([kept.tokens, tokens.flatten()[index, None]], 1)
        kept.log_q = torch.cat([kept.log_q, step.flatten()[index, None]], 1)
        return kept


@dataclass
class _Beams:
    """Hypotheses of a beam search.

    Attributes:
        tokens: ``[M, d]``. log_q: ``[M, d]`` of each token given those before. score: ``[M]``, the sum of log_q.
        rows: ``[M, d - 1]`` draft cache rows, counted from its length, of all tokens but the last.
        parent: ``[M]`` which beam of the level before each one extends.
    """

    tokens: torch.Tensor
    log_q: torch.Tensor
    score: torch.Tensor
    rows: torch.Tensor
    parent: torch.Tensor

    @classmethod
    def root(cls, device: torch.device) -> "_Beams":
        """The one hypothesis of no tokens."""
        none = torch.zeros(1, 0, dtype=torch.long, device=device)
        zero = torch.zeros(1, device=device)
        return cls(none, none.float(), zero, none, zero.long())

    def take(self, index: torch.Tensor) -> "_Beams":
        """The hypotheses at ``index [M']``."""
        return _Beams(self.tokens[index], self.log_q[index], self.score[index], self.rows[index], index)


class JointLikelihood:
    """Accept the longest prefix x_1..j with min(1, p(x_1..j) / q(x_1..j)) > threshold, even past a failing shorter one.

    Then one token of the target (Algorithm 1). Its line 11 sets eta to j, a token id: the index i is meant.
    """

    def __init__(self, threshold: float) -> None:
        self.log_threshold = math.log(threshold) if threshold > 0 else -math.inf

    def __call__(
        self,
        draft: DraftTree,
        logits: torch.Tensor,
        see: torch.Tensor,
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> Verdict:
        """The verdict on a chain with ``log_q``; ``logits [B, N+1, V]`` of [root, nodes]."""
        batch, n = draft.tokens.shape
        best = torch.zeros(batch, dtype=torch.long, device=logits.device)
        if n:
            assert draft.is_chain and draft.log_q is not None
            log_p = logits[:, :-1].float().log_softmax(-1).gather(2, draft.tokens[..., None])[..., 0]
            ratio = (log_p.cumsum(1) - draft.log_q.cumsum(1)).clamp_max(0.0)
            passes = ratio > self.log_threshold
            if draft.valid is not None:
                passes = passes & draft.valid
            index = torch.arange(1, n + 1, device=logits.device)
            best = torch.where(passes, index, 0).amax(1)
        after = logits[torch.arange(batch, device=logits.device), best]
        bonus = after.argmax(-1) if sampling.greedy else draw(sampling.probabilities(after), generator)
        return collect(draft, see, best, bonus)


def _is_end(tokens: torch.Tensor, eos: frozenset[int]) -> torch.Tensor:
    """Which ``tokens [...]`` are EOS."""
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for token in eos:
        ends = ends | (tokens == token)
    return ends
