"""Make a datastore for REST (``drafters/drafting/datastore.py``), for data_prep.datastore."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from data_prep.dialogues.encoding import encode_split, load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import is_text
from drafters.common.wording import read_text
from drafters.drafting.datastore import CONTENT, Datastore
from drafters.drafting.retrieval import BETWEEN
from drafters.drafting.token_file import save_tokens, vocabulary_facts
from drafters.model.files import load_bare_tokenizer, load_config_only

WHOLE = 1 << 30  # most tokens of a dialogue: none is cut
SORTED = 32  # tokens that suffixes are sorted by; equal ones are in the order of the datastore


def make_datastore(source: str, target: str, out: Path, tokenizer: str | None, template: str | None) -> None:
    """Tokenize ``source``, sort its suffixes and write ``out``; ValueError for unusable data or a wrong tokenizer."""
    name, size = tokenizer or target, int(load_config_only(target).vocab_size)
    bare = load_bare_tokenizer(name)
    if is_text(source):
        texts = [bare(read_text(Path(source)), add_special_tokens=False)["input_ids"]]
    else:
        texts = [*answers(source, load_tokenizer(name, None, template))]
    highest = max((max(text) for text in texts if len(text)), default=0)
    if highest >= size:
        raise ValueError(
            f"the tokenizer {name} has token {highest}, and the vocabulary of {target} {size:,} tokens; give the "
            "target's own tokenizer"
        )
    start = time.perf_counter()
    store = datastore_of(texts)
    seconds = time.perf_counter() - start
    save_datastore(out, store, vocabulary_facts(target, size, bare.get_vocab()))
    print(
        f"{source}: {len(texts):,} texts, {len(store.tokens):,} tokens, sorted in {seconds:.1f} s -> {out}, "
        f"{out.stat().st_size / 1e6:,.1f} MB"
    )


def answers(source: str, chat: ChatTokenizer) -> Iterator[list[int]]:
    """The tokens of every answer in ``source`` that the target would generate."""
    for dialogue in encode_split(source, chat, WHOLE).dialogues:
        pairs = zip(dialogue.loss_mask.tolist(), dialogue.input_ids.tolist(), strict=True)
        for is_answer, run in groupby(pairs, key=lambda pair: pair[0]):
            if is_answer:
                yield [token for _, token in run]


def datastore_of(texts: Iterable[Sequence[int]]) -> Datastore:
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
    return Datastore(tokens, suffix_order(tokens, SORTED).astype(np.int32))


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
    save_tokens(path, CONTENT, store._asdict(), vocabulary)
