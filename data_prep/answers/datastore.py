"""Make a datastore for REST, for data_prep.datastore."""

import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from data_prep.dialogues.encoding import encode_split, load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import is_text
from drafters.common.wording import read_text
from drafters.drafting.datastore import Datastore, save_datastore
from drafters.drafting.token_file import vocabulary_facts
from drafters.model.files import load_bare_tokenizer, load_config_only

WHOLE = 1 << 30  # most tokens of a dialogue: none is cut


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
    store = Datastore.of(texts)
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
