"""Held-out figures by the place of a token within its answer, which show a drafter that only learnt openings."""

import torch
from torch import Tensor

from train.core.losses import Pairs
from train.core.task import Ratio, Task
from train.data.packing import Batch

BUCKETS = ((0, 16), (16, 64), (64, 256), (256, 1024), (1024, None))  # tokens of the answer before it: from, below


def bucket_name(start: int, end: int | None) -> str:
    """``0-15``, ``1024+``."""
    return f"{start}+" if end is None else f"{start}-{end - 1}"


def answer_positions(loss_mask: Tensor, segments: Tensor) -> Tensor:
    """int64 ``[R, L]``: number of tokens of the same answer before an answer's token; -1 elsewhere.

    ``loss_mask`` bool ``[R, L]``, ``segments`` int64 ``[R, L]``: two answers that touch in different dialogues are two.
    """
    index = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    before = torch.roll(loss_mask, 1, dims=1) & (torch.roll(segments, 1, dims=1) == segments)
    before[:, 0] = False
    starts = torch.where(loss_mask & ~before, index, -1).cummax(dim=1).values
    return torch.where(loss_mask, index - starts, -1)


def by_position(task: Task, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
    """``loss_at_<bucket>`` and ``top1_at_<bucket>`` of the trained positions, by the place of the predicted token.

    Returns all buckets, empty ones with a count of 0, because all ranks must have the same names.
    """
    places = batch.shifted(answer_positions(batch.loss_mask, batch.segments) + 1, task.ahead) - 1
    places = places.flatten()[batch.rows]
    found: dict[str, Ratio] = {}
    for start, end in BUCKETS:
        chosen = (places >= start) & (places < end if end is not None else places >= start)
        part = pairs.at(chosen)
        judged = task.judged(part)
        first = Pairs(judged.predictions[:1], judged.targets)  # no later prediction is accepted without it
        count, name = chosen.sum(), bucket_name(start, end)
        found[f"loss_at_{name}"] = Ratio(task.losses(part)["loss"].detach(), count)
        found[f"top1_at_{name}"] = Ratio(task.heads.compare(first)[1].sum(), count)
    return found
