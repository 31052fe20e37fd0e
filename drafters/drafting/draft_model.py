"""Base of drafters with a draft model: load it, check its tokenizer against the target's, and keep its cache."""

from copy import copy
from functools import lru_cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import InstanceOf
from torch import Tensor

from drafters.base import Drafter
from drafters.loop.state import DecodeState, padded
from drafters.model.cache import KVCache
from drafters.model.draft_head import DraftHeadOptions, draft_head
from drafters.model.files import load_bare_tokenizer
from drafters.model.running import CHAINS_ONLY
from drafters.model.target import FeatureOutput, TargetModel

# Option of a method: folder or Hub repository of a draft model, or a loaded one that several drafters share.
DraftModel = str | InstanceOf[TargetModel]


class DraftModelOptions(DraftHeadOptions):
    """``draft_model``: folder or Hub repository of a smaller LM of the same tokenizer, loaded in the target's dtype."""

    draft_model: DraftModel


class DraftModelDrafter(Drafter):
    """A drafter that drafts with a smaller LM of the target's tokenizer.

    Class attributes:
        draft_trees: True if the draft model reads trees.

    Attributes:
        more_rows: slots of the draft model's cache beyond the number of the target's.

    Raises:
        ValueError: the draft model has another tokenizer than the target, or cannot read trees that the method needs.
    """

    draft_trees: ClassVar[bool] = False
    more_rows = 0

    def __init__(self, target: TargetModel, options: DraftModelOptions) -> None:
        super().__init__(target, options)
        self.draft_model = load_draft_model(target, options.draft_model)
        if self.draft_trees and self.draft_model.chains_only:
            raise ValueError(
                f"{self.name} drafts with trees, and draft model {self.draft_model.name} {CHAINS_ONLY}; use speculative"
            )
        self.lm_head = draft_head(self.draft_model, options)
        self.max_context = min(target.max_context, self.draft_model.max_context)
        self._cache = KVCache.nothing()

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self._cache.release()  # frees the memory before the new cache takes its own
        self._cache = self._prefill(state)
        self.lm_head.read(state.tokens)

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        cache = self._prefill(part)
        for number, row in enumerate(rows):
            self._cache.copy_row(row, cache, number)
        cache.release()

    def _prefill(self, state: DecodeState) -> KVCache:
        cache = self.draft_model.new_cache(state.batch, state.cache.capacity + self.more_rows)
        cache.rewinds = 1 + self.max_draft + self.back
        prompts = [row[:-1] for row in state.tokens]
        cache.expect([len(prompt) for prompt in prompts])
        self.draft_model.run(padded(prompts, self.draft_model.device), cache)
        cache.commit_first([len(prompt) for prompt in prompts])
        return cache

    def _read(self, tokens: list[int]) -> Tensor:
        """Run the draft model over ``tokens`` of a batch of one and commit them; features ``[1, H]`` after the last."""
        rows = torch.tensor([tokens], device=self.target.device)
        features = self.draft_model.run(rows, self._cache).features[:, -1]
        self._cache.commit_first([len(tokens)])
        return features

    def _catch_up(self, state: DecodeState) -> Tensor:
        """``_read`` the committed tokens that the draft model has not read."""
        self.lm_head.read(state.tokens)
        return self._read(state.tokens[0][self._cache.lengths[0] :])


def load_draft_model(target: TargetModel, draft_model: str | TargetModel) -> TargetModel:
    """Load a draft model, check its tokenizer against the target's, and give it the target's vocabulary size.

    Models of one family may have LM heads of different sizes because of padding. Ids beyond the smaller one are then
    never drafted.

    Raises:
        ValueError: another tokenizer, or a vocabulary of another size without tokenizers to compare.
    """
    if not isinstance(draft_model, TargetModel):
        draft_model = TargetModel.from_pretrained(draft_model, dtype=target.dtype, device=target.device)
    ours, theirs = vocabulary(draft_model), vocabulary(target)
    check_tokenizers(draft_model.name, ours, target.name, theirs)
    if draft_model.vocab_size != target.vocab_size and not (ours and theirs):
        raise ValueError(
            f"draft model {draft_model.name} has {draft_model.vocab_size} tokens, target {target.name} "
            f"{target.vocab_size}, and there are no tokenizers to compare: put them beside the weights"
        )
    return over_vocabulary(draft_model, target.vocab_size)


def over_vocabulary(model: TargetModel, size: int) -> TargetModel:
    """Return ``model`` with logits over ``size`` ids, sharing its weights.

    Ids beyond the LM head of ``model`` have the logit -inf and the embedding of its last id.
    """
    vocab_size = model.vocab_size
    if vocab_size == size:
        return model
    resized = copy(model)
    resized.vocab_size = size

    def lm_head(features: Tensor) -> Tensor:
        return F.pad(model.lm_head(features), (0, size - vocab_size), value=-torch.inf)  # a negative size cuts

    def embed(tokens: Tensor) -> Tensor:
        return model.embed(tokens.clamp_max(vocab_size - 1))

    resized.lm_head = lm_head  # type: ignore[method-assign]
    if vocab_size < size:
        resized.embed, resized._parts = embed, {}  # type: ignore[method-assign]  # cached parts contain the embedding
    return resized


def check_tokenizers(draft_model: str, ours: dict[str, int] | None, target: str, theirs: dict[str, int] | None) -> None:
    """Raise ValueError if both vocabularies are known and differ: hardly any draft would be accepted.

    They differ if a token has two ids, or an id two tokens. A token that only one of them has is no difference.
    """
    if not ours or not theirs:
        return
    names = {index: token for token, index in ours.items()}
    pairs = theirs.items()
    differing = [token for token, at in pairs if ours.get(token, at) != at or names.get(at, token) != token]
    if differing:
        raise ValueError(
            f"draft model {draft_model} has another tokenizer than target {target}: {len(differing)} of "
            f"{len(theirs)} tokens differ, for example {differing[0]!r}; choose a draft model of the target's family"
        )


def vocabulary(model: TargetModel) -> dict[str, int] | None:
    """Token -> id of a model's tokenizer; None for a model without one."""
    return tokenizer_vocabulary(model.source, model.revision) if model.source is not None else None


@lru_cache(maxsize=8)
def tokenizer_vocabulary(source: str, revision: str | None) -> dict[str, int] | None:
    """Token -> id of the tokenizer in a folder or Hub repository; None without one."""
    try:
        vocabulary: dict[str, int] = load_bare_tokenizer(source, revision).get_vocab()
        return vocabulary
    except ValueError:
        return None  # decoding needs only token ids, so a model may come without a tokenizer
