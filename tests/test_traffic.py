"""python -m data_prep.traffic: a log of a server is read as served, split by conversation and time, and counted."""

import contextlib
import copy
import gzip
import itertools
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from data_prep.answers import traffic as reading
from data_prep.answers.traffic import Index
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.dialogues.messages import DroppedError
from data_prep.dialogues.served import CONVERSATION_KEYS, TIME_KEYS, parse_served
from data_prep.traffic import main

USER = {"role": "user", "content": "What is it?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
SERVED: dict[str, Any] = {
    "request": {"model": "m", "messages": [USER], "tools": [{"type": "function", "function": {"name": "look"}}]},
    "response": {
        "created": 1_790_000_000,
        "choices": [{"message": {"role": "assistant", "content": "Four.", "reasoning_content": "2 + 2"}}],
        "usage": {"prompt_tokens": 9},
    },
}


def asked(number: int, at: float, answer: str = "four", before: list[dict[str, str]] | None = None) -> dict[str, Any]:
    """A record as served, with ``before`` as earlier turns."""
    messages = [*(before or []), {"role": "user", "content": f"question {number}"}]
    reply = {"message": {"role": "assistant", "content": answer}}
    return {"request": {"messages": messages}, "response": {"choices": [reply], "created": at}}


def split(folder: Path, target: Path, rows: list[Any], *more: str) -> dict[str, list[dict[str, Any]]]:
    """The three files that the program makes of a log."""
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main([str(log), "--target", str(target), "--out", str(folder / "out"), *more])
    files = {name: (folder / "out" / f"{name}.jsonl").read_text().splitlines() for name in reading.NAMES}
    return {name: [json.loads(line) for line in lines] for name, lines in files.items()}


def questions(records: list[dict[str, Any]]) -> list[str]:
    return [record["conversations"][0]["value"] for record in records]


def test_forms_of_logs() -> None:
    """Catches reasoning, tool calls or definitions that are lost, and forms of a log that are not read."""
    served = parse_served(SERVED, "1")
    first, last = served.dialogue.messages
    assert first["tools"][0]["function"]["name"] == "look" and last["reasoning_content"] == "2 + 2"
    assert (served.time, served.prompt_tokens, served.answers) == (1_790_000_000.0, 9, frozenset({1}))
    body = {"request": {"body": SERVED["request"]}, "response": {"status_code": 200, "body": SERVED["response"]}}
    flat = SERVED["request"] | SERVED["response"]
    texts = {key: json.dumps(value) for key, value in SERVED.items()}
    for other in (body, flat, {"request": SERVED["request"], "response": "Four.", "timestamp": "2026-09-21T12:26:40Z"}):
        assert parse_served(other, "1").dialogue.messages[0] == first
    assert parse_served(texts, "1") == served
    message = json.dumps({"role": "assistant", "content": "Four."})
    assert (
        parse_served({"request": SERVED["request"], "response": message}, "1").dialogue.messages[1]["content"]
        == "Four."
    )
    with pytest.raises(DroppedError, match="failed_request"):
        parse_served({"request": SERVED["request"], "response": ' {"error": {"message": "full"}}'}, "1")
    for answer in ('{"prompt": "four"}', '{"error": "four"}'):
        assert (
            parse_served({"request": SERVED["request"], "response": answer}, "1").dialogue.messages[1]["content"]
            == answer
        )
    told = {"messages": [{"role": "developer", "content": "Be brief."}, USER]}
    as_json = parse_served({"request": told, "response": '{"four": 4}'}, "1").dialogue.messages
    assert [(turn["role"], turn["content"]) for turn in as_json] == [
        ("system", "Be brief."), ("user", USER["content"]), ("assistant", '{"four": 4}')
    ]  # fmt: skip
    call = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": [CALL]}}]}
    assert "tool_calls" in parse_served(SERVED | {"response": call}, "1").dialogue.messages[-1]
    parts = {"messages": [USER | {"content": [{"type": "text", "text": "What is it?"}]}]}
    assert parse_served({"request": parts, "response": "4"}, "1").dialogue.messages[0] == USER
    own = {"conversations": [{"from": who, "value": "x"} for who in ("human", "gpt", "human", "gpt")]}
    assert parse_served(own, "1").answers == {1, 3}  # our own record has the target's answers only


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"response": {"choices": []}}, "no_answer"),
        ({"response": {"status_code": 500}}, "failed_request"),
        ({"request": {"model": "m"}}, "no_request"),
        ({"request": {"prompt": "x"}, "response": {"choices": [{"text": "y"}]}}, "text_completion"),
        ({"response": {"choices": [{"delta": {"content": "Four"}}]}}, "streamed_chunks"),
        ({"response": [{"choices": [{"delta": {"content": "Four"}}]}]}, "streamed_chunks"),
        ({"response": 'data: {"choices": [{"delta": {"content": "Four"}}]}\n\ndata: [DONE]'}, "streamed_chunks"),
        ({"conversation_id": "\ud800"}, "invalid_text"),
        ({"created": 10**400}, "broken_time"),
        ({"request": SERVED["request"] | {"chat_template_kwargs": {"enable_thinking": False}}}, "template_options"),
    ],
)
def test_unusable_records_are_counted_by_reason(changes: dict[str, Any], reason: str) -> None:
    """Catches a failed request whose empty answer is trained on, another template's prompts, and one bad record that
    ends the reading."""
    with pytest.raises(DroppedError) as told:
        parse_served(SERVED | changes, "1")
    assert told.value.reason == reason


def test_any_value_is_read_or_dropped() -> None:
    """Catches another error than DroppedError, which ends the reading."""
    strange = [None, True, -1, 10**400, float("inf"), "", "\ud800", "2026-99", "0001-01-01", [], [[]], {}, {"x": [1]}]
    keys = [*CONVERSATION_KEYS, *TIME_KEYS, "error", "metadata", "body", "status_code", "prompt_token_ids", "content"]
    keys += ["name", "tool_calls", "reasoning_content", "weight", "id", "category", "request", "response", "messages"]
    keys += ["tools", "choices", "message", "usage", "prompt_tokens", "finish_reason", "chat_template_kwargs", "delta"]
    for place, key, value in itertools.product(range(5), keys, strange):
        changed = copy.deepcopy(SERVED)
        inner = [changed, changed["request"], changed["request"]["messages"][0], changed["response"]]
        inner += [changed["response"]["choices"][0]["message"]]
        inner[place][key] = value
        with contextlib.suppress(DroppedError):
            Index.read(iter([(1, parse_served(changed, "1"))]))


def test_the_newest_conversations_are_held_out(target_folder: Path, tmp_path: Path) -> None:
    """Catches a split by place in the log, a conversation on two sides, a repeated prompt, and an old question held
    out."""
    rows = [asked(number, at=float(1000 - number)) for number in range(100)]  # the log's first is the newest
    again = asked(70, at=2000.0, answer="five")  # the newest answer to a repeated prompt
    old = {"conversation_id": "b", "request": {"messages": [USER | {"content": " QUESTION  95"}]}, "response": "four"}
    sides = split(tmp_path, target_folder, [*rows, again, old | {"time": 3000.0}])
    held = {int(text.split()[1]) for text in questions(sides["heldout"])}
    assert held == {70, *range(18)}
    train = {int(text.split()[1]) for text in questions(sides["train"])}
    assert not train & held and min(train) == 28
    facts = json.loads((tmp_path / "out" / "traffic.json").read_text())
    assert facts["dropped"] == {"repeated_prompt": 1, "question_asked_before": 1}
    assert facts["conversations"] == {"train": 71, "valid": 10, "heldout": 19}


@pytest.mark.parametrize("whole", [False, True])
def test_conversations_that_begin_alike(target_folder: Path, tmp_path: Path, whole: bool) -> None:
    """Catches held-out conversations that are dropped because others also begin with a greeting, one whose questions
    were all asked before, and one question whose answer is trained on within a longer record."""
    hi = [USER | {"content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows = []
    for number in range(100):
        name, end = {"conversation_id": f"c{number}"}, asked(number, at=number, before=hi)
        rows += [asked(number, number) | name | {"request": {"messages": hi[:1]}}, end | name]
        if whole:  # our own records
            rows[-2:] = [{"messages": [*end["request"]["messages"], hi[1]], "time": number} | name]
    greeting = {"conversation_id": "x", "request": {"messages": [USER | {"content": "hi"}]}, "response": "Hello."}
    longer = asked(1, 101.0, before=[hi[0] | {"content": "HI"}, hi[1]]) | {"conversation_id": "y"}
    sides = split(tmp_path, target_folder, [*rows, greeting | {"time": 100.0}, longer])
    again = 1 + whole  # requests: only the newest greeting counts, and it is held out
    assert {name: len(side) for name, side in sides.items()} == {"train": 72, "valid": 10, "heldout": 20 - again}
    facts = json.loads((tmp_path / "out" / "traffic.json").read_text())
    assert facts["dropped"]["question_asked_before"] == again


def test_each_served_answer_counts_once(target_folder: Path, tmp_path: Path) -> None:
    """Catches turns that are trained on twice, an answer that the client wrote, and held-out prompts without the turns
    before them."""
    rows = []
    for number in range(60):
        first, second = asked(number, at=2.0 * number), {"role": "user", "content": "And then?"}
        turn = [*first["request"]["messages"], {"role": "assistant", "content": "four" if number % 2 else "edited"}]
        rows += [first, {"request": {"messages": [*turn, second]}, "response": "five", "time": 2.0 * number + 1}]
    sides = split(tmp_path, target_folder, rows)
    weights = [[turn.get("weight", 1) for turn in record["conversations"][1::2]] for record in sides["train"]]
    assert sorted(map(tuple, weights)) == sorted([(1, 1)] * 17 + [(0, 1)] * 17 + [(1,)] * 17)
    held = [[turn.get("weight", 1) for turn in record["conversations"][1::2]] for record in sides["heldout"]]
    assert held == [[0, 1]] * 20


def test_bad_logs_are_refused(target_folder: Path, tmp_path: Path) -> None:
    """Catches an adaptation to one conversation, to questions without answers, and to another template's prompts."""
    for rows, message in (
        ([asked(1, 0.0)], r"train 0, valid 1, heldout 0 usable conversations .*at least train 25, valid 3, heldout 10"),
        ([asked(number, number) for number in range(30)], "train 12, valid 3, heldout 15 usable"),
        ([{"request": {"messages": [USER]}}] * 9, "no record is usable .*dropped 9 .*no_conversations 9"),
        ([{"request": {"messages": [USER]}, "response": None}] * 9, "no record is usable .*no_answer 9"),
        ([{"request": {"prompt": "x"}, "response": {"choices": [{"text": "y"}]}}], "text_completion 1.*: log /v1/chat"),
        ([{"request": {"messages": [USER]}, "response": "data: {}"}], "streamed_chunks 1.*: join those of each"),
    ):
        with pytest.raises(ValueError, match=message):
            split(tmp_path, target_folder, rows)
    chat = load_tokenizer(str(target_folder))
    rows = [asked(number, at=number) for number in range(60)]
    for row in rows:
        row["response"]["usage"] = {"prompt_tokens": len(chat.prompt(row["request"]["messages"])[0])}
    assert split(tmp_path, target_folder, rows)["heldout"]
    for row in rows:
        row["response"]["usage"]["prompt_tokens"] += 4
    with pytest.raises(ValueError, match=r"60 of 60 prompts have another number of tokens than .* another template"):
        split(tmp_path, target_folder, rows)


def test_a_large_log_is_read_line_by_line(target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a log of 200 MB that is held in memory, where only its newest 1 MB is needed."""
    monkeypatch.setattr(reading, "MOST_BYTES", 1 << 20)
    log, padding = tmp_path / "log.jsonl.gz", "four " * 4000
    with gzip.open(log, "wt", compresslevel=1) as file:
        for number in range(10_000):
            file.write(json.dumps(asked(number, at=number, answer=padding)) + "\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    main([str(log), "--target", str(target_folder), "--out", str(tmp_path / "out")])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # KB
    facts = json.loads((tmp_path / "out" / "traffic.json").read_text())
    assert sum(facts["conversations"].values()) == 52
    with pytest.raises(ValueError, match=r"is one JSON list; give a record per line: jq"):
        monkeypatch.setattr(reading, "LARGEST_LIST", 1)
        (tmp_path / "list.json").write_text(f"[{json.dumps(SERVED)}]")
        main([str(tmp_path / "list.json"), "--target", str(target_folder), "--out", str(tmp_path / "out")])
