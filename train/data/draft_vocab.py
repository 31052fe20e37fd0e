"""The most frequent tokens of answers: the vocabulary that a drafter drafts with, and that its loss is over.

Counted in a run's training data, or by train.tools.draft_vocab, which adds them to a checkpoint.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data_prep.dialogues.encoding import encode_split, load_tokenizer
from data_prep.dialogues.reader import is_text
from data_prep.store.manifest import MANIFEST
from data_prep.store.reader import FeatureStore
from drafters.common.files import replace_text
from drafters.common.wording import read_text
from drafters.hub import checkpoint
from drafters.methods import drafter_class
from drafters.model.draft_head import DRAFT_IDS, DRAFT_IDS_FILE, DraftHeadOptions
from drafters.model.files import load_bare_tokenizer, load_config_only
from train.core.task import Task
from train.core.weights import draft_with
from train.data.packing import Source

LEAST_COVERED = 0.8  # share of the answers' tokens
LINES = 4096  # lines of a text, tokenized in one call
WHOLE = 1 << 30  # longest dialogue in tokens: none is cut


def find_frequent(task: Task, train: Source) -> str | None:
    """Give ``task`` the ``draft_vocab`` and the ``loss_vocab`` most frequent tokens of the training answers. Without
    ``draft_vocab`` those of ``init_from`` stay.

    Return a note on the share of the answers' tokens that can be drafted, or None if that is all of them.

    Raises:
        ValueError: more tokens than the vocabulary has, or a method that does not draft with a part of it.
    """
    draft, loss, vocab = task.config.draft_vocab, task.config.loss_vocab, task.ends.lm_head.out_features
    keys = {*task.drafter.options.model_fields, *type(task.head).model_fields}
    if draft is not None and not {"draft_vocab", "draft_vocab_size"} & keys:
        raise ValueError(f"draft_vocab is {draft:,}, and drafter {task.drafter.name!r} takes none; leave it out")
    if draft is None and loss is None and task.draft_ids is None:
        return None
    answers = ((dialogue.input_ids, dialogue.loss_mask) for dialogue in map(train.__getitem__, range(len(train))))
    counts = count_answers(answers, vocab)
    if loss is not None:
        task.heads.ids = most_frequent(counts, loss, "loss_vocab")
    if draft is not None:
        draft_with(task, most_frequent(counts, draft, "draft_vocab"))
    if task.draft_ids is None:
        return None
    covered = float(counts[task.draft_ids.long()].sum() / counts.sum().clamp_min(1))
    said = f"draft_vocab={len(task.draft_ids):,} covers {covered:.1%} of the training answers' tokens"
    if covered >= LEAST_COVERED:
        return said
    kept = task.config.init_from is not None and (draft is None or task.config.sizes_lm_head)
    advice = "leave init_from out, whose tokens these are, and " if kept else ""
    return f"warning: {said}, and no other can be drafted; {advice}set a larger draft_vocab"


def count_answers(dialogues: Iterable[tuple[Tensor, Tensor]], vocab: int) -> Tensor:
    """Counts of each token in answers, int64 ``[vocab]``; a dialogue is its ids and its loss mask, ``[T]``."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    for ids, mask in dialogues:
        counts += torch.bincount(ids[mask], minlength=vocab)
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


def add_frequent_tokens(options: argparse.Namespace) -> None:
    """The steps of train.tools.draft_vocab: count tokens, write the most frequent into a checkpoint, report."""
    folder: Path = options.folder
    trained = is_drafter(folder)
    if trained:
        config, weights = checkpoint.load_checkpoint(folder)
        name, revision, vocab = (config["target"][key] for key in ("name", "revision", "vocab_size"))
    else:
        name, revision, vocab = str(folder), None, int(load_config_only(str(folder)).vocab_size)
    if options.tokenizer:
        name, revision = options.tokenizer, None
    counts = count(options.data, vocab, name, revision, options.chat_template)
    ids = most_frequent(counts, options.size)
    if trained:  # it drafts with all of them by default
        config["drafter"] |= {"draft_vocab": len(ids)} | (
            {"candidates": None} if "candidates" in config["drafter"] else {}
        )
        checkpoint.save_checkpoint(folder, weights | {DRAFT_IDS: ids}, config, dtype=None)
    else:
        replace_text(folder / DRAFT_IDS_FILE, json.dumps(ids.tolist()) + "\n")
    print(f"{folder} lists the {len(ids):,} most frequent of {vocab:,} tokens, counted in {options.data}:")
    for size in [1 << power for power in range(10, 30) if 1 << power < len(ids)] + [len(ids)]:
        covered = counts[ids[:size].long()].sum() / counts.sum()
        print(f"  draft_vocab={size:<7} covers {covered:.2%} of the {int(counts.sum()):,} tokens there")
    print(f"It drafts with {len(ids):,} now." if trained else "Its methods use them with the option draft_vocab.")


def is_drafter(folder: Path) -> bool:
    """Whether a checkpoint is a drafter's, and not a model's.

    Raises:
        ValueError: the drafter's method cannot draft with a part of the LM head.
    """
    if '"drafter_type"' not in (folder / "config.json").read_text(encoding="utf-8"):
        return False
    method = checkpoint.read_config(folder).drafter_type
    if not issubclass(drafter_class(method).options, DraftHeadOptions):
        raise ValueError(f"{folder} holds a drafter of type {method!r}, which has no option draft_vocab")
    return True


def count(data: str, vocab: int, name: str, revision: str | None, template: str | None) -> Tensor:
    """Counts of each token in ``data``, int64 ``[vocab]``, by the tokenizer ``name``.

    Raises:
        ValueError: unreadable data, a store of another vocabulary, no tokenizer, or one with other tokens.
    """
    if (Path(data) / MANIFEST).is_file():
        store = FeatureStore.open(data)
        if store.manifest.vocab_size != vocab:
            size = f"{store.manifest.vocab_size:,} tokens, not of {vocab:,}"
            raise ValueError(f"{data} was made for a vocabulary of {size}; give features of the drafter's own target")
        return count_answers(((dialogue.input_ids, dialogue.loss_mask) for dialogue in store), vocab)
    if is_text(data):
        return count_text(data, vocab, load_bare_tokenizer(name, revision), name)
    split = encode_split(data, load_tokenizer(name, revision, template), WHOLE)
    both = ((torch.from_numpy(one.input_ids), torch.from_numpy(one.loss_mask)) for one in split.dialogues)
    return count_answers(both, vocab)


def count_text(file: str, vocab: int, tokenizer: Any, name: str) -> Tensor:
    """``count`` of a plain text. It lacks EOS, which ends every answer: EOS gets the highest count."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    lines = read_text(Path(file)).splitlines(keepends=True)
    for start in range(0, len(lines), LINES):
        encoded = tokenizer(lines[start : start + LINES], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([token for line in encoded for token in line], dtype=torch.int64)
        if len(ids) and int(ids.max()) >= vocab:
            raise ValueError(f"the tokenizer {name} has token {int(ids.max())}, and the vocabulary {vocab:,} tokens")
        counts += torch.bincount(ids, minlength=vocab)
    if not counts.any():
        raise ValueError(f"{file} is empty; give a text like the answers that will be drafted")
    if tokenizer.eos_token_id is not None:
        counts[tokenizer.eos_token_id] = counts.max()
    return counts
