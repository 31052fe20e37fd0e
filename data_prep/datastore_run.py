"""The work of data_prep.datastore."""

import argparse
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from data_prep.datastore import is_text
from data_prep.dialogues.encoding import encode_split, load_tokenizer
from data_prep.dialogues.loss_mask import ChatTokenizer
from drafters.common.files import read_text
from drafters.drafting.datastore import Datastore, save_datastore
from drafters.drafting.draft_model import vocabulary_facts
from drafters.model.files import load_bare_tokenizer, load_config_only

WHOLE = 1 << 30  # tokens of a dialogue: none is cut


def run(options: argparse.Namespace) -> int:
    """Tokenize, sort, write and report. Returns 0."""
    name = options.tokenizer or options.target
    size = int(load_config_only(options.target).vocab_size)
    tokenizer = load_bare_tokenizer(name)
    if is_text(options.source):
        texts = [tokenizer(read_text(Path(options.source)), add_special_tokens=False)["input_ids"]]
    else:
        chat = load_tokenizer(name, None, options.chat_template)
        texts = [*answers(options.source, chat)]
    highest = max((max(text) for text in texts if len(text)), default=0)
    if highest >= size:
        raise ValueError(
            f"the tokenizer {name} has token {highest}, and the vocabulary of {options.target} {size:,} tokens; give "
            "the target's own tokenizer"
        )
    start = time.perf_counter()
    store = Datastore.of(texts)
    seconds = time.perf_counter() - start
    save_datastore(options.out, store, vocabulary_facts(options.target, size, tokenizer.get_vocab()))
    print(
        f"{options.source}: {len(texts):,} texts, {len(store.tokens):,} tokens, sorted in {seconds:.1f} s -> "
        f"{options.out}, {options.out.stat().st_size / 1e6:,.1f} MB"
    )
    return 0


def answers(source: str, chat: ChatTokenizer) -> Iterator[list[int]]:
    """The tokens of every answer of some dialogues, as far as the target would have said them itself."""
    for dialogue in encode_split(source, chat, WHOLE).dialogues:
        pairs = zip(dialogue.loss_mask.tolist(), dialogue.input_ids.tolist(), strict=True)
        for said, run in groupby(pairs, key=lambda pair: pair[0]):
            if said:
                yield [token for _, token in run]
