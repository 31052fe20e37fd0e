"""drafters.chat, with what is piped in: what it prints, forgets and survives."""

import io
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import drafters.chat
from drafters.cli.chat import Answer

Talk = Callable[..., str]


@pytest.fixture
def talk(target_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    """``talk(lines, *arguments)``: what a conversation prints, in float32."""

    def hold(lines: str | bytes, *more: str, drafter: str = "speculative") -> str:
        if drafter == "speculative":  # the target is its own draft model: all drafts are accepted
            more = (*more, f"draft_model={target_folder}", "gamma=3")
        piped = io.StringIO(lines) if isinstance(lines, str) else io.TextIOWrapper(io.BytesIO(lines), "utf-8")
        monkeypatch.setattr(sys, "stdin", piped)
        given = ["--target", str(target_folder), "--drafter", drafter, "--dtype", "float32"]
        drafters.chat.main([*given, "--max-new-tokens", "40", *more])
        return capsys.readouterr().out

    return hold


def test_a_conversation_beside_plain_decoding(talk: Talk) -> None:
    """Catches an answer that is not plain decoding's, commands taken for questions, and codes of colours in a pipe."""
    said = talk("What is 2+2?\n\n/rest\nAnd 2+3?\n/reset\nWhat is 2+2?\n/quit\nnever\n", "--compare")
    assert said.count("times as fast, the same tokens]") == 3
    assert "no command /rest: /reset begins" in said
    assert "never" not in said
    assert "\x1b" not in said
    first, second, third = re.findall(r"> (?:What is 2\+2\?|And 2\+3\?)\n(.*?)\n\[\d+ tokens, tau (.*?),", said, re.S)
    assert first[0] == third[0] != second[0]  # /reset forgets
    assert float(first[1]) > 3


def test_the_oldest_turns_are_forgotten_in_a_full_context(talk: Talk) -> None:
    """Catches a conversation that ends in an error once it is long, and a question too long that ends the program."""
    said = talk("Hello! How are you?\n" * 8 + "#7;" * 120 + "\nHello!\n")
    assert "the oldest turn was forgotten" in said
    assert re.search(r"\[[\d,]+ tokens, and beside the answer there is room for 216: ask for less\]", said)
    assert said.count("tokens/s") == 9


def test_bytes_that_are_no_utf8(talk: Talk) -> None:
    """Catches a Latin-1 byte that ends the conversation or changes it, and one that ends the program as an option."""
    said = talk(b"What is 2+2?\nCaf\xe9?\nAnd 2+3?\n")
    assert "> Caf??\n[the line is not UTF-8, it has the byte 0xe9: set the terminal to UTF-8" in said
    answer = r"> And 2\+3\?\n(.*?)\n\["
    assert re.findall(answer, said, re.S) == re.findall(answer, talk("What is 2+2?\nAnd 2+3?\n"), re.S)
    with pytest.raises(ValueError, match="--system is not UTF-8, it has the byte 0xe9"):
        talk("Hello!\n", "--system", "Caf\udce9")


def test_ctrl_c_stops_the_answer_alone(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a program that ends with the answer, and an answer that goes on."""
    write = Answer.write

    def interrupted(answer: Answer, row: int, new: list[int]) -> None:
        if len(answer.ids) > 5 and not pressed:
            pressed.append(True)
            signal.raise_signal(signal.SIGINT)
        write(answer, row, new)

    pressed: list[bool] = []
    monkeypatch.setattr(Answer, "write", interrupted)
    before = signal.getsignal(signal.SIGINT)
    said = talk("What is 2+2?\nAnd 2+3?\n", "--compare")
    stopped, rest = said.split("; stopped]\n")
    assert int(re.findall(r"\[(\d+) tokens", stopped)[0]) < 40
    assert "plain decoding" not in stopped
    assert "times as fast" in rest
    assert signal.getsignal(signal.SIGINT) == before
