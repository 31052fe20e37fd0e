"""Phrase pools on disk: a drafter can begin with the phrases of an earlier run."""

from pathlib import Path

import numpy as np

from drafters.drafting.phrase_pool import PhrasePool
from drafters.drafting.token_file import check_range, load_tokens, model_facts, save_tokens
from drafters.model.target import TargetModel

CONTENT, MADE = "phrase pool", "write one with a drafter's save_pool(path)"
ARRAYS = ("first", "lengths", "tails")  # [n] first tokens, [n] lengths of the tails, tokens of all tails in turn


def save_pool(path: str | Path, pool: PhrasePool, model: TargetModel) -> None:
    """Write a pool of ``model``'s token ids, in the pool's order; raises OSError if the file cannot be written."""
    phrases = list(pool.items())
    first, lengths = [first for first, _ in phrases], [len(tail) for _, tail in phrases]
    columns = first, lengths, [token for _, tail in phrases for token in tail]
    arrays = {name: np.array(column, dtype=np.int32) for name, column in zip(ARRAYS, columns, strict=True)}
    save_tokens(Path(path), CONTENT, arrays, {"tail": str(pool.tail), **model_facts(model)})


def first_pool(path: str | None, model: TargetModel, tail: int, per_token: int) -> PhrasePool:
    """The pool that a drafter begins with: the saved one, or an empty one if ``path`` is None."""
    return PhrasePool(tail, per_token) if path is None else load_pool(path, model, tail, per_token)


def load_pool(path: str | Path, model: TargetModel, tail: int, per_token: int) -> PhrasePool:
    """Load a pool. Tails are cut to ``tail`` tokens, and the ``per_token`` most recently used ones are loaded.

    Raises:
        ValueError: no such file, an incomplete or other file, or a pool of another vocabulary.
    """
    path = Path(path)
    first, lengths, tails = load_tokens(path, CONTENT, ARRAYS, model, MADE)
    if len(first) != len(lengths) or bool((lengths < 1).any()) or int(lengths.sum(dtype=np.int64)) != len(tails):
        raise ValueError(
            f"{path} is damaged: {len(first)} phrases have {len(lengths)} lengths, which sum to {lengths.sum()} (none "
            f"may be below 1), and {len(tails)} tokens; {MADE}"
        )
    for name, ids in (("first", first), ("tails", tails)):
        check_range(path, name, ids, 0, model.vocab_size - 1, MADE)
    pool, start, tokens = PhrasePool(tail, per_token), 0, tails.tolist()
    for token, length in zip(first.tolist(), lengths.tolist(), strict=True):
        pool.add(token, tokens[start : start + length])
        start += length
    return pool
