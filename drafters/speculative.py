"""Speculative decoding with a draft model (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023)."""

import torch
from pydantic import Field
from transformers import AutoTokenizer

from .base import Drafter
from .config import Config
from .decoding.acceptance import Verdict
from .decoding.draft_tree import DraftTree
from .decoding.kv_cache import KVCache
from .decoding.loop import DecodeState
from .decoding.sampling import draw
from .decoding.target import FeatureOutput, TargetModel


class SpeculativeOptions(Config):
    """``draft_model``: folder or Hub repository of a smaller LM of the same tokenizer. ``gamma``: tokens a draft."""

    draft_model: str
    gamma: int = Field(4, ge=1)


class SpeculativeDrafter(Drafter):
    """Drafts ``gamma`` tokens one by one from a draft model's distribution q.

    Args:
        draft_model: a loaded draft model, or where to load one from (in the target's dtype).

    Raises:
        ValueError: the draft model's vocabulary differs from the target's.
    """

    name = "speculative"
    options = SpeculativeOptions

    def __init__(self, target: TargetModel, draft_model: str | TargetModel, gamma: int = 4) -> None:
        super().__init__(target)
        self.draft_model = load_draft_model(target, draft_model)
        self.gamma = gamma
        self._cache: KVCache

    @property
    def max_draft(self) -> int:
        return self.gamma

    @property
    def max_context(self) -> int:
        return min(self.target.max_context, self.draft_model.max_context)

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self._cache = self.draft_model.new_cache(1, state.cache.capacity)
        prefill(self.draft_model, self._cache, state)

    def propose(self, state: DecodeState) -> DraftTree:
        gamma = min(self.gamma, state.room() - 1)
        tokens, q = [], []
        # The draft model catches up first: with the root, and after full acceptance with the last draft token.
        rows = torch.tensor([state.tokens[0][self._cache.lengths[0] :]], device=self.target.device)
        for _ in range(gamma):
            logits = self._advance(rows)
            if state.sampling.greedy:
                rows = logits.argmax(-1, keepdim=True)
            else:
                q.append(state.sampling.probabilities(logits))
                rows = draw(q[-1], state.generator)[:, None]
            tokens.append(rows)
        if not tokens:
            return DraftTree.empty(1, self.target.device)
        return DraftTree.chain(torch.cat(tokens, 1), q=torch.stack(q, 1) if q else None)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        self._cache.crop([min(self._cache.lengths[0], len(state.tokens[0]) - 1)])

    def _advance(self, rows: torch.Tensor) -> torch.Tensor:
        """Feed ``rows [1, R]`` to the draft model; logits ``[1, V]`` after the last."""
        features = self.draft_model.run(rows, self._cache).features[:, -1]
        self._cache.commit([list(range(rows.shape[1]))])
        return self.draft_model.lm_head(features)


def prefill(draft_model: TargetModel, cache: KVCache, state: DecodeState) -> None:
    """Take the prompt into a draft model's cache, all but the root."""
    prompt = torch.tensor([state.tokens[0][:-1]], device=draft_model.device)
    draft_model.run(prompt, cache)
    cache.commit([list(range(prompt.shape[1]))])


def load_draft_model(target: TargetModel, draft_model: str | TargetModel) -> TargetModel:
    """The draft model, checked against its target.

    Raises:
        ValueError: another vocabulary size, so another tokenizer.
    """
    if not isinstance(draft_model, TargetModel):
        draft_model = TargetModel.from_pretrained(draft_model, dtype=target.dtype, device=target.device)
    if draft_model.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft model {draft_model.name} has a vocabulary of {draft_model.vocab_size} tokens and "
            f"target {target.name} one of {target.vocab_size}: they must share a tokenizer; choose a draft model of "
            "the target's family"
        )
    _check_tokenizers(target, draft_model)
    return draft_model


def _check_tokenizers(target: TargetModel, draft_model: TargetModel) -> None:
    """Equal sizes do not make equal vocabularies: with another tokenizer hardly a draft token would be accepted."""
    if target.source is None or draft_model.source is None:
        return
    try:
        theirs = AutoTokenizer.from_pretrained(target.source, revision=target.revision or "main").get_vocab()
        ours = AutoTokenizer.from_pretrained(draft_model.source, revision=draft_model.revision or "main").get_vocab()
    except (OSError, ValueError, KeyError):
        return  # token ids in, token ids out: a model may come without a tokenizer
    differing = [token for token, index in theirs.items() if ours.get(token) != index]
    if differing:
        raise ValueError(
            f"draft model {draft_model.name} has another tokenizer than target {target.name}: {len(differing)} of "
            f"{len(theirs)} tokens differ, for example {differing[0]!r}; choose a draft model of the target's family"
        )
