"""The LM head as drafting uses it: the rows of the most frequent tokens alone, and in a precision of its own.

The target verifies with its whole LM head, so a draft's may leave tokens out (FR-Spec, Zhao et al. 2025) and round the
others: what that costs is acceptance. The output is the target's all the same, for tokens are drawn from, and verified
against, the distribution q over the tokens that are left.
"""

from copy import copy
from typing import Any, Literal

import torch
from huggingface_hub.errors import EntryNotFoundError
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from drafters.config import Config
from drafters.wording import dtype_name

from .clock import model_time
from .ends import fetch
from .fused import FusedLayer
from .linear import Product
from .runner import Part
from .target import TargetModel

DRAFT_IDS = "draft_ids"  # token ids by frequency, the most frequent first: a tensor of a drafter's checkpoint
DRAFT_IDS_FILE = "draft_ids.safetensors"  # or, alone in a file, beside the weights of a draft model


class DraftHeadOptions(Config):
    """Options of a drafter that drafts through an LM head, the target's or its draft model's.

    ``draft_vocab``: draft with the rows of so many tokens, the most frequent, as the checkpoint (or a draft model's
    folder) lists them; null: with all. ``draft_dtype``: keep an int8 copy of those rows to draft with; of a learned
    head's own layers, too.
    """

    draft_vocab: int | None = Field(default=None, ge=1)
    draft_dtype: Literal["int8"] | None = None


class DraftHead:
    """Features -> logits over ``width`` tokens; what is chosen of these is a place in them until ``tokens`` names it.

    Args:
        model: whose LM head it is. ids: ``[N]`` the tokens to keep; None: all. dtype: see ``DraftHeadOptions``.
        own: an LM head of the drafter's own, in the place of the model's.

    Attributes:
        reads: of wider states so many numbers, the first ones; None: features are as wide as they are.
    """

    reads: int | None = None

    def __init__(
        self,
        model: TargetModel,
        ids: Tensor | None = None,
        dtype: Literal["int8"] | None = None,
        own: nn.Linear | None = None,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.ids = None if ids is None else ids.to(model.device, torch.int64)
        self.width = model.vocab_size if self.ids is None else len(self.ids)
        self._product: Product | None = None
        if ids is None and dtype is None and own is None:
            return
        head = own or model.model.get_output_embeddings()
        parts = [None if part is None else part.detach() for part in (head.weight, head.bias)]
        if ids is not None:
            parts = [None if part is None else part[ids.to(part.device)] for part in parts]
        weight, bias = (None if part is None else part.to(model.device) for part in parts)
        assert weight is not None
        self._product = Product(weight, bias)
        if dtype is not None:
            self._product.quantize(dtype)

    def __call__(self, features: Tensor) -> Tensor:
        """Features ``[..., H]`` -> logits ``[..., width]``."""
        if self.reads is not None:
            features = features[..., : self.reads]
        if self._product is None:
            return self.model.lm_head(features)
        with model_time():
            return self._product(features)

    def tokens(self, places: Tensor) -> Tensor:
        """The token ids of places among the logits, ``[...]`` both."""
        return places if self.ids is None else self.ids[places]

    def spread(self, q: Tensor) -> Tensor:
        """Distributions over the tokens kept, ``[..., width]``, as ones over the vocabulary ``[..., V]``."""
        if self.ids is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.model.vocab_size).index_copy_(-1, self.ids, q)

    def as_model(self) -> TargetModel:
        """The model with this head in the place of its own: no token that was left out has any probability."""
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

    def options(self) -> dict[str, Any]:
        """The options that it was made by, defaults left out."""
        given = {"draft_vocab": None if self.ids is None else self.width, "draft_dtype": self.dtype}
        return {key: value for key, value in given.items() if value is not None}


def draft_head(model: TargetModel, options: DraftHeadOptions) -> DraftHead:
    """The head of a draft model, with the ids that lie beside it.

    Raises:
        ValueError: ``draft_vocab`` is set, and there are no ids, fewer, or damaged ones.
    """
    count = options.draft_vocab
    ids = None if count is None else first_ids(_ids_beside(model), count, str(model.source or model.name))
    return DraftHead(model, ids, options.draft_dtype)


def first_ids(ids: Tensor | None, count: int, source: str) -> Tensor:
    """The first ``count`` of a checkpoint's ids, where it has any.

    Raises:
        ValueError: it has none, or fewer.
    """
    again = f"or count them: python -m train.draft_vocab FOLDER --data DIALOGUES --size {count}"
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
    return ids[:count]


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
        f"{source}: {DRAFT_IDS} {wrong}; count them again: python -m train.draft_vocab ... --data DIALOGUES --size N"
    )


def quantize_layers(part: Part | None, dtype: Literal["int8"], *others: Any) -> None:
    """Read the layers of a learned head in ``dtype``, if it has any, and ``others``, its linear ones outside of layers.

    Its module keeps the weights, to be saved. The engine "eager" has no products, and stays as it is.
    """
    for layer in part.layers if part is not None else []:
        if isinstance(layer.layer, FusedLayer):
            layer.layer.quantize_products(dtype)
    for product in others:
        if isinstance(product, Product):
            product.quantize(dtype)


def _ids_beside(model: TargetModel) -> Tensor | None:
    """The ids in the folder or Hub repository that a model was loaded from; None where there are none.

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
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); it may be cut off: count the tokens again") from None
    if list(tensors) != [DRAFT_IDS]:
        raise ValueError(f"{path} must hold {DRAFT_IDS} alone, found {sorted(tensors)}; count the tokens again")
    check_ids(tensors[DRAFT_IDS], model.vocab_size, path)
    return tensors[DRAFT_IDS]
