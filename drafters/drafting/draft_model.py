"""What drafters with a draft model share: the model itself, checked against the target, and its cache."""

from functools import lru_cache

import torch
from pydantic import InstanceOf
from torch import Tensor

from ..base import Drafter
from ..decoding.loop import DecodeState, padded
from ..model.draft_head import DraftHeadOptions, draft_head
from ..model.files import load_bare_tokenizer
from ..model.kv_cache import KVCache
from ..model.target import FeatureOutput, TargetModel

# An option of a method: where to load a draft model from, or a loaded one, so that several drafters share it.
DraftModel = str | InstanceOf[TargetModel]


class DraftModelOptions(DraftHeadOptions):
    """``draft_model``: folder or Hub repository of a smaller LM of the same tokenizer, loaded in the target's dtype."""

    draft_model: DraftModel


class DraftModelDrafter(Drafter):
    """A drafter that drafts with a smaller LM of the target's tokenizer.

    ``more_rows``: rows of the draft model's cache beyond the target's.

    Raises:
        ValueError: the draft model's vocabulary differs from the target's.
    """

    more_rows = 0

    def __init__(self, target: TargetModel, options: DraftModelOptions) -> None:
        super().__init__(target, options)
        self.draft_model = load_draft_model(target, options.draft_model)
        self.lm_head = draft_head(self.draft_model, options)
        self.max_context = min(target.max_context, self.draft_model.max_context)
        self._cache = KVCache.nothing()

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self._cache.release()  # so that its memory can be taken again
        self._cache = self.draft_model.new_cache(state.batch, state.cache.capacity + self.more_rows)
        prompts = [row[:-1] for row in state.tokens]
        self.draft_model.run(padded(prompts, self.draft_model.device), self._cache)
        self._cache.commit_first([len(prompt) for prompt in prompts])

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        whole, self._cache = self._cache, KVCache.nothing()
        self.begin(part, output)
        for number, row in enumerate(rows):
            whole.copy_row(row, self._cache, number)
        self._cache.release()
        self._cache = whole

    def _read(self, tokens: list[int]) -> Tensor:
        """Run the draft model over ``tokens`` of the one row and keep them; features ``[1, H]`` after the last."""
        rows = torch.tensor([tokens], device=self.target.device)
        features = self.draft_model.run(rows, self._cache).features[:, -1]
        self._cache.commit_first([len(tokens)])
        return features

    def _catch_up(self, state: DecodeState) -> Tensor:
        """``_read`` the committed tokens that the draft model has not read yet."""
        return self._read(state.tokens[0][self._cache.lengths[0] :])


def load_draft_model(target: TargetModel, draft_model: str | TargetModel) -> TargetModel:
    """The draft model, checked against its target.

    Raises:
        ValueError: another vocabulary size, or another tokenizer.
    """
    if not isinstance(draft_model, TargetModel):
        draft_model = TargetModel.from_pretrained(draft_model, dtype=target.dtype, device=target.device)
    if draft_model.vocab_size != target.vocab_size:
        raise ValueError(
            f"draft model {draft_model.name} has a vocabulary of {draft_model.vocab_size} tokens and "
            f"target {target.name} one of {target.vocab_size}: they must share a tokenizer; choose a draft model of "
            "the target's family"
        )
    # Equal sizes do not make equal vocabularies: with another tokenizer hardly a draft token would be accepted.
    theirs, ours = vocabulary(target), vocabulary(draft_model)
    differing = [token for token, index in (theirs or {}).items() if ours is not None and ours.get(token) != index]
    if theirs and differing:
        raise ValueError(
            f"draft model {draft_model.name} has another tokenizer than target {target.name}: {len(differing)} of "
            f"{len(theirs)} tokens differ, for example {differing[0]!r}; choose a draft model of the target's family"
        )
    return draft_model


def vocabulary(model: TargetModel) -> dict[str, int] | None:
    """Token -> id of the tokenizer that lies beside a model; None for a model that comes without one."""
    return _vocabulary(model.source, model.revision) if model.source is not None else None


@lru_cache(maxsize=8)
def _vocabulary(source: str, revision: str | None) -> dict[str, int] | None:
    try:
        vocabulary: dict[str, int] = load_bare_tokenizer(source, revision).get_vocab()
        return vocabulary
    except ValueError:
        return None  # token ids in, token ids out: a model may come without a tokenizer
