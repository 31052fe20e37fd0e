"""The LM head as drafting uses it: only the rows of the most frequent tokens, in a precision of its own.

A draft's LM head may leave tokens out (FR-Spec, Zhao et al. 2025) and round the others. That lowers acceptance only:
the target verifies with its whole LM head, against the distribution q over the tokens that are left. A text repeats
tokens that are rare elsewhere, such as names. So some rows are those of the text's own rare tokens.
"""

import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub.errors import EntryNotFoundError
from pydantic import Field
from torch import Tensor, nn

from drafters.common.wording import dtype_name
from drafters.config import Amount, Config, Vocabulary
from drafters.model.fused import FusedLayer
from drafters.model.linear import Product, draft_dtype
from drafters.model.runner import Part, Transform, identity, model_time
from drafters.model.target import TargetModel
from drafters.model.weights import fetch

DRAFT_IDS = "draft_ids"  # token ids by frequency, the most frequent first: a tensor of a drafter's checkpoint
D2T = "d2t"  # int64 [N]: the target's id of draft token i is i + d2t[i], as engines store it
# Rows for the text's own tokens, by default: a prompt of a thousand tokens seldom has as many that are rare.
TEXT_ROWS = 512
# Or a JSON list beside the weights of a draft model. Not safetensors: engines load all such files as weights.
DRAFT_IDS_FILE = "draft_ids.json"


class DraftHeadOptions(Config):
    """Options of a drafter that drafts through an LM head, the target's or its draft model's.

    ``draft_vocab``: draft with the rows of this number of most frequent tokens, as the checkpoint (or a draft model's
    folder) lists them; null: with all. ``draft_text``: number of further tokens, the latest of prompt and
    answer; null: 512. ``draft_dtype``: draft with an int8 copy of those rows, and of a learned head's own layers.
    """

    draft_vocab: Vocabulary | None = Field(default=None, ge=1)
    draft_text: Amount | None = Field(default=None, ge=0)
    draft_dtype: Literal["int8"] | None = None


class Scores(NamedTuple):
    """Logits ``[..., k]`` of the tokens at ``places [..., k]`` among ``among`` tokens; places None: of all of them."""

    logits: Tensor
    places: Tensor | None = None
    among: int = 0


class DraftHead:
    """Features -> logits over ``width`` tokens. Choices are places in these logits; ``tokens`` maps them to token ids.

    Args:
        model: owner of the LM head. ids: ``[N]`` tokens to keep; None: all. dtype: see ``DraftHeadOptions``.
        lm_head: the drafter's own LM head, used instead of the model's; it may have the rows of ``ids`` only.

    Attributes:
        enter: transform of the features before the LM head.
        candidates: those of its tokens that drafts score (``Candidates``); None: all.
    """

    enter: Transform = staticmethod(identity)
    candidates: Any = None

    def __init__(
        self,
        model: TargetModel,
        ids: Tensor | None = None,
        dtype: Literal["int8"] | None = None,
        lm_head: nn.Linear | None = None,
        text: int = 0,
    ) -> None:
        self.model, self.dtype, self.text = model, dtype, text
        rows = rows_of_head(model)
        if ids is None and dtype is not None and model.model.get_output_embeddings().out_features != model.vocab_size:
            ids = torch.arange(rows)  # of a draft model whose vocabulary is larger or smaller than its target's
        self.ids = None if ids is None else ids.to(model.device, torch.int64, copy=True)
        self.width = model.vocab_size if self.ids is None else len(self.ids)
        self._names: list[int] = [] if ids is None else ids.tolist()
        self._product: Product | None = None
        self._text: TextTokens | None = None
        self._own, self._change = lm_head, None if lm_head is not None else model.logit_change
        quantization = draft_dtype(dtype, model.device)
        if ids is None and quantization is None and lm_head is None:
            return
        reduced = lm_head is not None and lm_head.out_features < rows
        weight, bias = self._outputs(None if reduced else self.ids)
        self._product = Product(weight, bias, changing=text)
        if quantization is not None:
            self._product.quantize(quantization)
        if ids is not None and text:
            frequent, spare = ids[:-text].tolist(), ids[-text:].tolist()
            self._text = TextTokens(frequent, spare, rows)

    def __call__(self, features: Tensor) -> Tensor:
        """Features ``[..., H]`` -> logits ``[..., width]``."""
        features = self.enter(features)
        if self._product is None:
            return self.model.lm_head(features)
        with model_time():
            logits = self._product(features)
        return logits if self._change is None else self._change(logits)

    @property
    def whole_head(self) -> tuple[Tensor, Tensor | None]:
        """Weight ``[W, H]`` and bias of the LM head."""
        head: Any = self._own or self.model.model.get_output_embeddings()
        return head.weight.detach(), None if head.bias is None else head.bias.detach()

    def scored(self, features: Tensor) -> Scores:
        """Logits of the candidates of features ``[..., H]``; of all tokens if there are none, or if that reads less."""
        if self.candidates is None or not self.candidates.reads_less(features):
            return Scores(self(features))
        logits, places = self.candidates(self.enter(features))
        return Scores(logits if self._change is None else self._change(logits), places, len(self.whole_head[0]))

    def read(self, rows: Sequence[list[int]]) -> None:
        """Take in the text of each sequence, whose tokens this head's last rows are: before anything is drafted."""
        if self._text is None or not (changed := self._text.read(rows)):
            return
        assert self.ids is not None and self._product is not None
        places, tokens = torch.tensor([list(changed), list(changed.values())], device=self.ids.device).unbind()
        self._product.put(places, *self._outputs(tokens))
        self.ids[places] = tokens
        for place, token in changed.items():
            self._names[place] = token

    def _outputs(self, tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the whole head's outputs for these tokens, or for all."""
        weight, bias = (
            part if part is None or tokens is None else part[tokens.to(part.device)] for part in self.whole_head
        )
        assert weight is not None
        return weight.to(self.model.device), None if bias is None else bias.to(self.model.device)

    def vocabulary(self) -> "TextTokens | None":
        """What it can draft, before any text; None: everything."""
        if self.ids is None:
            return None
        return self._text.fresh() if self._text is not None else TextTokens(self.ids.tolist(), [])

    def tokens(self, places: Tensor) -> Tensor:
        """The token ids of places among the logits, ``[...]`` both."""
        return places if self.ids is None else self.ids[places]

    def named(self, places: list[int]) -> list[int]:
        """``tokens`` of places that the host has."""
        return [self._names[place] for place in places] if self._names else places

    @property
    def product(self) -> Any:
        """The product that a call is, or begins with (candidates); None where it is not one of these."""
        if self.enter is not identity or self.model.logit_change is not None:
            return None
        if self.candidates is not None:
            return self.candidates.inner
        return self._product if self._product is not None else self.model.lm_product

    def spread(self, q: Tensor) -> Tensor:
        """Distributions over the tokens kept, ``[..., width]``, as ones over the vocabulary ``[..., V]``."""
        if self.ids is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.model.vocab_size).index_copy_(-1, self.ids, q)

    def as_model(self) -> TargetModel:
        """Return the model with this head as its LM head: tokens that were left out have probability 0."""
        if self._product is None:
            return self.model
        model = copy(self.model)
        model.lm_head = self._whole  # type: ignore[method-assign]
        return model

    def _whole(self, features: Tensor) -> Tensor:
        logits = self(features)
        if self.ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.model.vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.ids, logits)


def draft_head(model: TargetModel, options: DraftHeadOptions) -> DraftHead:
    """The head of a draft model, with the ids that lie beside it.

    Raises:
        ValueError: ``draft_vocab`` is set, and there are no ids, fewer, or damaged ones.
    """
    rows = rows_of_head(model)
    listed = _ids_beside(model, rows) if options.draft_vocab is not None else None
    ids, text = head_ids(listed, options, rows, str(model.source or model.name))
    return DraftHead(model, ids, options.draft_dtype, text=text)


def listed_head(
    target: TargetModel, module: nn.Module, options: DraftHeadOptions, lm_head: nn.Linear | None = None
) -> DraftHead:
    """Return the target's LM head, or the drafter's ``lm_head``, over the tokens that the ``module``'s ids list.

    Raises:
        ValueError: ``draft_vocab`` is set, and the module has no ids, or fewer.
    """
    ids, text = head_ids(getattr(module, DRAFT_IDS, None), options, target.vocab_size, "the checkpoint")
    return DraftHead(target, ids, options.draft_dtype, lm_head, text)


def own_head(target: TargetModel, module: Any, dtype: Literal["int8"] | None) -> DraftHead:
    """The module's ``lm_head``, whose rows ``d2t`` may name; the target's LM head if it has none.

    Raises:
        ValueError: a d2t that is not increasing, or points outside of the vocabulary.
    """
    return DraftHead(target, draft_ids(getattr(module, D2T, None), target.vocab_size), dtype, module.lm_head)


def rows_of_head(model: TargetModel) -> int:
    """Return the number of ids that have a row in the LM head; ids beyond the target's vocabulary do not count."""
    return min(model.vocab_size, model.model.get_output_embeddings().out_features)


def head_ids(ids: Tensor | None, options: DraftHeadOptions, vocab_size: int, source: str) -> tuple[Tensor | None, int]:
    """Select a draft head's ids of a checkpoint's; return them and how many, the last ones, give way to the text's.

    Raises:
        ValueError: ``draft_vocab`` is set, and there are no ids, or fewer.
    """
    count = options.draft_vocab
    if count is None:
        return None, 0
    again = f"or count them: python -m train.tools.draft_vocab FOLDER --data DIALOGUES --size {count}"
    if ids is None:
        raise ValueError(
            f"draft_vocab is {count:,}, but {source} does not say which tokens are frequent (it has no {DRAFT_IDS}); "
            f"leave draft_vocab out, {again}"
        )
    if len(ids) < count:
        raise ValueError(
            f"draft_vocab is {count:,}, but {source} lists the {len(ids):,} most frequent tokens; set "
            f"draft_vocab={len(ids)} or less, {again}"
        )
    text = min(TEXT_ROWS if options.draft_text is None else options.draft_text, vocab_size - count)
    spare = ids[count : count + text]
    if len(spare) < text:
        unlisted = torch.ones(vocab_size, dtype=torch.bool)
        unlisted[ids.long().cpu()] = False
        spare = torch.cat([spare.cpu(), unlisted.nonzero()[: text - len(spare), 0]])
    return torch.cat([ids[:count].cpu(), spare.cpu()]), text


def check_ids(ids: Tensor, vocab_size: int, source: str) -> None:
    """Raise ValueError unless ``ids`` are a list of different tokens of the vocabulary."""
    whole = ids.dtype in (torch.int32, torch.int64)
    if not whole or ids.dim() != 1 or not len(ids):
        wrong = f"holds {dtype_name(ids.dtype)} of shape {list(ids.shape)}, not a list of token ids (int32)"
    elif (outside := ids[(ids < 0) | (ids >= vocab_size)]).numel():
        wrong = f"lists token {int(outside[0])}, and the vocabulary has {vocab_size:,}"
    elif (missing := len(ids) - len(ids.unique())) > 0:
        wrong = f"lists {missing:,} of its {len(ids):,} tokens twice"
    else:
        return
    raise ValueError(
        f"{source}: {DRAFT_IDS} {wrong}; count them again: python -m train.tools.draft_vocab FOLDER --data F --size N"
    )


def draft_ids(offsets: Tensor | None, vocab_size: int) -> Tensor | None:
    """Return the target's ids ``[N]`` of draft tokens with these d2t ``offsets [N]``; None: it drafts with all.

    Raises:
        ValueError: d2t is not increasing, or points outside of the vocabulary.
    """
    if offsets is None:
        return None
    ids = offsets + torch.arange(len(offsets), device=offsets.device)
    if bool((ids.diff() <= 0).any()):
        at = int((ids.diff() <= 0).nonzero()[0]) + 1
        raise ValueError(
            f"{D2T}: draft tokens {at - 1} and {at} mean the tokens {int(ids[at - 1])} and {int(ids[at])} of the "
            f"target, and must increase; {D2T} holds offsets (target id - draft id), not ids"
        )
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise ValueError(
            f"{D2T}: draft tokens mean the target's tokens {int(ids[0])} to {int(ids[-1])}, and it has {vocab_size:,}"
        )
    return ids


def quantize_layers(part: Part | None, dtype: Literal["int8"], *others: Any) -> None:
    """Read the layers of a learned head in ``dtype``, if it has any, and ``others``, its linear ones outside of layers.

    Its module keeps the weights, to be saved. Stock layers have no products, and stay as they are.
    """
    if part is not None:
        for layer in part.layers:
            if isinstance(layer.layer, FusedLayer) and draft_dtype(dtype, layer.layer.products[0].weight.device):
                layer.layer.quantize_products(dtype)
        part.joined.clear()
    for product in others:
        if isinstance(product, Product) and draft_dtype(dtype, product.weight.device):
            product.quantize(dtype)


def _ids_beside(model: TargetModel, rows: int) -> Tensor | None:
    """The ids below ``rows`` in the folder or Hub repository that a model was loaded from; None where there are none.

    Raises:
        ValueError: damaged ones.
    """
    if model.source is None:
        return None
    try:
        path = fetch(model.source, DRAFT_IDS_FILE, model.revision)
    except EntryNotFoundError:
        return None
    try:
        listed = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); it may be cut off: count the tokens again") from None
    try:
        ids = torch.tensor(listed)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{path} must hold a list of token ids, found {str(listed)[:60]}; count them again") from None
    check_ids(ids, model.model.get_output_embeddings().out_features, path)
    return ids[ids < rows]


class TextTokens:
    """Slots for tokens of a text outside the frequent list; the least recently used token is evicted.

    Args:
        frequent: tokens that keep their places, from 0 on. spare: those that have the places behind them until the text
            needs these, the likeliest first. end: tokens from this id on get no place.
    """

    def __init__(self, frequent: list[int], spare: list[int], end: int | None = None) -> None:
        self._end = end
        self._frequent, self._spare, self._fixed, self._first = frequent, spare, frozenset(frequent), len(frequent)
        self._held = list(spare)  # by place, from the first that is not fixed
        self._places: dict[int, int] = {}  # of what is held, who gives way first coming first
        self._rows: Sequence[list[int]] = []
        self._read: list[tuple[list[int], int]] = []  # each sequence, and how much of it was read
        self._start()

    def read(self, rows: Sequence[list[int]]) -> dict[int, int]:
        """Read the new tokens of each sequence since the last call; one that changed is read again from its start.

        Returns:
            Place -> token, of the places that changed.
        """
        held = list(self._held)
        if rows is not self._rows:
            self._start()
            self._rows, self._read = rows, []
        known = [*self._read, *[([], 0)] * (len(rows) - len(self._read))]
        new = [row[_alike(row, *before) :] for row, before in zip(rows, known, strict=False)]
        self._read = [(row, len(row)) for row in rows]
        # The end of every sequence last: if not all tokens fit, each sequence still has some of its own.
        for place in range(max(map(len, new), default=0), 0, -1):
            for part in new:
                if len(part) >= place and (token := part[-place]) not in self._fixed:
                    self._meet(token)
        if held == self._held:
            return {}
        both = enumerate(zip(held, self._held, strict=True), start=self._first)
        return {place: token for place, (old, token) in both if old != token}

    def fresh(self) -> "TextTokens":
        """The same before any text."""
        return TextTokens(self._frequent, self._spare, self._end)

    def __contains__(self, token: int) -> bool:
        return token in self._fixed or token in self._places

    def __len__(self) -> int:
        return len(self._fixed) + len(self._places)

    def _start(self) -> None:
        self._held = list(self._spare)
        self._places = {token: place for place, token in reversed(list(enumerate(self._spare)))}

    def _meet(self, token: int) -> None:
        if not self._spare or (self._end is not None and token >= self._end):
            return
        place = self._places.pop(token, None)
        if place is None:
            place = self._places.pop(next(iter(self._places)))
            self._held[place] = token
        self._places[token] = place


def _alike(row: list[int], other: list[int], count: int) -> int:
    """Number of tokens with which ``row`` begins like the first ``count`` tokens of ``other``."""
    if row is other or row[:count] == other[:count]:
        return min(count, len(row))
    pairs = enumerate(zip(row, other, strict=False))
    return next((place for place, (one, two) in pairs if one != two), min(count, len(row)))
