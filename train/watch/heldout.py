"""Losses and the task's own figures on held-out text."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from train.core.runtime import Ranks
from train.core.task import Ratio, Task, mean, text_tokens
from train.data.packing import Batch, Source, collate_or_stand_in, complete, split_evenly
from train.watch.positions import by_position

PART_TOKENS = 2048  # of a micro-batch


class Heldout:
    """The first ``tokens`` tokens (at least one dialogue) of the held-out store, split over the ranks."""

    def __init__(self, store: Source, tokens: int, ranks: Ranks) -> None:
        self.store, self.ranks = store, ranks
        lengths = store.lengths.tolist()
        ends = store.lengths.cumsum(0)
        self.dialogues = list(range(max(1, int((ends <= tokens).sum()))))
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
        ratios: dict[str, Ratio] = {}
        module.eval()
        for share in self.shares[self.ranks.rank :: self.ranks.count]:
            batch = collate_or_stand_in(self.store, share, self.dialogues, task.config.taps)
            batch = complete(self.store, batch, task.config.taps)
            batch = replace(batch, rows=task.rows(batch)).to(device, dtype)
            count = torch.tensor(len(batch.rows), device=device)
            pairs = task.pairs(module, batch)
            found = {name: Ratio(total, count) for name, total in task.losses(pairs).items()}
            found |= task.heldout(module, batch, pairs)
            found |= by_position(task, batch, pairs)
            found |= {"own_answers": own_answers(task, batch)} if with_own_answers else {}
            found |= vocabulary_coverage(task, pairs.targets)
            for name, ratio in found.items():
                before = ratios.get(name)
                ratios[name] = Ratio(before.total + ratio.total, before.count + ratio.count) if before else ratio
        module.train()
        sums = torch.stack([part.double() for r in ratios.values() for part in (r.total, r.count)])
        values = self.ranks.total(sums).view(-1, 2).tolist()
        # A ratio without a count is left out, for example n-alpha if no chain reached step n.
        return {f"heldout_{name}": total / count for name, (total, count) in zip(ratios, values, strict=True) if count}


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
