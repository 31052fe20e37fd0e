"""data_prep.regenerate through an OpenAI-compatible server: good ones, bad ones, dead ones."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_server import ChatServer, completion, error, ok, shout
from programs import refused

from data_prep import regenerate
from data_prep.answers import endpoint as endpoint_answers
from data_prep.answers.journal import read_journals
from data_prep.dialogues.reader import ReadCounts, read_dialogues

KEY = "sk-very-secret-4711"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No proxy between the test and its server, no key from outside, short waits."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(endpoint_answers, "FIRST_WAIT", 0.01)


@pytest.fixture
def server():
    with ChatServer() as running:
        yield running


def dialogue(index: int) -> dict[str, Any]:
    system = [("system", "be loud")] if index % 2 else []
    pairs = [("human", f"question {index}.{turn}") for turn in range(1 + index % 3)]
    turns = [turn for question in pairs for turn in (question, ("gpt", "the old answer"))]
    return {
        "id": f"d{index}",
        "category": "noise",
        "conversations": [{"from": role, "value": text} for role, text in [*system, *turns]],
    }


def expected(index: int) -> dict[str, Any]:
    """The dialogue as the server answers it, each turn after the answers before it."""
    record, messages = dialogue(index), []
    for turn in record["conversations"]:
        if turn["from"] == "gpt":
            turn["value"] = shout(messages)
        role = {"human": "user", "gpt": "assistant", "system": "system"}[turn["from"]]
        messages.append({"role": role, "content": turn["value"]})
    return record


def write_config(folder: Path, server: ChatServer, count: int = 8, **changes: Any) -> Path:
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps(dialogue(index)) + "\n" for index in range(count)))
    endpoint = {"url": server.url, "model": "loud-7b", "concurrency": 4, "timeout": 5, "retries": 3}
    settings = {"source": str(source), "out": str(folder / "new.jsonl"), "max_new_tokens": 50}
    file = folder / "endpoint.yaml"
    file.write_text(yaml.safe_dump({**settings, "endpoint": {**endpoint, **changes.pop("endpoint", {})}, **changes}))
    return file


def run(config: Path, *overrides: str) -> list[dict[str, Any]]:
    regenerate.main(["--config", str(config), *overrides])
    return [json.loads(line) for line in (config.parent / "new.jsonl").read_text().splitlines()]


def facts(config: Path) -> dict[str, Any]:
    return json.loads((config.parent / "new.jsonl.json").read_text())


def content(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


def test_whole_dialogues_are_answered_side_by_side(tmp_path, server):
    """Catches old answers in the history, a lost system message, records out of order, and requests one by one."""
    server.delay = 0.05
    config = write_config(tmp_path, server)
    assert run(config) == [expected(index) for index in range(8)]
    assert len(server.asked) == sum(1 + index % 3 for index in range(8))
    assert 2 <= server.busiest <= 4
    assert all(body["model"] == "loud-7b" and body["temperature"] == 0.0 for body in server.bodies)
    assert {body["max_tokens"] for body in server.asked} == {50} and "seed" not in server.asked[0]
    written = facts(config)
    assert written["answers"] == len(server.asked) and written["tokens"] == 5 * len(server.asked)
    assert written["tau"] is None and written["tokens_per_second"] > 0
    assert len(list(read_dialogues(tmp_path / "new.jsonl", ReadCounts()))) == 8
    count = len(server.bodies)
    run(config)
    assert len(server.bodies) == count


def test_sampling_and_extra_keys_reach_the_server(tmp_path, server):
    """Catches one seed for all requests, seeds that change from run to run, and keys that get lost."""
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "max_completion_tokens": 7, "stop": None}
    run(write_config(tmp_path, server, temperature=0.7, top_p=0.9, top_k=5, seed=3, endpoint={"extra": extra}))
    seeds = {content(body): body["seed"] for body in server.asked}
    assert len(set(seeds.values())) == len(server.asked)
    body = server.asked[0]
    assert (body["temperature"], body["top_p"], body["top_k"]) == (0.7, 0.9, 5)
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and "stop" not in body
    (tmp_path / "again").mkdir()
    server.bodies.clear()
    run(write_config(tmp_path / "again", server, temperature=0.7, seed=3))
    assert {content(body): body["seed"] for body in server.asked} == seeds


def test_a_server_that_fails_at_times_is_asked_again(tmp_path, server):
    """Catches a dialogue that is lost, or answered by half a reply, because of one bad moment of the server."""
    bad = [
        error(500, "out of luck"),
        error(429, "slow down"),
        error(503, "loading"),
        b"",
        b"HTTP/1.0 200 OK\r\nContent-Length: 500\r\n\r\n{half",
        (200, b"<html>not json</html>", {}),
        ok({"choices": []}),
        ok({"object": "nothing"}),
        ok([1]),
        ok({"choices": [{"message": None}]}),
    ]
    server.misbehave = lambda body, number: bad[number // 3 % len(bad)] if number % 3 else None
    config = write_config(tmp_path, server, count=12, endpoint={"retries": 30})
    assert run(config) == [expected(index) for index in range(12)]
    assert len(server.bodies) > 30  # all kinds of failures came


def test_a_server_that_dies_midway_costs_nothing(tmp_path):
    """Catches answers lost when the server goes away, and work done twice when another one takes over."""

    def dies(body, number):
        time.sleep(0.5 if number == 8 else 0)  # answered when the run has failed already
        return b"" if number >= 9 else None

    with ChatServer(dies) as first:
        config = write_config(tmp_path, first, count=12)
        with pytest.raises(OSError, match="cannot be reached"):
            run(config, "endpoint.retries=0")
    kept = [turn for batch in read_journals(tmp_path / "new.jsonl.unfinished") for turn in batch.turns]
    assert len(kept) == 8 and all(turn.answer for turn in kept)  # all but the check
    with pytest.raises(OSError, match=r"cannot be reached: .*refused"):
        run(config, "endpoint.retries=0")
    with ChatServer() as second:
        records = run(config, f"endpoint.url={second.url}", "endpoint.concurrency=2")
        assert records == [expected(index) for index in range(12)]
        assert len(second.asked) == sum(1 + index % 3 for index in range(12)) - 8


def test_what_becomes_of_odd_answers(tmp_path, server):
    """Catches null content as the text "None", cut answers that are not counted, one bad dialogue that ends a run."""
    odd = {
        "question 0.0": completion(None),
        "question 1.1": completion(" \n"),
        "question 2.0": completion("cut he", "length"),
        "question 3.0": completion("no", "content_filter"),
        "question 4.0": error(400, "I do not talk about that", "policy"),
        "question 5.1": error(400, "This model's maximum context length is 2048 tokens", "context_length_exceeded"),
        "question 6.0": ok({"choices": []}),
        "question 7.0": completion("\ud800 half a pair"),
        "question 8.0": error(400, "the request exceeds the available context size"),
        "question 10.1": completion("<think>\nThe user asks", "length"),
    }
    server.misbehave = lambda body, number: odd.get(content(body))
    config = write_config(tmp_path, server, count=12)
    records = {record["id"]: record for record in run(config)}
    assert list(records) == ["d2", "d5", "d9", "d10", "d11"]
    assert records["d2"]["conversations"][1]["value"] == "cut he"
    assert records["d5"]["conversations"] == expected(5)["conversations"][:3]
    written = facts(config)
    assert written["dropped"] == {
        "empty_answer": 2, "content_filter": 1, "refused": 1, "bad_reply": 1, "invalid_text": 1, "no_room": 1,
    }  # fmt: skip
    assert records["d10"]["conversations"] == expected(10)["conversations"][:2]
    assert written["ended_early"] == {"no_room": 1, "only_reasoning": 1} and written["truncated"] == 1
    (tmp_path / "drop").mkdir()
    config = write_config(tmp_path / "drop", server, count=12, truncated="drop")
    assert "d2" not in {record["id"] for record in run(config)}
    assert facts(config)["dropped"]["truncated"] == 1


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_beside_the_answer(key, tmp_path, server, capsys):
    """Catches a target's reasoning dropped, so that its features begin with an answer that it would not give there."""

    def thinks(body, number):
        only = content(body) == "question 1.1"
        message = {"content": None if only else "Four.", key: "Two and two.", "reasoning_details": None}
        choice = {"message": message, "finish_reason": "length" if only else "stop"}
        return ok({"choices": [choice], "usage": {"completion_tokens": 50}})

    server.misbehave = thinks
    records = run(write_config(tmp_path, server, count=3))
    answer = {"from": "gpt", "value": "Four.", "reasoning_content": "Two and two."}
    assert [len(record["conversations"]) for record in records] == [2, 3, 6]
    assert all(turn == answer for record in records for turn in record["conversations"] if turn["from"] == "gpt")
    assert not any("reasoning" in json.dumps(body["messages"]) for body in server.bodies)
    assert facts(tmp_path / "endpoint.yaml")["ended_early"] == {"only_reasoning": 1}
    said = capsys.readouterr().out
    assert "6 with reasoning (endpoint.extra={chat_template_kwargs: {enable_thinking: false}} switches it off)" in said
    (read_back, *_) = read_dialogues(tmp_path / "new.jsonl", ReadCounts())
    assert read_back.messages[1]["reasoning_content"] == "Two and two."


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (error(401, "Incorrect API key provided"), "401 .*Incorrect API key provided.*OPENAI_API_KEY was sent"),
        (error(400, "unknown field", "bad_field"), "400 .*unknown field.*bad_field"),
        ((404, b'{"detail":"Not Copy"}', {}), "404 .*Not Copy"),
        ((405, b"", {}), "405 .*no explanation"),
        ((301, b"", {"Location": "https://elsewhere/v1"}), "redirects to https://elsewhere/v1"),
        ((200, b"<html>a login page", {}), "did not send a chat completion: '<html>a login page'"),
    ],
)
def test_refusals_name_the_servers_words_at_once(reply, message, tmp_path, server, monkeypatch):
    """Catches a wrong key, model or address that is found after hours, or told as a bare HTTP status."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.misbehave = lambda body, number: reply
    with pytest.raises((ValueError, OSError), match=message):
        run(write_config(tmp_path, server, endpoint={"retries": 1}))
    assert len(server.bodies) <= 2 and len({len(body["messages"]) for body in server.bodies}) == 1


def test_the_key_is_sent_and_shown_nowhere(tmp_path, server, monkeypatch, capfd, caplog):
    """Catches the key in an error (servers echo it), in a log, in the journal or in the summary."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_KEY", f" {KEY}\n")
    server.misbehave = lambda body, number: error(400, f"refused for {KEY}") if number == 3 else None
    config = write_config(tmp_path, server, endpoint={"api_key_env": "MY_KEY"})
    run(config)
    assert set(server.keys) == {f"Bearer {KEY}"}
    for reply in (
        error(401, f"bad key {KEY}"),
        (200, KEY.encode(), {}),
        error(500, KEY),
        (302, b"", {"Location": KEY}),
    ):
        server.misbehave = lambda body, number, reply=reply: reply
        with pytest.raises((ValueError, OSError), match=r"\[API key\]") as caught:
            run(config, f"out={tmp_path / 'other.jsonl'}", "endpoint.retries=0")
        assert KEY not in str(caught.value)
    texts = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 3 and not any(KEY in text for text in texts)
    printed = capfd.readouterr()
    assert KEY not in printed.out + printed.err + caplog.text
    monkeypatch.setenv("MY_KEY", "sk-\u20ac")
    with refused("MY_KEY holds no valid API key"):
        run(config, f"out={tmp_path / 'third.jsonl'}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"endpoint": {"url": "localhost:8000/v1"}}, "give an address like"),
        ({"endpoint": {"url": "http://user:pass@localhost/v1"}}, "without user, password or query"),
        ({"batch": 4, "drafter": {"drafter": "eagle"}}, "batch, drafter: only for a target"),
    ],
)
def test_bad_configs_are_refused(changes, message, tmp_path, server):
    """Catches a password in an address, which would get into logs, and keys that do nothing."""
    with refused(message) as caught:
        run(write_config(tmp_path, server, **changes))
    assert not server.bodies
    assert "pass@" not in str(caught.value)
