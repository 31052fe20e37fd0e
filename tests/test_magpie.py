"""python -m data_prep.magpie: questions that the target writes, with kills and several processes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chat_formats import (
    CHAT_VOCAB,
    CHATML_SPECIALS,
    LLAMA2,
    LLAMA3,
    LLAMA3_SPECIALS,
    MISTRAL,
    QWEN3,
    VICUNA,
    byte_level,
    chatml,
    sentencepiece_like,
)
from chat_formats import SENTENCEPIECE_SPECIALS as SPECIALS
from programs import refused

from data_prep import magpie, regenerate
from data_prep.answers import questions as work
from data_prep.answers.finished import resume_notice
from data_prep.answers.journal import AnswerJournal, Turn, read_journals
from data_prep.answers.questions import Asked
from data_prep.common.ranks import Rank
from data_prep.configs import MagpieConfig
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import ReadCounts, read_dialogues, same_question
from drafters import TargetModel, make_drafter
from drafters.config import load_config

EOS = 2  # of the ChatML tokenizer


def write_config(folder: Path, target_folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "target": str(target_folder),
        "out": str(folder / "asked.jsonl"),
        "dtype": "float32",
        "device": "cpu",
        "batch": 4,
        "count": 9,
        "max_new_tokens": 200,
        "temperature": 1.0,
        "top_k": 0,
    }
    file = folder / "magpie.yaml"
    file.write_text(yaml.safe_dump({**settings, **changes}))
    return file


def run(config: Path, *arguments: str) -> list[str]:
    """The questions: [] while the output is not whole."""
    magpie.main(["--config", str(config), *arguments])
    out = config.parent / "asked.jsonl"
    records = [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []
    assert all([turn["from"] for turn in record["conversations"]] == ["human"] for record in records)
    return [record["conversations"][0]["value"] for record in records]


def facts(config: Path) -> dict[str, Any]:
    return json.loads((config.parent / "asked.jsonl.json").read_text())


@pytest.fixture
def chat():
    return ChatTokenizer(chatml())


FORMATS: dict[str, tuple[Callable[[], Any], str]] = {
    "chatml": (chatml, "<|im_end|>"),
    "qwen3": (lambda: byte_level(QWEN3, CHATML_SPECIALS, None, "<|im_end|>"), "<|im_end|>"),
    "llama3": (lambda: byte_level(LLAMA3, LLAMA3_SPECIALS, "<|begin_of_text|>", "<|eot_id|>"), "<|eot_id|>"),
    "llama2": (lambda: sentencepiece_like(LLAMA2, SPECIALS, "<s>", "</s>"), "[/INST]"),
    "mistral": (lambda: sentencepiece_like(MISTRAL, SPECIALS, "<s>", "</s>"), "[/INST]"),
    "vicuna": (lambda: sentencepiece_like(VICUNA, SPECIALS, "<s>", "</s>"), "ASSISTANT:"),
}


@pytest.mark.parametrize("form", FORMATS)
def test_the_prompt_ends_where_the_question_begins(form):
    """And what is asked, in a template of any shape, is found again in front of the mark."""
    make, mark = FORMATS[form]
    chat = ChatTokenizer(make())
    ids, found = chat.question_prompt()
    assert found == mark
    question = "What is 2+2?"
    whole = chat.prompt([{"role": "user", "content": question}])[0]
    assert whole[: len(ids)] == ids and len(whole) > len(ids)
    # A target that goes on as its template does has asked that question.
    turn = Asked(chat, found, Rank(), 1, [])
    turn.ends = frozenset({chat.tokenizer.eos_token_id})
    assert turn.take(whole[len(ids) :]).answer == question


@pytest.mark.parametrize(
    ("condition", "reason"),
    [(" if message.role == 'assistant'", "prints no user turn"), ("", "prints nothing before a question")],
)
def test_a_template_that_cannot_begin_a_question_is_refused(condition, reason, target_folder, tmp_path):
    """Catches questions drawn after an empty prompt."""
    file = tmp_path / "other.jinja"
    file.write_text("{% for message in messages" + condition + " %}{{ message.content }}\n{% endfor %}")
    with refused(f"cannot write questions: .* {reason}"):
        run(write_config(tmp_path / "run", target_folder, chat_template=str(file)))


def test_what_is_dropped_and_why(chat):
    asked = Asked(chat, "<|im_end|>", Rank(), 9, [Turn(0, 0, "What is  two?", 3)])
    asked.ends = frozenset({EOS})
    encode = chat.tokenizer.encode
    one = asked.take([*encode(" What is four?\n"), EOS])
    assert (one.index, one.answer, one.drop) == (1, "What is four?", None)
    assert asked.take([*encode("what IS\ttwo?"), EOS]).drop == "asked_before"
    assert asked.take([*encode("What is four?"), EOS]).drop == "asked_before"
    assert asked.take([*encode(" \n"), EOS]).drop == "empty_question"
    assert asked.take(encode("And then, and then")).drop == "unended_question"
    assert asked.take([*encode("A <|im_start|>user turn"), EOS]).drop == "special_token_in_text"
    assert (len(asked.seen), asked.drawn, asked.done) == (2, 7, False)


def test_as_many_as_were_wanted_and_each_once(target_folder, tmp_path):
    config = write_config(tmp_path, target_folder)
    questions = run(config)
    assert len(questions) == 9 == len({same_question(text) for text in questions})
    assert all(text.strip() == text and text for text in questions)
    written = facts(config)
    assert written["questions"] == 9 and written["tokens"] > 0 and set(written["dropped"]) <= {
        "unended_question", "empty_question", "special_token_in_text", "asked_before",
    }  # fmt: skip
    assert not (tmp_path / "asked.jsonl.unfinished").exists()
    assert run(config) == questions  # and nothing is asked again
    other = write_config(tmp_path / "other", target_folder)
    assert run(other) == questions  # the same seed
    with refused("temperature"):
        run(config, "temperature=0.5")


def test_questions_follow_the_targets_own_distribution(target_folder, tmp_path):
    """The first tokens, of many questions of one token: a prompt cut at the wrong place would have other ones."""
    config = load_config(MagpieConfig, write_config(tmp_path, target_folder, max_new_tokens=2, batch=32), [])
    chat = ChatTokenizer(chatml())
    target = TargetModel.from_pretrained(str(target_folder), "float32", "cpu")
    prompt = chat.tokenizer("<|im_start|>user\n", add_special_tokens=False)["input_ids"]
    assert chat.question_prompt()[0] == prompt
    asked = Asked(chat, "<|im_end|>", Rank(), 1, [])
    drawn = work.draw(config, target, make_drafter("autoregressive", target), prompt, asked)
    count = 4000
    first = torch.bincount(torch.tensor([next(drawn)[0] for _ in range(count)]), minlength=CHAT_VOCAB) / count
    p = target.model(torch.tensor([prompt])).logits[0, -1].detach().float().softmax(-1)
    # 1.5 times the expected total variation of this number of draws from p.
    noise = 0.5 * (2 * p * (1 - p) / (torch.pi * count)).sqrt().sum()
    assert 0.5 * (first - p).abs().sum() < 1.5 * noise


class StoppedError(Exception):
    pass


def test_a_killed_run_goes_on_with_other_draws(target_folder, tmp_path, monkeypatch):
    """Nothing that was written down is lost, and the same draws do not come twice."""
    config = write_config(tmp_path, target_folder, count=24)
    write, calls = AnswerJournal.write, []

    def stop(journal, batch):
        if len(calls) == 2:
            raise StoppedError
        calls.append(batch)
        write(journal, batch)

    monkeypatch.setattr(AnswerJournal, "write", stop)
    with pytest.raises(StoppedError):
        run(config)
    monkeypatch.setattr(AnswerJournal, "write", write)
    before = [turn.answer for turn in calls[0].turns + calls[1].turns if turn.answer is not None]
    assert before and resume_notice(load_config(MagpieConfig, config, []).out, "question").startswith(
        f"{len(before)} quest"
    )
    questions = run(config)
    assert questions[: len(before)] == before and len(questions) == 24
    assert len(set(questions[len(before) :])) == 24 - len(before)
    assert facts(config)["dropped"].get("asked_before", 0) < len(before)


def test_processes_share_the_questions(target_folder, tmp_path):
    """Catches the same draws made again, and questions beyond the count, also with another number of processes."""
    config = write_config(tmp_path, target_folder, count=7)
    assert run(config, "--rank", "1", "--ranks", "2") == []
    shares = read_journals(tmp_path / "asked.jsonl.unfinished")
    own = [turn.answer for batch in shares for turn in batch.turns if turn.answer is not None]
    assert len(own) == 3  # of seven
    shutil.copytree(tmp_path, tmp_path.with_name("alone"))
    questions = run(config, "--rank", "0", "--ranks", "2")
    assert len(questions) == 7 and questions[4:] == own and not set(own) & set(questions[:4])
    alone = run(write_config(tmp_path.with_name("alone"), target_folder, count=7))
    assert len(alone) == 7 and len(set(alone) - set(own)) == 4


def test_regenerate_answers_them(target_folder, tmp_path):
    config = write_config(tmp_path, target_folder)
    questions = run(config)
    with refused("no_assistant_turn 9"):  # what others make of them
        list(read_dialogues(tmp_path / "asked.jsonl", ReadCounts()))
    settings = {"source": str(tmp_path / "asked.jsonl"), "out": str(tmp_path / "answers.jsonl"), "batch": 4}
    file = tmp_path / "regenerate.yaml"
    model = {"target": str(target_folder), "dtype": "float32", "device": "cpu", "max_new_tokens": 12}
    file.write_text(yaml.safe_dump({**settings, **model}))
    regenerate.main(["--config", str(file)])
    answered = list(read_dialogues(tmp_path / "answers.jsonl", ReadCounts()))
    assert answered and all([turn["role"] for turn in one.messages] == ["user", "assistant"] for one in answered)
    assert {one.messages[0]["content"] for one in answered} <= set(questions)
    assert json.loads((tmp_path / "answers.jsonl.json").read_text())["read"]["kept"] == 9
