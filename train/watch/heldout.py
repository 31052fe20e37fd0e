"""Losses and the task's own figures on held-out text."""

from typing import Any

import torch
from torch import Tensor

from train.core.runtime import Ranks
from train.core.task import Ratio, Task
from train.data.packing import Batch, Source, collate_or_stand_in, complete, split_evenly
from train.watch.positions import by_position

PART_TOKENS = 2048  # at once: the mask of ``chain_alpha`` grows with the square of a row


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
        self, task: Task, module: Any, device: torch.device, dtype: torch.dtype, whose: bool = False
    ) -> dict[str, float]:
        """``heldout_<name>`` of each of the task's losses and figures, over all ranks; every rank gets the same.

        ``whose``: with ``own_answers``, which training does not change.
        """
        ratios: dict[str, Ratio] = {}
        module.eval()
        for share in self.shares[self.ranks.rank :: self.ranks.count]:
            batch = collate_or_stand_in(self.store, share, self.dialogues, task.config.taps)
            batch = complete(self.store, batch, task.config.taps)
            rows = task.rows(batch).to(device)
            batch = batch.to(device, dtype)
            count = torch.tensor(len(rows), device=device)
            predicted, target = task.pairs(module, batch, rows)
            found = {name: Ratio(total, count) for name, total in task.losses(predicted, target).items()}
            found |= task.heldout(module, batch, predicted, target)
            found |= by_position(task, batch, rows, predicted, target)
            found |= {"own_answers": own_answers(task, batch)} if whose else {}
            found |= vocabulary_coverage(task, target)
            for name, ratio in found.items():
                before = ratios.get(name)
                ratios[name] = Ratio(before.total + ratio.total, before.count + ratio.count) if before else ratio
        module.train()
        pairs = torch.stack([part.double() for r in ratios.values() for part in (r.total, r.count)])
        values = self.ranks.total(pairs).view(-1, 2).tolist()
        # A ratio without a count has nothing to report: no chain got as far as that, say.
        return {f"heldout_{name}": total / count for name, (total, count) in zip(ratios, values, strict=True) if count}


def own_answers(task: Task, batch: Batch) -> Ratio:
    """Of an answer's tokens those that the target puts first: nearly all where it wrote them itself, greedily."""
    rows = batch.shifted(batch.loss_mask, 1).flatten().nonzero().squeeze(1)
    features, tokens = batch.features.flatten(0, 1)[rows], batch.input_ids.roll(-1, dims=1).flatten()[rows]
    pairs = zip(features.split(task.chunk_rows), tokens.split(task.chunk_rows), strict=True)
    same = [(task.ends.lm_head(some).argmax(-1) == text).sum() for some, text in pairs]
    return Ratio(torch.stack([*same, torch.zeros_like(rows.sum())]).sum(), torch.tensor(len(rows), device=rows.device))


def vocabulary_coverage(task: Task, target: Tensor) -> dict[str, Ratio]:
    """``draft_vocab_coverage``: how many of the target's own first choices are among the tokens that are drafted with.

    No greedy draft of these is accepted more often. ``target``: ``[n, H]``, what the target gives to its LM head.
    """
    if task.draft_ids is None:
        return {}
    head, ids = task.ends.lm_head, task.draft_ids.to(target.device)
    chosen = torch.cat([head(part).argmax(-1) for part in target.split(task.chunk_rows)])
    count = torch.tensor(len(target), device=target.device)
    return {"draft_vocab_coverage": Ratio(torch.isin(chosen, ids).sum(), count)}
