"""Losses and figures on held-out text; some by the place of a token within its answer, which show a drafter that only
learnt openings."""

from typing import Any

import torch
from torch import Tensor

from train.core.losses import Pairs
from train.core.runtime import Ranks
from train.core.task import Ratio, Task, mean, text_tokens
from train.data.packing import Batch, Source, collate_or_stand_in, complete, split_evenly

PART_TOKENS = 2048  # of a micro-batch
BUCKETS = ((0, 16), (16, 64), (64, 256), (256, 1024), (1024, None))  # tokens of the answer before it: from, below


def first_dialogues(store: Source, tokens: int) -> list[int]:
    """The dialogues of the first ``tokens`` tokens, at least one."""
    return list(range(max(1, int((store.lengths.cumsum(0) <= tokens).sum()))))


class Heldout:
    """The first ``tokens`` tokens (at least one dialogue) of the held-out store, split over the ranks."""

    def __init__(self, store: Source, tokens: int, ranks: Ranks) -> None:
        self.store, self.ranks = store, ranks
        lengths = store.lengths.tolist()
        self.dialogues = first_dialogues(store, tokens)
        total = sum(lengths[i] for i in self.dialogues)
        parts = -(-total // (PART_TOKENS * ranks.count)) * ranks.count
        self.shares = split_evenly(self.dialogues, lengths, parts)

    @torch.no_grad()
    def figures(
        self, task: Task, module: Any, device: torch.device, dtype: torch.dtype, with_own_answers: bool = False
    ) -> dict[str, float]:
        """``heldout_<name>`` of each of the task's losses and figures, over all ranks, the same on each.

        ``with_own_answers``: also ``own_answers``, which training does not change.
        """
        sums: dict[str, Tensor] = {}  # total and count
        module.eval()
        for share in self.shares[self.ranks.rank :: self.ranks.count]:
            batch = collate_or_stand_in(self.store, share, self.dialogues, task.config.taps)
            batch = complete(self.store, batch, task.config.taps)
            batch = task.choose(batch).to(device, dtype)
            count = torch.tensor(len(batch.rows), device=device)
            pairs = task.pairs(module, batch)
            ratios = {name: Ratio(total, count) for name, total in task.losses(pairs).items()}
            ratios |= task.heldout(module, batch, pairs)
            ratios |= by_position(task, batch, pairs)
            ratios |= {"own_answers": own_answers(task, batch)} if with_own_answers else {}
            ratios |= vocabulary_coverage(task, pairs.targets)
            for name, ratio in ratios.items():
                sums[name] = sums.get(name, 0) + torch.stack([ratio.total.double(), ratio.count.double()])
        module.train()
        values = self.ranks.total(torch.stack([*sums.values()])).tolist()
        # A ratio without a count is left out, for example n-alpha if no chain reached step n.
        return {f"heldout_{name}": total / count for name, (total, count) in zip(sums, values, strict=True) if count}


def own_answers(task: Task, batch: Batch) -> Ratio:
    """Share of answers' tokens that the target ranks first: nearly all if it wrote them itself, greedily."""
    rows = batch.shifted(batch.loss_mask, 1).flatten().nonzero().squeeze(1)
    return mean(task.heads.first_choice(batch.features.flatten(0, 1)[rows]) == text_tokens(batch, 1).flatten()[rows])


def vocabulary_coverage(task: Task, target: Tensor) -> dict[str, Ratio]:
    """``draft_vocab_coverage``: share of the target's first choices that the draft vocabulary contains.

    It limits the acceptance of greedy drafts. ``target``: ``[n, H]``, the target's features.
    """
    if task.draft_ids is None:
        return {}
    covered = torch.isin(task.heads.first_choice(target), task.draft_ids.to(target.device))
    return {"draft_vocab_coverage": mean(covered)}


def bucket_name(start: int, end: int | None) -> str:
    """``0-15``, ``1024-on``: names that all trackers take."""
    return f"{start}-on" if end is None else f"{start}-{end - 1}"


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
    ratios: dict[str, Ratio] = {}
    for start, end in BUCKETS:
        chosen = (places >= start) & (places < (end or 1 << 62))
        part = pairs.at(chosen)
        judged = task.judged(part)
        first = Pairs(judged.predictions[:1], judged.targets)  # no later prediction is accepted without it
        count, name = chosen.sum(), bucket_name(start, end)
        ratios[f"loss_at_{name}"] = Ratio(task.losses(part)["loss"].detach(), count)
        ratios[f"top1_at_{name}"] = Ratio(task.heads.compare(first)[1].sum(), count)
    return ratios
