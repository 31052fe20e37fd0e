"""Datastore of REST (He et al. 2023): the tokens of many texts and their suffix array, in one safetensors file.

The file is mapped into memory, so that a lookup reads only the parts it needs. ``python -m data_prep.datastore`` makes
one.
"""

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from drafters.common.paths import readable
from drafters.drafting.draft_model import vocabulary
from drafters.drafting.retrieval import BETWEEN
from drafters.model.target import TargetModel

KIND = {"content": "datastore", "format_version": "1"}  # in the file's metadata, beside ``vocabulary_facts``
MADE = "python -m data_prep.datastore makes one"


class Datastore(NamedTuple):
    """Texts and their suffix array (Manber and Myers 1990).

    Attributes:
        tokens: int32 ``[n]``, ``BETWEEN`` after each text.
        suffixes: int32 ``[n]``: start of each suffix, sorted by the suffixes' tokens.
    """

    tokens: np.ndarray
    suffixes: np.ndarray

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


def vocabulary_facts(name: str, size: int, tokens: dict[str, int] | None) -> dict[str, str]:
    """A model's name, its vocabulary size, and a hash of its tokenizer's vocabulary; empty without a tokenizer."""
    digest = hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest() if tokens is not None else ""
    return {"model": name, "vocab_size": str(size), "vocabulary": digest}


def load_datastore(path: str, target: TargetModel) -> Datastore:
    """Map a datastore into memory.

    Raises:
        ValueError: no such file, an incomplete or other file, or a datastore of another vocabulary.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no datastore at {path}: {MADE}")
    try:
        with safe_open(readable(Path(path)), framework="pt") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no datastore, or only part of one ({error}): {MADE}") from error
    if not KIND.items() <= metadata.items():
        raise ValueError(f"{path} is a safetensors file but no datastore of version {KIND['format_version']}: {MADE}")
    check_vocabulary(path, metadata, target)
    contents = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
    size = arrays["tokens"].size if "tokens" in arrays else 0
    if not size or contents != dict.fromkeys(Datastore._fields, f"int32[{size}]"):
        raise ValueError(f"{path} is damaged: it must hold int32 tokens[n] and suffixes[n], found {contents}; {MADE}")
    store = Datastore(**arrays)
    for name, array, least, most in (
        ("tokens", store.tokens, BETWEEN, target.vocab_size - 1),
        ("suffixes", store.suffixes, 0, size - 1),
    ):
        if not least <= array.min() <= array.max() <= most:
            problem = f"{name} run from {array.min()} to {array.max()}, not from {least} to {most}"
            raise ValueError(f"{path} is damaged: {problem}; {MADE}")
    return store


def check_vocabulary(path: str, metadata: dict[str, str], target: TargetModel) -> None:
    """Raise ValueError if the ``metadata`` of a datastore say that its token ids are not the target's."""
    maker, facts = metadata.get("model"), vocabulary_facts(target.name, target.vocab_size, vocabulary(target))
    theirs, ours = metadata.get("vocabulary"), facts["vocabulary"]  # each is empty without a tokenizer
    if theirs and ours and theirs != ours:
        raise ValueError(
            f"{path} is of {maker}, whose tokenizer is not {target.name}'s: use a datastore of this target"
        )
    # Models of one tokenizer may be padded to different sizes.
    if metadata.get("vocab_size") != facts["vocab_size"] and not (ours and ours == theirs):
        raise ValueError(
            f"{path} is of {maker}, whose vocabulary has {metadata.get('vocab_size')} tokens; use one of {target.name}"
        )
