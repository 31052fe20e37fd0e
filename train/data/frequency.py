"""Which tokens are frequent in answers: those that a drafter need draft with."""

from collections.abc import Iterable

import torch
from torch import Tensor

from drafters.model.draft_head import DraftHeadOptions
from train.data.packing import Source
from train.task import Task


def draft_ids(task: Task, train: Source) -> Tensor | None:
    """The ``draft_vocab`` most frequent tokens of the training answers; None where the config sets none.

    Raises:
        ValueError: more tokens than the vocabulary has, or a method that does not draft with a part of it.
    """
    count, vocab = task.config.draft_vocab, task.ends.lm_head.out_features
    if count is None:
        return None
    if not issubclass(task.drafter.options, DraftHeadOptions):
        raise ValueError(f"draft_vocab is {count:,}, and drafter {task.drafter.name!r} takes none; leave it out")
    answers = ((dialogue.input_ids, dialogue.loss_mask) for dialogue in map(train.__getitem__, range(len(train))))
    return most_frequent(count_answers(answers, vocab), count)


def count_answers(dialogues: Iterable[tuple[Tensor, Tensor]], vocab: int) -> Tensor:
    """How often each token stands in answers, int64 ``[vocab]``; a dialogue is its ids and its loss mask, ``[T]``."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for ids, mask in dialogues:
        answer = ids[mask]
        counts.index_add_(0, answer, torch.ones_like(answer))
    return counts


def most_frequent(counts: Tensor, count: int) -> Tensor:
    """The first ``count`` tokens by frequency, int32; of equals, and of those never seen, the lowest ids first.

    A tokenizer gives the frequent tokens low ids, so these are a fair guess where the text is short.

    Raises:
        ValueError: more tokens than there are.
    """
    if count > len(counts):
        raise ValueError(f"{count:,} tokens to draft with are more than the vocabulary's {len(counts):,}; take fewer")
    return counts.sort(descending=True, stable=True).indices[:count].int()
