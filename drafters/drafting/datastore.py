"""Datastore of REST (He et al. 2023): the tokens of many texts and their suffix array, in one safetensors file.

The file is mapped into memory, so that a lookup reads only the parts it needs. ``python -m data_prep.datastore`` makes
one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.common.files import replacing, save_tensors
from drafters.common.paths import readable
from drafters.drafting.draft_model import check_vocabulary
from drafters.drafting.retrieval import BETWEEN
from drafters.model.target import TargetModel

CONTENT, FORMAT_VERSION = "datastore", "1"
SORTED = 32  # tokens that suffixes are sorted by; equal ones are in the order of the datastore


class Datastore(NamedTuple):
    """Texts and their suffix array (Manber and Myers 1990).

    Attributes:
        tokens: int32 ``[n]``, ``BETWEEN`` after each text.
        suffixes: int32 ``[n]``: start of each suffix, sorted by the suffixes' tokens.
    """

    tokens: np.ndarray
    suffixes: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> "Datastore":
        """Build a datastore in O(n log n) for n tokens, with about 60 bytes of memory per token.

        Raises:
            ValueError: no tokens, or too many for int32.
        """
        pieces = [piece for text in texts if len(text) for piece in (np.asarray(text, np.int32), [BETWEEN])]
        if not pieces:
            raise ValueError("a datastore needs at least one token, found none in the texts")
        tokens = np.concatenate(pieces).astype(np.int32)
        if len(tokens) > np.iinfo(np.int32).max:
            raise ValueError(f"a datastore holds at most 2,147,483,647 tokens, found {len(tokens):,}")
        return cls(tokens, suffix_order(tokens, SORTED).astype(np.int32))

    def find(self, text: Sequence[int], shortest: int, longest: int) -> tuple[int, range]:
        """Find the longest match of the last tokens of ``text``.

        Args:
            shortest: least length of a match in tokens.
            longest: greatest length of a match in tokens.

        Returns:
            The length of the match, and the range of ``suffixes`` that begin with it; 0 and an empty range without one.
        """
        # Bisect over the length: if n tokens match, n - 1 match too.
        sizes = range(shortest, min(longest, len(text)) + 1)
        match = shortest + bisect_left(sizes, True, key=lambda size: self._first(text[-size:]) is None) - 1
        first = self._first(text[-match:]) if match >= shortest else None
        if first is None:
            return 0, range(0)
        part = list(text[-match:])
        return match, range(first, bisect_right(self.suffixes, part, lo=first, key=self._begin(match)))

    def _first(self, part: Sequence[int]) -> int | None:
        """Index of the first of ``suffixes`` that begins with ``part``; None without one."""
        begin, wanted = self._begin(len(part)), list(part)
        place = bisect_left(self.suffixes, wanted, key=begin)
        return place if place < len(self.suffixes) and begin(self.suffixes[place]) == wanted else None

    def _begin(self, size: int) -> Callable[[int], list[int]]:
        """Return a function from the start of a suffix to its first ``size`` tokens."""
        tokens = self.tokens
        return lambda at: tokens[at : at + size].tolist()


def suffix_order(tokens: np.ndarray, depth: int) -> np.ndarray:
    """Starts of the suffixes of ``tokens [n]``, int64 ``[n]``, sorted by at least their first ``depth`` tokens.

    Prefix doubling: the rank by 2k tokens follows from the rank by k tokens of the suffix and of the one k later.
    """
    size = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].reshape(-1).astype(np.int64)
    order, known = np.argsort(rank, kind="stable"), 1
    while known < depth:
        key = rank * (size + 1)
        key[:-known] += rank[known:] + 1  # a suffix that has ended sorts first
        order = np.argsort(key, kind="stable")
        ascending = key[order]
        steps = np.concatenate([[0], np.cumsum(ascending[1:] != ascending[:-1])])
        rank = np.empty_like(steps)
        rank[order] = steps
        known *= 2
        if steps[-1] == size - 1 or known >= size:
            break
    return order


def save_datastore(path: Path, store: Datastore, vocabulary: dict[str, str]) -> None:
    """Write a datastore. The file is replaced atomically.

    Args:
        vocabulary: ``vocabulary_facts`` of the model that the token ids belong to.
    """
    metadata = {"content": CONTENT, "format_version": FORMAT_VERSION} | vocabulary
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_tensors({name: torch.from_numpy(array) for name, array in store._asdict().items()}, temporary, metadata)


def load_datastore(path: str, target: TargetModel) -> Datastore:
    """Map a datastore into memory.

    Raises:
        ValueError: no such file, an incomplete or other file, or a datastore of another vocabulary.
    """
    made = "python -m data_prep.datastore makes one"
    if not Path(path).is_file():
        raise ValueError(f"there is no datastore at {path}: {made}")
    try:
        with safe_open(readable(Path(path)), framework="pt") as file:
            metadata = file.metadata() or {}
            arrays: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no datastore, or only part of one ({error}): {made}") from error
    if (metadata.get("content"), metadata.get("format_version")) != (CONTENT, FORMAT_VERSION):
        raise ValueError(f"{path} is a safetensors file but no datastore of version {FORMAT_VERSION}: {made}")
    check_vocabulary(path, metadata, target, "texts", "use a datastore")
    found = {name: (array.dtype, array.dim(), array.numel()) for name, array in arrays.items()}
    size = arrays["tokens"].numel() if "tokens" in arrays else 0
    if found != dict.fromkeys(Datastore._fields, (torch.int32, 1, size)) or not size:
        raise ValueError(f"{path} is damaged: expected as many tokens as suffixes, int32, found {found}; {made}")
    for name, least, most in (("tokens", BETWEEN, target.vocab_size - 1), ("suffixes", 0, size - 1)):
        low, high = (int(value) for value in arrays[name].aminmax())
        if not least <= low <= high <= most:
            raise ValueError(f"{path} is damaged: {name} run from {low} to {high}, not from {least} to {most}; {made}")
    return Datastore(*(arrays[name].numpy() for name in Datastore._fields))
