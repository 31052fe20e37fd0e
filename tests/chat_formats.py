"""Chat templates of all common shapes, and small tokenizers for them, trained here."""

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from data_prep.dialogues import template

TEXT = [
    "the answer is four",
    "Hello! How are you?",
    "What is 2+2? It is 4.",
    "USER: ASSISTANT: [INST] [/INST] system user",
]

_SPLIT_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
)
_ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
)

VICUNA = (
    _SPLIT_SYSTEM
    + "{{ system or 'A chat.' }}{% for message in rest %}{% if message['role'] == 'user' %}"
    + "{{ ' USER: ' + message['content'].strip() }}{% else %}"
    + "{{ ' ASSISTANT: ' + message['content'].strip() + eos_token }}"
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
LLAMA2 = (
    _SPLIT_SYSTEM
    + "{% for message in rest %}"
    + _ALTERNATE
    + "{% if loop.first and system %}"
    + "{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    + "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    + "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% else %}"
    + "{{ ' ' + content.strip() + ' ' + eos_token }}"
    + "{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.first %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MISTRAL = (  # as Mistral 7B v0.2: no generation prompt; a system message makes it raise
    "{{ bos_token }}{% for message in messages %}"
    + _ALTERNATE
    + "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}"
    + "{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_V3 = (  # the system message is in the LAST user turn: a prefix of the dialogue is no prefix of the text
    _SPLIT_SYSTEM
    + "{{ bos_token }}{% for message in rest %}{% if message['role'] == 'user' %}"
    + "{{ '[INST] ' }}{% if loop.index0 >= rest | length - 2 and system %}{{ system + '\\n\\n' }}{% endif %}"
    + "{{ message['content'] + '[/INST]' }}{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}"
    + "{% endfor %}"
)
QWEN3 = (  # thinking is printed in the last turn only, empty if there is none
    "{% for message in messages %}{% set content = message['content'] %}{% set thought = '' %}"
    "{% if message['role'] == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].strip() %}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
QWEN3_TOOLS = (  # reasoning of the answers behind the last question; definitions, calls and results of tools
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(asked=0) %}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% set thought = message['reasoning_content'] or '' %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].strip() %}{% endif %}"
    "{% if message['role'] == 'assistant' and loop.index0 > ns.asked %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL_TOOLS = (  # as Mistral's from v0.3 on: a call replaces the text, and does not count as a turn
    "{% set ns = namespace(turns=0) %}{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' or (message['role'] == 'assistant' and not message['tool_calls']) %}"
    "{% if (message['role'] == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% set ns.turns = ns.turns + 1 %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'tool' %}{{ '[RESULT] ' + message['content'] + ' [/RESULT]' }}"
    "{% elif message['tool_calls'] %}{{ '[CALLS] ' + (message['tool_calls'] | tojson) + eos_token }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
DATED = (  # as Llama 3.2: the system turn has the date
    "{% if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% else %}{% set today = '?' %}"
    "{% endif %}{{ '<|im_start|>system\nToday: ' + today + '<|im_end|>\n' }}" + CHATML
)
TAGGED = (  # ChatML with generation tags, end-of-turn token inside
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SENTENCEPIECE_SPECIALS = ["<unk>", "<s>", "</s>"]
LLAMA3_SPECIALS = ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
CHAT_VOCAB = 300  # bytes, merges and special tokens of the byte-level tokenizer
CHATML_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def chatml() -> PreTrainedTokenizerFast:
    """The tokenizer of the tiny chat targets."""
    return byte_level(CHATML, CHATML_SPECIALS, None, "<|im_end|>", vocab_size=CHAT_VOCAB)


def byte_level(
    template: str | None, specials: list[str], bos: str | None, eos: str, vocab_size: int = 300, trim: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE as GPT-2's and Llama-3's; ``trim``: its offsets leave out the whitespace of tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrap(tokenizer, template, specials, bos, eos)


def sentencepiece_like(template: str | None, specials: list[str], bos: str | None, eos: str) -> PreTrainedTokenizerFast:
    """A BPE over words that begin with a metaspace, as Llama-2's and Mistral's."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=180, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrap(tokenizer, template, specials, bos, eos)


def _wrap(
    tokenizer: Tokenizer, template: str | None, specials: list[str], bos: str | None, eos: str
) -> PreTrainedTokenizerFast:
    extra = [token for token in specials if token not in (bos, eos)]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, extra_special_tokens=extra, chat_template=template
    )


class CharacterTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python without offsets: a token a character, and one pair that can straddle a border."""

    def __init__(self, merged: str, **options: Any) -> None:
        self.merged = merged
        super().__init__(**options)

    @property
    def vocab_size(self) -> int:
        return 129

    def get_vocab(self) -> dict[str, int]:
        return {**{chr(code): code for code in range(128)}, self.merged: 128, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        parts = text.split(self.merged)
        return [token for i, part in enumerate(parts) for token in ([self.merged] if i else []) + list(part)]

    def _convert_token_to_id(self, token: str) -> int:
        return 128 if token == self.merged else min(ord(token), 127)

    def _convert_id_to_token(self, index: int) -> str:
        return self.merged if index == 128 else chr(index)


def pretend_today(monkeypatch: pytest.MonkeyPatch, day: datetime.date) -> None:
    """What templates print as today's date."""
    today = type("Day", (datetime.date,), {"today": staticmethod(lambda: day)})
    monkeypatch.setattr(template, "datetime", SimpleNamespace(date=today))


def dialogue(index: int) -> dict[str, Any]:
    """Dialogues of different lengths, so that batching has something to sort."""
    words = " ".join(["four", "is", "what", "it"][: 1 + index % 4] * (1 + index % 3))
    pairs = [("human", f"Question {index}?"), ("gpt", f"It is {words}.")] * (1 + index % 2)
    return {"id": f"d{index}", "conversations": [{"from": role, "value": text} for role, text in pairs]}
