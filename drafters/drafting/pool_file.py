"""Phrase pools on disk, one safetensors file each: a drafter can begin with the phrases of an earlier run."""

from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from drafters.common.files import replacing
from drafters.common.paths import readable
from drafters.drafting.draft_model import check_vocabulary, model_facts
from drafters.drafting.phrase_pool import PhrasePool
from drafters.model.target import TargetModel

CONTENT = "phrase pool"
FORMAT_VERSION = "1"
_ARRAYS = ("first", "lengths", "tails")


def save_pool(path: str | Path, pool: PhrasePool, model: TargetModel) -> None:
    """Write a pool of ``model``'s token ids. The file is replaced atomically.

    It holds ``first [n]`` (first tokens), ``lengths [n]`` (of the tails) and ``tails`` (tokens of all tails,
    concatenated), int32, in the pool's order. Metadata: the longest tail and ``vocabulary_facts``.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    path = Path(path)
    phrases = list(pool.items())
    columns = {
        "first": [first for first, _ in phrases],
        "lengths": [len(tail) for _, tail in phrases],
        "tails": [token for _, tail in phrases for token in tail],
    }
    metadata = {
        "content": CONTENT,
        "format_version": FORMAT_VERSION,
        "tail": str(pool.tail),
    } | model_facts(model)
    arrays = {name: np.array(column, dtype=np.int32) for name, column in columns.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(save(arrays, metadata))


def first_pool(path: str | None, model: TargetModel, tail: int, per_token: int) -> PhrasePool:
    """The pool that a drafter begins with: the saved one, or an empty one if ``path`` is None."""
    return PhrasePool(tail, per_token) if path is None else load_pool(path, model, tail, per_token)


def load_pool(path: str | Path, model: TargetModel, tail: int, per_token: int) -> PhrasePool:
    """Load a pool. Tails are cut to ``tail`` tokens, and the ``per_token`` most recently used ones are loaded.

    Raises:
        ValueError: no such file, an incomplete or other file, or a pool of another vocabulary.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no phrase pool at {path}: write one with a drafter's save_pool(path)")
    try:
        with safe_open(readable(Path(path)), framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no phrase pool, or only part of one ({error}): save it again") from error
    _check_metadata(path, metadata, model)
    _check_arrays(path, arrays, model)
    first, lengths, tokens = (arrays[name].tolist() for name in _ARRAYS)
    pool = PhrasePool(tail, per_token)
    start = 0
    for token, length in zip(first, lengths, strict=True):
        pool.add(token, tokens[start : start + length])
        start += length
    return pool


def _check_metadata(path: str | Path, metadata: dict[str, str], model: TargetModel) -> None:
    """Check content, version and vocabulary."""
    if metadata.get("content") != CONTENT:
        raise ValueError(f"{path} is a safetensors file but no phrase pool: give a file written by save_pool")
    if (version := metadata.get("format_version")) != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version} and this release reads {FORMAT_VERSION}: save the pool again, or use "
            "the release that wrote it"
        )
    check_vocabulary(path, metadata, model, "phrases", "use a pool")


def _check_arrays(path: str | Path, arrays: dict[str, np.ndarray], model: TargetModel) -> None:
    """Check that the sizes fit each other and that the token ids are in the vocabulary."""
    flat = sorted(arrays) == sorted(_ARRAYS) and all(
        array.ndim == 1 and np.issubdtype(array.dtype, np.integer) for array in arrays.values()
    )
    if not flat:
        found = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
        raise ValueError(f"{path} is damaged: it must hold flat integers {', '.join(_ARRAYS)}, found {found}")
    first, lengths, tails = (arrays[name] for name in _ARRAYS)
    if len(first) != len(lengths) or bool((lengths < 1).any()) or int(lengths.sum(dtype=np.int64)) != len(tails):
        raise ValueError(
            f"{path} is damaged: {len(first)} phrases have {len(lengths)} lengths, which sum to {lengths.sum()} (none "
            f"may be below 1), and {len(tails)} tokens; save it again"
        )
    for name, ids in (("first", first), ("tails", tails)):
        if len(ids) and not 0 <= ids.min() <= ids.max() < model.vocab_size:
            raise ValueError(
                f"{path} is damaged: token ids in {name!r} run from {ids.min()} to {ids.max()}, and the vocabulary of "
                f"{model.name} has {model.vocab_size}; save it again"
            )
