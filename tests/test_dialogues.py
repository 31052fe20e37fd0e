"""Reading ShareGPT data: what is kept, what is dropped, and what it is counted as."""

import gzip
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep.dialogues import reader
from data_prep.dialogues.reader import (
    Dialogue,
    DroppedError,
    ReadCounts,
    check_source,
    parse_record,
    read_dialogues,
    source_digest,
)

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "data" / "train" / "sharegpt.jsonl.gz"


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": role, "value": text} for role, text in pairs]}


GOOD = turns(("human", "Hi"), ("gpt", "Hello!"))


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
def test_unusable_records_are_dropped_by_reason(record: Any, reason: str) -> None:
    """Catches a crash on, or the silent use of, each kind of broken record."""
    with pytest.raises(DroppedError) as error:
        parse_record(record, "x")
    assert error.value.reason == reason


def test_leading_assistant_and_trailing_user_are_removed() -> None:
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


def test_openai_records_and_columns() -> None:
    """Catches losing datasets with role/content turns, or with a struct of lists where `datasets` makes one."""
    expected = parse_record(GOOD, "x").messages
    rows = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    columns = {"conversations": {"from": ["human", "gpt"], "value": ["Hi", "Hello!"]}}
    assert parse_record(rows, "x").messages == expected
    assert parse_record(columns, "x").messages == expected


def test_a_category_is_kept() -> None:
    """Catches reports without their figures by category, and a category that is no text taken for one."""
    assert parse_record(GOOD, "x").category is None
    assert parse_record({**GOOD, "category": "qa"}, "x").category == "qa"
    assert parse_record({**GOOD, "category": ["qa"]}, "x").category is None


def test_broken_lines_are_counted_and_the_rest_is_read(tmp_path: Path) -> None:
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
    assert len(dialogues) == counts.kept == 2
    assert counts.dropped == {"broken_json": 2, "not_utf8": 1, "no_assistant_turn": 1}
    assert counts.describe() == "2 kept, dropped 4 (broken_json 2, not_utf8 1, no_assistant_turn 1)"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("form", ["list.json", "lines.jsonl", "lines.jsonl.gz"])
def test_every_unicode_encoding_is_read(tmp_path: Path, encoding: str, form: str) -> None:
    """Catches a file that PowerShell or Excel wrote counted as broken JSON, line by line."""
    records = [turns(("human", "Où ?"), ("gpt", "Là\u2028ici")), GOOD]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    text = json.dumps(records, ensure_ascii=False) if form.startswith("list") else "\n".join(lines)
    data = text.encode(encoding)
    (tmp_path / form).write_bytes(gzip.compress(data) if form.endswith(".gz") else data)
    dialogues, counts = read(tmp_path / form)
    assert [one.messages[1]["content"] for one in dialogues] == ["Là\u2028ici", "Hello!"]
    assert not counts.dropped


@pytest.mark.parametrize(("encoding", "name"), [("latin-1", "Latin-1"), ("cp1252", "Windows-1252")])
@pytest.mark.parametrize("as_list", [True, False])
def test_another_encoding_is_named_with_what_converts_it(
    tmp_path: Path, encoding: str, name: str, as_list: bool
) -> None:
    """Catches every dialogue with an accent in it dropped as broken JSON, and the others trained on."""
    word = "Là" if encoding == "latin-1" else "Là – ici"
    records = [GOOD, turns(("human", "Où ?"), ("gpt", word))]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    file, mended = tmp_path / "old data.jsonl", tmp_path / "utf8-old data.jsonl"
    file.write_bytes((f"[{','.join(lines)}]" if as_list else "\n".join(lines)).encode(encoding))
    with pytest.raises(
        ValueError, match=f"is not UTF-8 .byte 0xf9., probably {name}; convert it with: iconv "
    ) as error:
        read(file)
    command = str(error.value).partition("convert it with: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert read(mended)[0][1].messages[1]["content"] == word


def test_few_odd_bytes_are_damage(tmp_path: Path) -> None:
    """Catches a run that ends for one flipped bit in a large file of plain ASCII, as which JSON is mostly written."""
    lines = [json.dumps(GOOD).encode()] * 200
    lines[77] = lines[77].replace(b"Hi", b"H\xe9")
    (tmp_path / "data.jsonl").write_bytes(b"\n".join(lines))
    dialogues, counts = read(tmp_path / "data.jsonl")
    assert len(dialogues) == 199
    assert counts.dropped == {"not_utf8": 1}


def test_a_binary_file_is_no_text(tmp_path: Path) -> None:
    """Catches a wrong file given as data counted as so many broken lines."""
    (tmp_path / "data.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\x02\xff\n\xfe\0")
    with pytest.raises(ValueError, match=r"data\.jsonl is "):
        read(tmp_path / "data.jsonl")


@pytest.mark.parametrize("name", ["list.json", "lines.json", "lines.jsonl", "lines.jsonl.gz", "list.json.gz"])
def test_file_forms(tmp_path: Path, name: str) -> None:
    """Catches a form of ShareGPT file that is not read: one list, indented, or a record a line, gzipped or not."""
    records = [GOOD, turns(("human", "1"), ("gpt", "2"), ("human", "3"), ("gpt", "4"))]
    text = json.dumps(records, indent=1) if name.startswith("list") else "\n".join(map(json.dumps, records))
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    dialogues, counts = read(tmp_path / name)
    assert [len(dialogue.messages) for dialogue in dialogues] == [2, 4]
    assert not counts.dropped


def test_everything_dropped_is_an_error_with_the_counts(tmp_path: Path) -> None:
    """Catches an empty store, made without a word."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "a"}\nnot json\n')
    with pytest.raises(ValueError, match=r"none of 2 records.*no_conversations 1, broken_json 1.*\"from\": \"human\""):
        read(file)
    file.write_text("")
    with pytest.raises(ValueError, match=r"bad\.jsonl is empty: it holds no record"):
        read(file)


def test_damaged_files_are_errors(tmp_path: Path) -> None:
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
        with pytest.raises(ValueError, match=said):
            read(tmp_path / name)


def test_missing_file_is_told_from_a_hub_name(tmp_path: Path) -> None:
    """Catches a mistyped path being looked up on the Hub for minutes."""
    for name in (tmp_path / "none.jsonl", "data/none.json", "none", "/a/b/c"):
        with pytest.raises(ValueError, match="no data file at"):
            check_source(name)
    check_source("owner/name")


def test_a_dataset_is_read_by_name(tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match=r"no dataset 'nobody/nothing' with a split 'validation'"):
        read("nobody/nothing:validation")  # the tests run with the Hub switched off


def test_a_folder_without_data_is_told_from_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a folder that is handed to `datasets`, which answers in its own words, or asks to be installed."""
    with pytest.raises(ValueError, match="is a folder without data files; give a ShareGPT"):
        check_source(tmp_path)
    (tmp_path / "train.jsonl").write_text(json.dumps(GOOD))
    check_source(tmp_path)
    monkeypatch.setattr(reader, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"is a folder: give one of its files, for example .*train\.jsonl; reading it"):
        check_source(tmp_path)
    with pytest.raises(ValueError, match="is neither a file nor a folder"):
        check_source("/dev/null")


def test_digest_follows_the_content(tmp_path: Path) -> None:
    """Catches continuing a store from a file that was changed in between."""
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    one.write_text("a")
    two.write_text("a")
    assert source_digest(one) == source_digest(two)
    two.write_text("b")
    assert source_digest(one) != source_digest(two)


@pytest.mark.skipif(not CORPUS.is_file(), reason=f"no corpus at {CORPUS}")
def test_real_corpus() -> None:
    """Catches a rule that throws away real data: of these 49,498 dialogues every one is well formed."""
    dialogues, counts = read(CORPUS)
    assert len(dialogues) == 49_498
    assert not counts.dropped and not counts.changed
    assert Counter(len(dialogue.messages) for dialogue in dialogues)[2] == 49_268
