"""A datastore: many texts' tokens and the order of their suffixes, in one safetensors file, read where it lies."""

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
SORTED = 32  # tokens of each suffix that its place goes by; of equal ones, the first in the datastore is first


class Datastore(NamedTuple):
    """Texts and their suffix array (Manber and Myers 1990).

    Attributes:
        tokens: int32 ``[n]``, ``BETWEEN`` behind each text.
        suffixes: int32 ``[n]``: where the suffixes begin, ascending by their first tokens.
    """

    tokens: np.ndarray
    suffixes: np.ndarray

    @classmethod
    def of(cls, texts: Iterable[Sequence[int]]) -> "Datastore":
        """Sort the suffixes of some texts: n log n for n tokens, about 60 bytes each while it lasts.

        Raises:
            ValueError: no text, or more tokens than an int32 counts.
        """
        pieces = [piece for text in texts if len(text) for piece in (np.asarray(text, np.int32), [BETWEEN])]
        if not pieces:
            raise ValueError("a datastore needs a text: there is no token in what was given")
        tokens = np.concatenate(pieces).astype(np.int32)
        if len(tokens) > np.iinfo(np.int32).max:
            raise ValueError(f"{len(tokens):,} tokens are too many for one datastore: give at most 2,147,483,647")
        return cls(tokens, suffix_order(tokens, SORTED).astype(np.int32))

    def find(self, text: Sequence[int], shortest: int, longest: int) -> tuple[int, range]:
        """The size, from ``shortest`` to ``longest``, of the longest end of ``text`` that stands in the datastore, and
        which of the suffixes begin with it; 0 and none where none does.
        """
        # What ends with a match of n tokens ends with one of n - 1, too: so the longest is found by halving.
        sizes = range(shortest, min(longest, len(text)) + 1)
        match = shortest + bisect_left(sizes, True, key=lambda size: self._first(text[-size:]) is None) - 1
        first = self._first(text[-match:]) if match >= shortest else None
        if first is None:
            return 0, range(0)
        part = list(text[-match:])
        return match, range(first, bisect_right(self.suffixes, part, lo=first, key=self._begin(match)))

    def _first(self, part: Sequence[int]) -> int | None:
        """The first of the suffixes that begin with ``part``."""
        begin, wanted = self._begin(len(part)), list(part)
        place = bisect_left(self.suffixes, wanted, key=begin)
        return place if place < len(self.suffixes) and begin(self.suffixes[place]) == wanted else None

    def _begin(self, size: int) -> Callable[[int], list[int]]:
        """Where a suffix begins -> its first ``size`` tokens."""
        tokens = self.tokens
        return lambda at: tokens[at : at + size].tolist()


def suffix_order(tokens: np.ndarray, depth: int) -> np.ndarray:
    """Where the suffixes of ``tokens [n]`` begin, int64 ``[n]``, ascending by their first ``depth`` tokens or more.

    By doubling: the rank of a suffix by 2k tokens is that of its first k and, among these, that of what begins k later.
    """
    size = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].reshape(-1).astype(np.int64)
    order, known = np.argsort(rank, kind="stable"), 1
    while known < depth:
        key = rank * (size + 1)
        key[:-known] += rank[known:] + 1  # what has ended is smaller than all
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
    """Write it; a kill leaves the old file or the new one, never a part.

    Args:
        vocabulary: ``vocabulary_facts`` of the model whose tokens they are.
    """
    metadata = {"content": CONTENT, "format_version": FORMAT_VERSION} | vocabulary
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_tensors({name: torch.from_numpy(array) for name, array in store._asdict().items()}, temporary, metadata)


def load_datastore(path: str, target: TargetModel) -> Datastore:
    """Map a datastore into memory: what is looked up is read, when it is looked up.

    Raises:
        ValueError: no such file, no datastore or only part of one, or one of another vocabulary.
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
        raise ValueError(
            f"{path} is damaged: it must hold as many tokens as suffixes, int32, and holds {found}; {made}"
        )
    for name, least, most in (("tokens", BETWEEN, target.vocab_size - 1), ("suffixes", 0, size - 1)):
        low, high = (int(value) for value in arrays[name].aminmax())
        if not least <= low <= high <= most:
            raise ValueError(f"{path} is damaged: {name} run from {low} to {high}, not from {least} to {most}; {made}")
    return Datastore(*(arrays[name].numpy() for name in Datastore._fields))
