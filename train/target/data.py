"""Tokenizer, chat template and packed batches for training a target."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from data_prep.dialogues.encoding import load_tokenizer
from data_prep.dialogues.messages import Message, uses_tools
from data_prep.dialogues.reader import ReadCounts, read_dialogues
from drafters.common.files import replacing_files
from train.configs import TargetConfig
from train.target.model import DataPosition

TOKENIZER = "tokenizer_config.json"
END, PAD = "<|end|>", "<|endoftext|>"
SPECIAL_TOKENS = [PAD, END, "<|user|>", "<|assistant|>"]
# A system message becomes part of the first user turn, because the corpus has none to train a token for it.
CHAT_TEMPLATE = (
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{%- set ns.system = message['content'] + '\n\n' -%}"
    "{%- elif message['role'] == 'user' -%}{{- '<|user|>' + ns.system + message['content'] -}}"
    "{%- set ns.system = '' -%}"
    "{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- raise_exception('unknown role: ' + message['role']) -}}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def read_messages(path: Path) -> list[list[Message]]:
    """Chat messages of each usable dialogue of a ShareGPT file, without dialogues with tools, which the template cannot
    print. Prints the numbers of dropped and changed dialogues."""
    counts = ReadCounts()
    read = [list(dialogue.messages) for dialogue in read_dialogues(path, counts)]
    messages = [each for each in read if not uses_tools(each)]
    if len(messages) < len(read):
        counts.kept, counts.dropped["tools"] = len(messages), len(read) - len(messages)
    if counts.dropped or counts.changed:
        print(f"{path}: {counts.describe()}")
    return messages


def train_tokenizer(dialogues: list[list[Message]], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with the chat template; deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((m["content"] for d in dialogues for m in d), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def get_tokenizer(config: TargetConfig) -> PreTrainedTokenizerFast:
    """The corpus's tokenizer, trained once and shared by target and draft model; or the one of ``tokenizer:``.

    Raises:
        ValueError: ``tokenizer:`` has more tokens than ``model.vocab_size``.
    """
    if config.tokenizer is not None:
        chat = load_tokenizer(config.tokenizer)
        if (found := len(chat.tokenizer)) > config.model.vocab_size:
            raise ValueError(
                f"the tokenizer of {config.tokenizer} has {found} tokens, and model.vocab_size is "
                f"{config.model.vocab_size}; give the vocab_size in {config.tokenizer}/config.json"
            )
        chat.tokenizer.model_max_length = config.model.max_positions
        return chat.tokenizer
    folder = config.corpus / f"tokenizer-{config.model.vocab_size}"
    if not (folder / TOKENIZER).is_file():
        tokenizer = train_tokenizer(read_messages(config.corpus / "train.jsonl"), config.model.vocab_size)
        with replacing_files(folder, last=(TOKENIZER,)) as temporary:
            tokenizer.save_pretrained(temporary)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    tokenizer.model_max_length = config.model.max_positions
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerFast, dialogues: list[list[Message]]) -> list[list[int]]:
    """Token ids of each dialogue, by the chat template."""
    texts = [tokenizer.apply_chat_template(dialogue, tokenize=False) for dialogue in dialogues]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def pack_rows(documents: list[list[int]], length: int, generator: random.Random, pool: int = 64) -> list[list[int]]:
    """Rows of exactly `length` tokens without padding, each beginning with a dialogue, as prompts do.

    A row takes the next dialogue, then the longest fitting ones from a pool, and ends with the beginning of a random
    dialogue. A dialogue longer than a row is cut at a random place.
    """
    pieces = []
    for document in documents:
        while len(document) > length:
            cut = generator.randint(length // 2, length)
            pieces.append(document[:cut])
            document = document[cut:]
        pieces.append(document)
    generator.shuffle(pieces)
    rows: list[list[int]] = []
    waiting: list[list[int]] = []
    remaining = iter(pieces)
    while True:
        waiting.extend(itertools.islice(remaining, pool - len(waiting)))
        if not waiting:
            return rows
        row = list(waiting.pop(0))
        while len(row) < length:
            fitting = [i for i, piece in enumerate(waiting) if len(piece) <= length - len(row)]
            if fitting:
                row += waiting.pop(max(fitting, key=lambda i: len(waiting[i])))
            else:
                row += pieces[generator.randrange(len(pieces))][: length - len(row)]
        rows.append(row)


def batches(
    documents: list[list[int]], config: TargetConfig, position: DataPosition
) -> Iterator[tuple[Tensor, DataPosition]]:
    """Endless batches `[batch_rows, seq_len + 1]` from `position` on, each with the position after it."""
    epoch, cursor = position.epoch, position.cursor
    while True:
        rows = pack_rows(documents, config.seq_len + 1, random.Random(f"{config.seed}-{epoch}"))
        if len(rows) < config.batch_rows:
            raise ValueError(f"the corpus fills {len(rows)} rows of {config.seq_len} tokens; a batch needs more")
        while cursor + config.batch_rows <= len(rows):
            batch = torch.tensor(rows[cursor : cursor + config.batch_rows])
            cursor += config.batch_rows
            yield batch, DataPosition(epoch, cursor)
        epoch, cursor = epoch + 1, 0
