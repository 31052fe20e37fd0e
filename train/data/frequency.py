"""The most frequent tokens of answers: the vocabulary that a drafter drafts with, and that its loss is over."""

from collections.abc import Iterable

import torch
from torch import Tensor

from drafters.model.draft_head import DraftHeadOptions
from train.core.task import Task
from train.data.packing import Source


def find_frequent(task: Task, train: Source) -> None:
    """Give ``task`` the ``draft_vocab`` and the ``loss_vocab`` most frequent tokens of the training answers.

    Raises:
        ValueError: more tokens than the vocabulary has, or a method that does not draft with a part of it.
    """
    draft, loss, vocab = task.config.draft_vocab, task.config.loss_vocab, task.ends.lm_head.out_features
    if draft is not None and not issubclass(task.drafter.options, DraftHeadOptions):
        raise ValueError(f"draft_vocab is {draft:,}, and drafter {task.drafter.name!r} takes none; leave it out")
    if draft is None and loss is None:
        return
    answers = ((dialogue.input_ids, dialogue.loss_mask) for dialogue in map(train.__getitem__, range(len(train))))
    counts = count_answers(answers, vocab)
    task.draft_ids = None if draft is None else most_frequent(counts, draft, "draft_vocab")
    task.heads.ids = None if loss is None else most_frequent(counts, loss, "loss_vocab")


def count_answers(dialogues: Iterable[tuple[Tensor, Tensor]], vocab: int) -> Tensor:
    """Counts of each token in answers, int64 ``[vocab]``; a dialogue is its ids and its loss mask, ``[T]``."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for ids, mask in dialogues:
        answer = ids[mask]
        counts.index_add_(0, answer, torch.ones_like(answer))
    return counts


def most_frequent(counts: Tensor, count: int, key: str = "draft_vocab") -> Tensor:
    """The first ``count`` tokens by frequency, int32; of equally frequent tokens, the lowest ids first.

    A tokenizer gives frequent tokens low ids, so these are a fair guess for tokens that a short text lacks.

    Raises:
        ValueError: more tokens than there are.
    """
    if count > len(counts):
        raise ValueError(f"{key} is {count:,}, more than the vocabulary's {len(counts):,} tokens; take fewer")
    return counts.sort(descending=True, stable=True).indices[:count].int()
