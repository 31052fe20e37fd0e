"""The steps of train.draft_vocab: count tokens of answers, write the most frequent into a checkpoint, report."""

import argparse
import json
from pathlib import Path

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
from train.data.frequency import count_answers, most_frequent

LINES = 4096  # lines of a text, tokenized in one call
WHOLE = 1 << 30  # longest dialogue in tokens: none is cut


def add_frequent_tokens(options: argparse.Namespace) -> None:
    """Count, write and report."""
    folder: Path = options.folder
    trained = is_drafter(folder)
    if trained:
        target = checkpoint.read_config(folder).target
        name, revision, vocab = target.name, target.revision, target.vocab_size
    else:
        name, revision, vocab = str(folder), None, int(load_config_only(str(folder)).vocab_size)
    if options.tokenizer:
        name, revision = options.tokenizer, None
    counts = count(options.data, vocab, name, revision, options.chat_template)
    ids = most_frequent(counts, options.size)
    (add_to_drafter if trained else add_to_model)(folder, ids)
    print(f"{folder} lists the {len(ids):,} most frequent of {vocab:,} tokens, counted in {options.data}:")
    for size in sizes(len(ids)):
        covered = counts[ids[:size].long()].sum() / counts.sum()
        print(f"  draft_vocab={size:<7} covers {covered:.2%} of the {int(counts.sum()):,} tokens there")
    print(f"It drafts with {len(ids):,} now." if trained else "Its methods use them with the option draft_vocab.")


def is_drafter(folder: Path) -> bool:
    """Whether a checkpoint is a drafter's, and not a model's.

    Raises:
        ValueError: the drafter's method cannot draft with a part of the LM head.
    """
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder}/config.json is not valid JSON ({error})") from None
    if not isinstance(content, dict) or "drafter_type" not in content:
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
            raise ValueError(
                f"{data} was made for a vocabulary of {store.manifest.vocab_size:,} tokens, not of {vocab:,}; "
                "give features of the drafter's own target"
            )
        return count_answers(((dialogue.input_ids, dialogue.loss_mask) for dialogue in store), vocab)
    if is_text(data):
        return count_text(data, vocab, load_bare_tokenizer(name, revision), name)
    split = encode_split(data, load_tokenizer(name, revision, template), WHOLE)
    both = ((torch.from_numpy(one.input_ids), torch.from_numpy(one.loss_mask)) for one in split.dialogues)
    return count_answers(both, vocab)


def count_text(file: str, vocab: int, tokenizer: object, name: str) -> Tensor:
    """``count`` of a plain text. It lacks EOS, which ends every answer: EOS gets the highest count."""
    counts = torch.zeros(vocab, dtype=torch.int64)
    lines = read_text(Path(file)).splitlines(keepends=True)
    for start in range(0, len(lines), LINES):
        found = tokenizer(lines[start : start + LINES], add_special_tokens=False)["input_ids"]  # type: ignore[operator]
        ids = torch.tensor([token for line in found for token in line], dtype=torch.int64)
        if len(ids) and int(ids.max()) >= vocab:
            raise ValueError(f"the tokenizer {name} has token {int(ids.max())}, and the vocabulary {vocab:,} tokens")
        counts += torch.bincount(ids, minlength=vocab)
    if not counts.any():
        raise ValueError(f"{file} is empty; give a text like the answers that will be drafted")
    end = getattr(tokenizer, "eos_token_id", None)
    if end is not None:
        counts[end] = counts.max()
    return counts


def add_to_drafter(folder: Path, ids: Tensor) -> None:
    """Add ``ids`` to a checkpoint, and let it draft with all of them by default."""
    config, weights = checkpoint.load_checkpoint(folder)
    config["drafter"]["draft_vocab"] = len(ids)
    checkpoint.save_checkpoint(folder, weights | {DRAFT_IDS: ids}, config, dtype=None)


def add_to_model(folder: Path, ids: Tensor) -> None:
    """Write ``ids`` beside a draft model's weights."""
    replace_text(folder / DRAFT_IDS_FILE, json.dumps(ids.tolist()) + "\n")


def sizes(most: int) -> list[int]:
    """1,024, 2,048, ... below ``most``, and ``most``."""
    return [size for size in (1 << power for power in range(10, 30)) if size < most] + [most]
