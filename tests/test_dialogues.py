"""Reading ShareGPT data: what is kept, what is dropped, and what it is counted as."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from programs import refused

from data_prep.dialogues.reader import Dialogue, DroppedError, ReadCounts, check_source, parse_record, read_dialogues
from data_prep.dialogues.reader import record as written_record


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in pairs]}


PAIRS = ("human", "Hi"), ("gpt", "Hello!")
GOOD = turns(*PAIRS)


def read(path: Path | str) -> tuple[list[Dialogue], ReadCounts]:
    counts = ReadCounts()
    return list(read_dialogues(path, counts)), counts


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1, 2], "not_an_object"),
        ({"id": "x", "text": "plain"}, "no_conversations"),
        ({"conversations": "Hi"}, "no_conversations"),
        ({"conversations": []}, "empty_dialogue"),
        ({"conversations": ["Hi", "Hello"]}, "broken_turn"),
        ({"conversations": [{"value": "Hi"}]}, "broken_turn"),
        (turns(("human", "Hi"), ("alien", "Hello")), "unknown_role"),
        (turns(("human", "Hi"), (7, "Hello")), "unknown_role"),  # type: ignore[arg-type]
        (turns(("human", "Hi"), ("gpt", None)), "non_string_value"),
        (turns(("human", "Hi"), ("gpt", ["Hello"])), "non_string_value"),
        (turns(("human", "Hi"), ("gpt", " \n")), "empty_turn"),
        (turns(("human", "Hi"), ("gpt", "\ud800")), "invalid_text"),
        (turns(("human", "Hi"), ("human", "?"), ("gpt", "Hello")), "wrong_role_order"),
        (turns(("human", "Hi"), ("gpt", "Hello"), ("gpt", "!"), ("human", "?"), ("gpt", "?")), "wrong_role_order"),
        (turns(("human", "Hi"), ("system", "Be brief."), ("gpt", "Hello")), "wrong_role_order"),
        (turns(("human", "Hi")), "no_assistant_turn"),
        (turns(("system", "Be brief.")), "no_assistant_turn"),
        (turns(("gpt", "Hello"), ("human", "Hi")), "no_assistant_turn"),
    ],
)
def test_unusable_records_are_dropped_by_reason(record, reason):
    """Catches a crash on, or the silent use of, each kind of broken record."""
    with pytest.raises(DroppedError) as error:
        parse_record(record, "x")
    assert error.value.reason == reason


def test_leading_assistant_and_trailing_user_are_removed():
    """Catches training on an answer to nothing (the EAGLE data rule), and on a question without an answer."""
    changed: Counter[str] = Counter()
    record = turns(("system", "S"), ("gpt", "Welcome"), ("user", "Hi"), ("chatgpt", "Hello!"), ("human", "Bye"))
    dialogue = parse_record(record, "y", changed)
    assert [(m["role"], m["content"]) for m in dialogue.messages] == [
        ("system", "S"),
        ("user", "Hi"),
        ("assistant", "Hello!"),
    ]
    assert dialogue.id == "x"
    assert changed == {"leading_assistant_removed": 1, "trailing_user_removed": 1}


def test_openai_records_and_columns():
    """Catches losing datasets with role/content turns, or with a struct of lists where `datasets` makes one."""
    expected = parse_record(GOOD, "x").messages
    rows = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    columns = {"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Hello!"]}}
    assert parse_record(rows, "x").messages == expected
    assert parse_record(columns, "x").messages == expected


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": None, "value": None, "role": role, "content": text} for role, text in PAIRS]},
        {"conversations": [{"from": role, "value": text, "role": None, "content": None} for role, text in PAIRS]},
        {"conversations": [{"from": role, "value": "", "content": text} for role, text in PAIRS]},
        {"conversations": None, "messages": [{"role": role, "content": text} for role, text in PAIRS]},
        {"conversations": [], "conversation": None, "messages": [{"role": r, "content": t} for r, t in PAIRS]},
        {"conversations": {"from": None, "role": ["user", "assistant"], "content": ["Hi", "Hello!"]}},
        {"tools": None, "conversations": [{"role": r, "content": t, "tool_calls": None} for r, t in PAIRS]},
    ],
)
def test_a_null_is_an_absent_key(record):
    """Catches a file of two forms dropped: `datasets` gives each record the other form's keys as nulls."""
    assert parse_record(record, "x").messages == parse_record(GOOD, "x").messages


WEATHER = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
WITH_TOOLS = {
    "tools": '[{"name": "weather", "parameters": {"type": "object"}}]',
    "messages": [
        {"role": "user", "content": "Rain in Rome?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "The tool knows."},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "weather", "arguments": None}}]},
        {"role": "tool", "content": "dry", "tool_call_id": "1"},
        {"role": "assistant", "content": "No.", "weight": 0},
    ],
}


def test_a_call_belongs_to_the_answer_before_it():
    """Catches calls, results and definitions of tools lost, or the dialogue with them, and reasoning that vanishes."""
    messages = parse_record(WITH_TOOLS, "x").messages
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[0]["tools"] == [{"name": "weather", "parameters": {"type": "object"}}]
    assert messages[1] == {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "The tool knows.",
        "tool_calls": [call],
    }
    assert messages[2] == {"role": "tool", "content": "dry", "tool_call_id": "1"}
    assert messages[3]["weight"] == 0
    in_turn = [WITH_TOOLS["messages"][0] | {"tools": WITH_TOOLS["tools"]}, *WITH_TOOLS["messages"][1:]]
    assert parse_record({"conversations": in_turn, "tools": None}, "x").messages == messages


def test_calls_in_sharegpts_roles_and_as_json_text():
    """Catches a call as JSON text handed to a template, which prints it quoted, and ShareGPT's names of the roles."""
    as_text = json.dumps({"name": "weather", "arguments": {"city": "Rome"}})
    record = turns(("human", "Rain?"), ("function_call", as_text), ("observation", "dry"), ("gpt", "No."))
    assert parse_record(record, "x").messages[1] == {"role": "assistant", "content": "", "tool_calls": [WEATHER]}
    call = {"id": "a1", "index": None, "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    record = {"messages": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "tool_calls": [call]}]}
    assert parse_record(record, "x").messages[1]["tool_calls"] == [{"id": "a1", **WEATHER}]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tools": "{broken"}, "broken_tools"),
        ({"tools": ["weather"]}, "broken_tools"),
        ({"tools": [{"name": "\ud800"}]}, "invalid_text"),
        ({"tools": '[{"name": "\\ud800"}]'}, "invalid_text"),
        (
            {"conversations": turns(("human", "Hi"), ("function_call", "weather()"))["conversations"]},
            "broken_tool_call",
        ),
        (
            {"conversations": turns(("human", "Hi"), ("tool", "dry"), ("gpt", "No."))["conversations"]},
            "wrong_role_order",
        ),
    ],
)
def test_broken_tools_are_dropped_by_reason(changes, reason):
    """Catches a run that ends for one record's tools, or trains on what they left."""
    with pytest.raises(DroppedError) as error:
        parse_record({**GOOD, **changes}, "x")
    assert error.value.reason == reason


def test_what_is_split_keeps_tools_reasoning_and_weights():
    """Catches a split of a file that leaves out what the file has beside roles and texts."""
    before = parse_record(WITH_TOOLS, "x")
    assert parse_record(json.loads(json.dumps(written_record(before))), "x") == before


def test_broken_lines_are_counted_and_the_rest_is_read(tmp_path):
    """Catches one bad line ending the run: cut JSON, bytes that are no UTF-8, endless nesting, a byte-order mark."""
    accented = json.dumps(turns(("human", "Où ?"), ("gpt", "Là")), ensure_ascii=False).encode()
    lines = [
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
        b'{"id": "cut", "conversations": [{"from"',
        b'{"id": "\xff"}',
        b'{"a":' * 100_000,
        b"",
        json.dumps(turns(("human", "A"))).encode(),
        accented,
    ]
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\n".join(lines))
    dialogues, counts = read(file)
    assert len(dialogues) == counts.usable == 2
    assert counts.dropped == {"broken_json": 2, "not_utf8": 1, "no_assistant_turn": 1}
    assert counts.describe() == "2 kept, dropped 4 (broken_json 2, not_utf8 1, no_assistant_turn 1)"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("form", ["list.json", "lines.jsonl", "lines.jsonl.gz"])
def test_every_unicode_encoding_is_read(tmp_path, encoding, form):
    """Catches a file that PowerShell or Excel wrote counted as broken JSON, line by line."""
    records = [turns(("human", "Où ?"), ("gpt", "Là\u2028ici")), GOOD]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    text = json.dumps(records, ensure_ascii=False) if form.startswith("list") else "\n".join(lines)
    data = text.encode(encoding)
    (tmp_path / form).write_bytes(gzip.compress(data) if form.endswith(".gz") else data)
    dialogues, counts = read(tmp_path / form)
    assert [one.messages[1]["content"] for one in dialogues] == ["Là\u2028ici", "Hello!"]
    assert not counts.dropped


def test_everything_dropped_is_an_error_with_the_counts(tmp_path):
    """Catches an empty store, made without a word."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "a"}\nnot json\n')
    with refused(r"none of 2 records.*no_conversations 1, broken_json 1.*\"from\": \"human\""):
        read(file)
    file.write_text("")
    with refused(r"bad\.jsonl is empty: it holds no record"):
        read(file)


def test_damaged_files_are_errors(tmp_path):
    """Catches using the first half of a download that broke off as if it were all of it."""
    whole = gzip.compress(("\n".join([json.dumps(GOOD)] * 2000)).encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped.gz").write_bytes(whole[:30] + b"\xff" * 20 + whole[50:])
    (tmp_path / "not.gz").write_bytes(b"plain text")
    (tmp_path / "cut.json").write_text(json.dumps([GOOD, GOOD])[:-20])
    for name, said in (
        ("cut.jsonl.gz", "damaged gzip"),
        ("flipped.gz", "damaged gzip"),
        ("not.gz", "damaged gzip"),
        ("cut.json", "JSON list but is broken"),
    ):
        with refused(said):
            read(tmp_path / name)


def test_missing_file_is_told_from_a_hub_name(tmp_path):
    """Catches a mistyped path being looked up on the Hub for minutes."""
    for name in (tmp_path / "none.jsonl", "data/none.json", "none", "/a/b/c"):
        with refused("no data file at"):
            check_source(name)
    check_source("owner/name")


def test_a_dataset_is_read_by_name(tmp_path):
    """Catches a Hub dataset's rows arriving in a shape that the reader cannot take."""
    pytest.importorskip("datasets", reason="the datasets library is not installed")
    folder = tmp_path / "dataset"
    folder.mkdir()
    records = [GOOD, turns(("human", "1"), ("gpt", "2"), ("human", "3"), ("gpt", "4")), turns(("human", "A"))]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "test.jsonl").write_text(json.dumps(GOOD))
    dialogues, counts = read(str(folder))
    assert [len(dialogue.messages) for dialogue in dialogues] == [2, 4]
    assert counts.dropped == {"no_assistant_turn": 1}
    with refused(r"no dataset 'none/nothing' with a split 'validation'"):
        read("none/nothing:validation")  # the tests run with the Hub switched off
