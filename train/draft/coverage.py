"""The rows of a target's text that draft models cover: from there, the speculation of any of them is right.

Boost-tuning (SpecInfer, Miao et al. 2023, section 3: learning-based speculator) trains each draft model on the rows
that the earlier ones do not cover.
"""

from functools import partial

import torch
from torch import Tensor

from drafters.model.target import TargetModel
from train.configs import Boost
from train.core.lm_heads import LMHeads
from train.data.packing import Batch


@torch.no_grad()
def right_rows(model: TargetModel, batch: Batch, heads: LMHeads) -> Tensor:
    """bool ``[R, L]``: whether draft model and target rank the same token first after position i."""
    size, head = heads.rows_at_once(heads.target), heads.target.weight
    right = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
    for span in batch.spans:
        features = model.features(span.of(batch.input_ids)[None].to(model.device)).features[0]
        ours = torch.cat([model.lm_head(some).argmax(-1) for some in features.split(size)])
        theirs = heads.first_choice(span.of(batch.features).to(head.device, head.dtype))
        span.of(right)[:] = ours.cpu() == theirs.cpu()
    return right


def covered_rows(right: Tensor, batch: Batch, length: int) -> Tensor:
    """bool ``[R, L]``: positions from which ``length`` tokens, or all up to the answer's end, are ``right``."""
    wrong = ~right & batch.shifted(batch.loss_mask, 1)  # row i is about token i + 1
    missed = wrong.clone()
    for ahead in range(1, length):
        missed |= batch.shifted(wrong, ahead)
    return ~missed


class Boosting:
    """Positions that a draft model is trained on: those that no earlier one covers, and a share ``keep`` of the others.

    The earlier draft models run once on every dialogue.
    """

    def __init__(self, options: Boost, heads: LMHeads, dtype: torch.dtype) -> None:
        self.options, self.heads, self.dtype = options, heads, dtype
        self._models: list[TargetModel] = []
        # By a dialogue's text, because training and held-out dialogues have the same numbers.
        self._trained: dict[bytes, Tensor] = {}

    def trained(self, batch: Batch) -> Tensor:
        """bool ``[R, L]``: whether a position is trained where its token belongs to an answer."""
        texts = [span.of(batch.input_ids).numpy().tobytes() for span in batch.spans]
        if any(text not in self._trained for text in texts):
            device = self.heads.target.weight.device
            load = partial(TargetModel.from_pretrained, dtype=self.dtype, device=device, engine="stock")
            self._models = self._models or [load(name) for name in self.options.after]
            # Spread evenly, and the same in every epoch: multiples of the golden ratio's fraction.
            trained = batch.position_ids * 0.6180339887 % 1 < self.options.keep
            covered = torch.zeros_like(trained)
            for model in self._models:
                covered |= covered_rows(right_rows(model, batch, self.heads), batch, self.options.length)
            trained |= ~covered
            self._trained |= {text: span.of(trained).clone() for span, text in zip(batch.spans, texts, strict=True)}
        left = torch.zeros_like(batch.loss_mask)
        for span, text in zip(batch.spans, texts, strict=True):
            span.of(left)[:] = self._trained[text]
        return left
