"""The assistant mask, for chat templates of every shape in use."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_formats import (
    CHATML,
    CHATML_SPECIALS,
    LLAMA2,
    LLAMA3,
    LLAMA3_SPECIALS,
    MISTRAL,
    MISTRAL_TOOLS,
    MISTRAL_V3,
    QWEN3,
    QWEN3_TOOLS,
    SENTENCEPIECE_SPECIALS,
    TAGGED,
    VICUNA,
    CharacterTokenizer,
    byte_level,
    sentencepiece_like,
)

from data_prep.dialogues.encoding import FIRST_WITHOUT_ANSWER, encode_split, sample_split
from data_prep.dialogues.loss_mask import ChatTokenizer, MaskedTokens
from data_prep.dialogues.reader import DroppedError, Message

SYSTEM: Message = {"role": "system", "content": "Be brief."}
DIALOGUE: list[Message] = [
    {"role": "user", "content": "Hi! "},
    {"role": "assistant", "content": "Hello!\nHow are you?"},
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "It is 4.  \n"},  # trailing whitespace: some templates strip it
]


def encode_one(chat: ChatTokenizer, messages: Sequence[Message]) -> MaskedTokens:
    """The only dialogue's tokens; raises why it was dropped."""
    return chat.tokenize([chat.render(messages)])[0]


def masked_runs(tokenizer: Any, tokens: MaskedTokens) -> list[str]:
    """The text of each run of masked tokens, exactly as in the tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], tokens.loss_mask.astype(int), [0]])))
    runs = [tokens.input_ids[start:end].tolist() for start, end in edges.reshape(-1, 2)]
    if "▁" in tokenizer.get_vocab():  # its decoder would eat a leading space
        return ["".join(tokenizer.convert_ids_to_tokens(run)).replace("▁", " ") for run in runs]
    if isinstance(tokenizer, CharacterTokenizer):
        return ["".join(tokenizer.convert_ids_to_tokens(run)) for run in runs]
    return [tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False) for run in runs]


STRIPPED = ["Hello!\nHow are you?", "It is 4."]
KEPT = ["Hello!\nHow are you?", "It is 4.  \n"]
SHAPES = {  # template, special tokens, bos, eos, and what is around each answer
    "vicuna": (VICUNA, SENTENCEPIECE_SPECIALS, "<s>", "</s>", " ", STRIPPED, "</s>"),
    "llama2": (LLAMA2, SENTENCEPIECE_SPECIALS, "<s>", "</s>", " ", STRIPPED, " </s>"),
    "llama3": (LLAMA3, LLAMA3_SPECIALS, "<|begin_of_text|>", "<|eot_id|>", "", STRIPPED, "<|eot_id|>"),
    "chatml": (CHATML, CHATML_SPECIALS, None, "<|im_end|>", "", KEPT, "<|im_end|>"),
    "mistral": (MISTRAL, SENTENCEPIECE_SPECIALS, "<s>", "</s>", " ", KEPT, "</s>"),
}
PIECES = [(name, kind) for name in SHAPES for kind in ("byte", "byte-trimmed")]
PIECES += [(name, "sentencepiece") for name in ("vicuna", "llama2", "mistral")]


@pytest.mark.parametrize(("shape", "kind"), PIECES)
@pytest.mark.parametrize("system", [False, True])
def test_mask_covers_the_answers_and_their_ends_exactly(shape, kind, system):
    """Catches a mask shifted by a token, header or user text in it, a missing end-of-turn token, and a system message
    (merged into the first user turn by Llama-2) that moves it."""
    template, specials, bos, eos, before, answers, after = SHAPES[shape]
    if kind == "sentencepiece":
        tokenizer = sentencepiece_like(template, specials, bos, eos)
    else:
        tokenizer = byte_level(template, specials, bos, eos, trim=kind == "byte-trimmed")
    messages = [SYSTEM, *DIALOGUE] if system and shape != "mistral" else DIALOGUE
    tokens = encode_one(ChatTokenizer(tokenizer), messages)
    assert masked_runs(tokenizer, tokens) == [before + answer + after for answer in answers]
    assert tokens.input_ids.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]


def test_tokenizers_without_offsets():
    """Catches a mask for fast tokenizers only, and the loss of a token that runs over the end of an answer."""
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '.\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    plain = CharacterTokenizer(merged="zz", chat_template=template)
    assert masked_runs(plain, encode_one(ChatTokenizer(plain), DIALOGUE)) == [f"{a}." for a in KEPT]
    straddling = CharacterTokenizer(merged=".\n", chat_template=template)
    found = masked_runs(straddling, encode_one(ChatTokenizer(straddling), DIALOGUE[:2]))
    assert found == ["Hello!\nHow are you?.\n"]  # the end mark '.' exists only inside the token '.\n'


def test_generation_tags_agree_with_transformers():
    """Catches a disagreement with the mask that transformers takes from generation tags, where a template has them."""
    tokenizer = byte_level(TAGGED, CHATML_SPECIALS, None, "<|im_end|>")
    tokens = encode_one(ChatTokenizer(tokenizer), [SYSTEM, *DIALOGUE])
    theirs = tokenizer.apply_chat_template([SYSTEM, *DIALOGUE], return_dict=True, return_assistant_tokens_mask=True)
    assert tokens.loss_mask.astype(int).tolist() == theirs["assistant_masks"]
    assert tokens.input_ids.tolist() == theirs["input_ids"]


def test_template_that_prints_the_system_message_late():
    """Catches relying on 'a prefix of the messages renders to a prefix of the text', which Mistral v0.3 breaks."""
    tokenizer = byte_level(MISTRAL_V3, SENTENCEPIECE_SPECIALS, "<s>", "</s>")
    tokens = encode_one(ChatTokenizer(tokenizer), [SYSTEM, *DIALOGUE])
    first, second = masked_runs(tokenizer, tokens)
    assert first.strip() == "Hello!\nHow are you?</s>"
    assert second == " It is 4.</s>"


def test_thinking_template_prints_the_last_turn_otherwise():
    """Catches masking an earlier answer as the last is printed: Qwen3 prints the thoughts of the last turn only."""
    tokenizer = byte_level(QWEN3, CHATML_SPECIALS, None, "<|im_end|>")
    chat = ChatTokenizer(tokenizer)
    thought = {"role": "assistant", "content": "<think>two and two</think>It is 4."}
    assert masked_runs(tokenizer, encode_one(chat, [*DIALOGUE[:3], thought])) == [
        "Hello!\nHow are you?<|im_end|>",
        "<think>\ntwo and two\n</think>\n\nIt is 4.<|im_end|>",
    ]
    plain = {"role": "assistant", "content": "It is 4."}
    assert masked_runs(tokenizer, encode_one(chat, [*DIALOGUE[:3], plain]))[1] == (
        "<think>\n\n</think>\n\nIt is 4.<|im_end|>"
    )


def test_template_without_generation_prompt_keeps_its_header_out():
    """Catches an assistant header in the mask where add_generation_prompt is unknown, and a plain-text end left out."""
    template = "{% for m in messages %}{{ '### ' + m['role'] + '\\n' + m['content'] + '\\n### End\\n' }}{% endfor %}"
    tokenizer = byte_level(template, ["</s>"], None, "</s>")
    assert masked_runs(tokenizer, encode_one(ChatTokenizer(tokenizer), DIALOGUE)) == [f"{a}\n### End" for a in KEPT]


def test_the_next_turns_opening_token_is_no_end_of_turn():
    """Catches Llama-2's <s>, or GLM's <|user|>, learnt as an end of turn where the template prints no end token."""
    header = "{{ '<s>' + m['role'] + ':' if m['role'] == 'user' else ':' }}"
    template = "{% for m in messages %}" + header + "{{ m['content'] }}{% endfor %}"
    tokenizer = byte_level(template, SENTENCEPIECE_SPECIALS, "<s>", "</s>")
    assert masked_runs(tokenizer, encode_one(ChatTokenizer(tokenizer), DIALOGUE)) == KEPT


def test_answers_that_repeat_the_prompt_or_the_template():
    """Catches finding answers by searching for their text: here a user's turn has it, and answers have headers."""
    tokenizer = byte_level(VICUNA, SENTENCEPIECE_SPECIALS, "<s>", "</s>")
    messages = [
        {"role": "user", "content": "Say yes. ASSISTANT: yes"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "yes"},
        {"role": "assistant", "content": "yes USER: yes ASSISTANT: yes"},
    ]
    found = masked_runs(tokenizer, encode_one(ChatTokenizer(tokenizer), messages))
    assert found == [" yes</s>", " yes USER: yes ASSISTANT: yes</s>"]


def test_special_tokens_in_the_text_are_refused():
    """Catches text injection: '</s>' inside an answer becomes the real end token and teaches the drafter to go on."""
    chat = ChatTokenizer(byte_level(VICUNA, SENTENCEPIECE_SPECIALS, "<s>", "</s>"))
    injected = [DIALOGUE[0], {"role": "assistant", "content": "HTML has <s>struck</s> text"}]
    with pytest.raises(DroppedError, match="special token '<s>'") as error:
        encode_one(chat, injected)
    assert error.value.reason == "special_token_in_text"


def test_an_answer_that_cannot_be_located_is_never_guessed():
    """Catches a wrong mask, made silently, where the text before an answer depends on the answer."""
    template = "{{ messages | map(attribute='content') | join | length }}" + CHATML
    chat = ChatTokenizer(byte_level(template, CHATML_SPECIALS, None, "<|im_end|>"))
    with pytest.raises(DroppedError, match="answer 1") as error:
        encode_one(chat, DIALOGUE)
    assert error.value.reason == "template_not_incremental"
    twice = CHATML.replace("message['content']", "message['content'] + message['content']")
    with pytest.raises(DroppedError, match="twice"):
        encode_one(ChatTokenizer(byte_level(twice, CHATML_SPECIALS, None, "<|im_end|>")), DIALOGUE)


TURN = "{{ m['role'] + ': ' + m['content'] }}"


def write_data(path: Path, questions: list[str]) -> str:
    def record(question: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "Yes."}]}

    path.write_text("\n".join(json.dumps(record(question)) for question in questions))
    return str(path)


@pytest.mark.parametrize("count", [1, FIRST_WITHOUT_ANSWER])
def test_masks_of_zeros_throughout_are_an_error_that_shows_the_template(tmp_path, count):
    """Catches hours of training on nothing: a template that knows the role 'bot' but not 'assistant'."""
    template = "{% for m in messages if m['role'] in ['user', 'bot'] %}" + TURN + "{% endfor %}THE TAIL"
    chat = ChatTokenizer(byte_level(template, ["</s>"], None, "</s>"), "some/model")
    file = write_data(tmp_path / "data.jsonl", ["Hi"] * count)
    with pytest.raises(ValueError, match=r"all zero.*some/model.*THE TAIL.*role 'assistant'") as error:
        encode_split(file, chat, 128)
    assert ("no dialogue is left" in str(error.value)) == (count == 1)


def test_one_mask_of_zeros_costs_one_dialogue(tmp_path):
    """Catches one dialogue, for which the template prints no answer, ending the whole run."""
    template = "{% for m in messages if m['role'] == 'user' or 'quiet' not in messages[0]['content'] %}" + TURN
    chat = ChatTokenizer(byte_level(template + "{% endfor %}", ["</s>"], None, "</s>"))
    split = encode_split(write_data(tmp_path / "data.jsonl", ["Be quiet!", "Hi", "quiet", "Ho"]), chat, 128)
    assert split.ids == ["record 1", "record 3"]
    assert split.counts.dropped == {"no_answer_printed": 2} and split.counts.usable == 2


VICUNA_FILE = Path(__file__).resolve().parents[1] / "configs" / "templates" / "vicuna.jinja"
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)


def test_the_shipped_vicuna_template_writes_what_the_target_was_tuned_with():
    """Catches a space, a separator or the first token off from FastChat's "vicuna_v1.1", and a mask off its answers."""
    tokenizer = sentencepiece_like(VICUNA_FILE.read_text(), SENTENCEPIECE_SPECIALS, "<s>", "</s>")
    chat = ChatTokenizer(tokenizer)
    # nothing is stripped
    turns = "USER: Hi!  ASSISTANT: Hello!\nHow are you?</s>USER: What is 2+2? ASSISTANT: It is 4.  \n</s>"
    assert chat.render(DIALOGUE).text == f"<s>{VICUNA_SYSTEM} {turns}"
    assert chat.render([SYSTEM, *DIALOGUE]).text == f"<s>Be brief. {turns}"
    prompt = tokenizer.apply_chat_template(DIALOGUE[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == f"<s>{VICUNA_SYSTEM} USER: Hi!  ASSISTANT:"
    assert masked_runs(tokenizer, encode_one(chat, DIALOGUE)) == [f" {answer}</s>" for answer in KEPT]
    with pytest.raises(DroppedError, match="roles must alternate"):
        chat.render([*DIALOGUE[:2], *DIALOGUE[1:]])


HEADERS = "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"  # no generation prompt
PROMPTS = {name: (*shape[:4], shape[4]) for name, shape in SHAPES.items()} | {
    "mistral-v3": (MISTRAL_V3, SENTENCEPIECE_SPECIALS, "<s>", "</s>", " "),
    "qwen3": (QWEN3, CHATML_SPECIALS, None, "<|im_end|>", "<think>\n\n</think>\n\n"),
    "headers": (HEADERS, CHATML_SPECIALS, None, "<|im_end|>", ""),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_ends_where_the_target_writes(name):
    """Catches a prompt without its generation prompt or header, and a lead that would come twice in the next turn."""
    template, specials, bos, eos, lead = PROMPTS[name]
    chat = ChatTokenizer(byte_level(template, specials, bos, eos))
    ids, found = chat.prompt(DIALOGUE[:3])
    text = chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert found == lead
    whole = chat.tokenizer.apply_chat_template(
        [*DIALOGUE[:3], {"role": "assistant", "content": "Four."}], tokenize=False
    )
    assert whole.startswith(text + lead + "Four.")
    if "add_generation_prompt" in template:
        assert text == chat.tokenizer.apply_chat_template(DIALOGUE[:3], tokenize=False, add_generation_prompt=True)
    with pytest.raises(DroppedError, match="special token"):
        chat.prompt([{"role": "user", "content": f"What is {eos}?"}])


def qwen3(template: str = QWEN3_TOOLS) -> ChatTokenizer:
    return ChatTokenizer(byte_level(template, CHATML_SPECIALS, None, "<|im_end|>"))


def settled(chat: ChatTokenizer, messages: list[Message]) -> tuple[list[list[str]], list[str]]:
    """The trained texts of each record that a dialogue becomes, and what was changed."""
    views, changes = chat.printer.settle(messages)
    return [masked_runs(chat.tokenizer, encode_one(chat, view)) for view in views], changes


def thinking(in_text: bool) -> list[Message]:
    """Three turns, the second without reasoning."""
    answers = [("It is a sum", "Four."), ("", "Yes."), ("Now with three", "Nine.")]
    messages: list[Message] = []
    for thought, answer in answers:
        beside = {} if in_text or not thought else {"reasoning_content": thought}
        text = f"<think>{thought}</think>{answer}" if in_text and thought else answer
        messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, **beside}]
    return messages


KEYS_ALONE = QWEN3_TOOLS.replace("and '</think>' in content", "and false")  # as newer ones: they read no text


@pytest.mark.parametrize(("template", "in_text"), [(QWEN3_TOOLS, False), (QWEN3_TOOLS, True), (KEYS_ALONE, True)])
def test_every_turn_of_a_thinking_target_is_trained_on_as_it_is_written(template, in_text):
    """Catches the reasoning of all turns but the last left out, since the template prints a dialogue so afterwards."""
    found, changes = settled(qwen3(template), thinking(in_text))
    assert found == [
        ["<think>\nIt is a sum\n</think>\n\nFour.<|im_end|>"],
        ["<think>\n\n</think>\n\nYes.<|im_end|>"],
        ["<think>\nNow with three\n</think>\n\nNine.<|im_end|>"],
    ]
    assert changes == ["one_record_per_turn"]


def test_records_of_one_dialogue_are_counted(tmp_path):
    """Catches a limit of dialogues spent on one's turns, an uncounted change, and a sample's sums by records."""
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"messages": thinking(in_text=False)}) + "\n" for _ in range(4)))
    split = encode_split(str(file), qwen3(), 512, limit=3)
    assert split.used == split.counts.usable == 3 and split.ids[:3] == ["record 0/0", "record 0/1", "record 0/2"]
    assert len(split.dialogues) == 9
    assert split.counts.changed == {"one_record_per_turn": 3}
    sample = sample_split(str(file), qwen3(), 512, count=2)
    assert sample.usable == 4 and 3 * sample.tokens == 4 * split.tokens
    cut = encode_split(str(file), qwen3(), len(split.dialogues[0].input_ids))
    assert cut.counts.changed == {"one_record_per_turn": 4, "truncated": 4} and not cut.counts.dropped


def test_reasoning_goes_into_the_text_where_the_template_takes_it_there():
    """Catches the loss of reasoning in a key of its own, with a template that reads <think> only within the text."""
    found, changes = settled(qwen3(QWEN3), thinking(in_text=False)[:2])
    assert found == [["<think>\nIt is a sum\n</think>\n\nFour.<|im_end|>"]] and not changes


@pytest.mark.parametrize(
    "template",
    [CHATML, CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")],
    ids=["unknown", "stripped"],
)
def test_reasoning_that_is_not_printed_is_counted(template):
    """Catches reasoning that vanishes without a word: beside the text, or cut out of it by the template."""
    found, changes = settled(qwen3(template), thinking(in_text=template != CHATML)[:2])
    assert found == [["Four.<|im_end|>"]] and changes == ["reasoning_left_out"]


CALLING: list[Message] = [
    {"role": "user", "content": "Rain?", "tools": [{"name": "weather"}]},
    {
        "role": "assistant",
        "content": "I look. ",
        "reasoning_content": "A tool",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}],
    },
    {"role": "tool", "content": "dry"},
    {"role": "assistant", "content": "No rain."},
]


def test_calls_are_trained_on_and_results_are_not():
    """Catches definitions, calls or results that the target never sees, and a call left out of the loss."""
    chat = qwen3()
    (answers,), changes = settled(chat, CALLING)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert answers == [
        f"<think>\nA tool\n</think>\n\nI look. {call}<|im_end|>",
        "<think>\n\n</think>\n\nNo rain.<|im_end|>",
    ]
    text = chat.render(CALLING).text
    assert '[{"name": "weather"}]' in text and "<|im_start|>tool\ndry<|im_end|>" in text and not changes


def test_a_call_in_the_place_of_a_text_is_found():
    """Catches Mistral's dialogues with tools dropped: without its call an answer is one turn too many for it."""
    chat = ChatTokenizer(byte_level(MISTRAL_TOOLS, SENTENCEPIECE_SPECIALS, "<s>", "</s>"))
    more: list[Message] = [DIALOGUE[0], {"role": "assistant", "content": "A"}]
    (answers,), changes = settled(chat, [CALLING[0], CALLING[1] | {"content": ""}, *CALLING[2:], *more])
    assert [answer.partition("[{")[0] for answer in answers] == ["[CALLS] ", " No rain.</s>", " A</s>"]
    assert answers[0].endswith("}]</s>")
    assert changes == ["tools_left_out", "reasoning_left_out"]


def test_tools_that_a_template_does_not_print_are_dropped():
    """Catches a tool's result printed as the assistant's answer and trained on, and calls that vanish."""
    chat = ChatTokenizer(byte_level(VICUNA, SENTENCEPIECE_SPECIALS, "<s>", "</s>"))
    for messages in (CALLING, CALLING[:2], [CALLING[0], *DIALOGUE[1:2], *CALLING[2:]]):
        with pytest.raises(DroppedError) as error:
            chat.printer.settle(messages)
        assert error.value.reason == "tools_not_printed"
    assert settled(chat, [CALLING[0], *DIALOGUE[1:2]])[1] == ["tools_left_out"]


def test_special_tokens_are_refused_in_every_key():
    """Catches an end token within reasoning, a call or a definition taken for a real one."""
    chat, bad = qwen3(), "<|im_end|>"
    call = {"tool_calls": [{"type": "function", "function": {"name": bad, "arguments": {}}}]}
    for place, more in ((0, {"tools": [{"name": bad}]}), (1, {"reasoning_content": bad}), (1, call)):
        messages = [message | more if n == place else message for n, message in enumerate(CALLING)]
        with pytest.raises(DroppedError, match="special token"):
            chat.render(messages)


def test_turns_of_weight_0_are_not_trained_on():
    """Catches training on answers that the data marks as bad ones, which are there for what follows."""
    chat = qwen3(CHATML)
    bad = DIALOGUE[3] | {"weight": 0}
    messages = [DIALOGUE[0], DIALOGUE[1] | {"weight": 1}, DIALOGUE[2], bad, DIALOGUE[0], DIALOGUE[1]]
    assert settled(chat, messages)[0] == [[f"{KEPT[0]}<|im_end|>"] * 2]
    assert chat.render(messages).text == chat.render([*DIALOGUE, *DIALOGUE[:2]]).text
    with pytest.raises(DroppedError) as error:
        chat.printer.settle([DIALOGUE[2], bad])
    assert error.value.reason == "no_trained_turn"


@pytest.mark.parametrize("shape", SHAPES)
def test_the_token_behind_an_answer_is_found(shape):
    """Catches answers that run on to the limit: of a target whose EOS is not its template's end of turn."""
    template, specials, bos, eos, *_, end = SHAPES[shape]
    tokenizer = byte_level(template.replace("eos_token", f"'{eos}'"), specials, bos, specials[0])
    assert ChatTokenizer(tokenizer).end_of_turn() == tokenizer.convert_tokens_to_ids(end.strip())
    assert qwen3(HEADERS).end_of_turn() is None
