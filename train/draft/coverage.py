"""What draft models cover of a target's text: the rows from which the speculation of any of them is right.

Boost-tuning (SpecInfer, Miao et al. 2023, section 3: learning-based speculator) trains each draft model on what those
before it do not cover.
"""

import torch
from torch import Tensor

from drafters.model.ends import FrozenEnds
from drafters.model.target import TargetModel
from train.data.packing import Batch
from train.draft.options import Boost


def load_draft_models(names: list[str], dtype: torch.dtype, device: torch.device) -> list[TargetModel]:
    """Draft models to be asked, on transformers' own layers.

    Raises:
        ValueError: nothing loadable there.
    """
    return [TargetModel.from_pretrained(name, dtype, device, engine="eager") for name in names]


@torch.no_grad()
def right_rows(model: TargetModel, batch: Batch, ends: FrozenEnds, chunk_rows: int) -> Tensor:
    """bool ``[R, L]``: where the token that the draft model puts first after row i is the target's own first choice."""
    right = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
    for span in batch.spans:
        part = (span.row, slice(span.start, span.start + span.length))
        ids = batch.input_ids[part][None].to(model.device)
        ours = torch.cat([model.lm_head(some).argmax(-1) for some in model.features(ids).features[0].split(chunk_rows)])
        head = ends.lm_head
        features = batch.features[part].to(head.weight.device, head.weight.dtype)
        theirs = torch.cat([head(some).argmax(-1) for some in features.split(chunk_rows)])
        right[part] = ours.cpu() == theirs.cpu()
    return right


def covered_rows(right: Tensor, batch: Batch, length: int) -> Tensor:
    """bool ``[R, L]``: rows from which ``length`` tokens in a row are ``right``, or all up to the answer's end."""
    wrong = ~right & batch.shifted(batch.loss_mask, 1)  # row i is about token i + 1
    missed = wrong.clone()
    for ahead in range(1, length):
        missed |= batch.shifted(wrong, ahead)
    return ~missed


class Boosting:
    """Which rows are left for a draft model: not covered by any before it, but for a share of ``keep``.

    The draft models before it are asked once for every dialogue.
    """

    def __init__(self, options: Boost, ends: FrozenEnds, dtype: torch.dtype, chunk_rows: int) -> None:
        self.options, self.ends, self.dtype, self.chunk_rows = options, ends, dtype, chunk_rows
        self._models: list[TargetModel] = []
        self._trained: dict[
            bytes, Tensor
        ] = {}  # by a dialogue's text: training and held-out ones have the same numbers

    def trained(self, batch: Batch) -> Tensor:
        """bool ``[R, L]``: whether a row is trained where its token belongs to an answer."""
        texts = [batch.input_ids[s.row, s.start : s.start + s.length].numpy().tobytes() for s in batch.spans]
        if any(text not in self._trained for text in texts):
            self._models = self._models or load_draft_models(
                self.options.after, self.dtype, self.ends.lm_head.weight.device
            )
            covered = torch.zeros_like(batch.loss_mask)
            for model in self._models:
                right = right_rows(model, batch, self.ends, self.chunk_rows)
                covered |= covered_rows(right, batch, self.options.length)
            # Spread evenly, and the same in every epoch: multiples of the golden ratio's fraction.
            kept = batch.position_ids * 0.6180339887 % 1 < self.options.keep
            found = ~covered | kept
            for span, text in zip(batch.spans, texts, strict=True):
                self._trained[text] = found[span.row, span.start : span.start + span.length].clone()
        left = torch.zeros_like(batch.loss_mask)
        for span, text in zip(batch.spans, texts, strict=True):
            left[span.row, span.start : span.start + span.length] = self._trained[text]
        return left
