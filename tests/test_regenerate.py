"""python -m data_prep.regenerate: the target's own answers, with any drafter, batch size, kill or number of ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chat_formats import CHAT_VOCAB, CHATML, CHATML_SPECIALS, QWEN3, byte_level, chatml
from programs import refused

from data_prep import regenerate
from data_prep.answers import finished
from data_prep.answers.journal import AnsweredBatch, AnswerJournal, Conversation, Turn, read_journals, replay
from data_prep.answers.target import TargetAnswers, text_ends, turn_ends
from data_prep.common.ranks import Rank
from data_prep.configs import Writing
from data_prep.dialogues.loss_mask import ChatTokenizer
from data_prep.dialogues.reader import Dialogue
from drafters import TargetModel, make_drafter
from drafters.heads.eagle.module import EagleHead
from drafters.methods.eagle import EagleDrafter, EagleOptions

NEW = 10


@pytest.fixture(scope="module")
def draft_folder(tiny_checkpoint, target_folder):
    return tiny_checkpoint("llama", seed=1, vocab_size=CHAT_VOCAB)


@pytest.fixture(scope="module")
def eagle_folder(target_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("eagle")
    target = TargetModel.from_pretrained(str(target_folder), "float32", "cpu")
    torch.manual_seed(0)
    EagleDrafter(target, EagleHead(target.config), EagleOptions()).save_pretrained(folder)
    return folder


def dialogue(index: int) -> dict[str, Any]:
    """One to three turns; some have a system message, some a category."""
    system = [("system", f"Be brief {index}.")] if index % 3 == 0 else []
    pairs = [("human", f"What is {index}+{turn}?" + " Tell" * (index % 4)) for turn in range(1 + index % 3)]
    turns = [turn for question in pairs for turn in (question, ("gpt", "the old answer"))]
    return {
        "id": f"d{index}",
        **({"category": "sums"} if index % 2 else {}),
        "conversations": [{"from": role, "value": text} for role, text in [*system, *turns]],
    }


def write_config(folder: Path, target_folder: Path, count: int = 7, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "source.jsonl").write_text("".join(json.dumps(dialogue(index)) + "\n" for index in range(count)))
    settings: dict[str, Any] = {
        "source": str(folder / "source.jsonl"),
        "out": str(folder / "new.jsonl"),
        "target": str(target_folder),
        "dtype": "float32",
        "device": "cpu",
        "batch": 3,
        "max_new_tokens": NEW,
    }
    file = folder / "regenerate.yaml"
    file.write_text(yaml.safe_dump({**settings, **changes}))
    return file


def run(config: Path, *arguments: str) -> list[dict[str, Any]]:
    """The records written so far: [] while the output is not whole."""
    regenerate.main(["--config", str(config), *arguments])
    out = config.parent / "new.jsonl"
    return [json.loads(line) for line in out.read_text().splitlines()] if out.is_file() else []


def facts(config: Path) -> dict[str, Any]:
    return json.loads((config.parent / "new.jsonl.json").read_text())


def plain_answer(target: TargetModel, chat: ChatTokenizer, messages: list[dict[str, str]]) -> tuple[str, bool]:
    """Greedy, one forward a token with transformers' own model; and whether the end of turn was not reached."""
    text = chat.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = chat.tokenizer(text, add_special_tokens=False)["input_ids"]
    new: list[int] = []
    while len(new) < NEW and not (new and new[-1] in (1, chat.tokenizer.eos_token_id)):
        new.append(int(target.model(torch.tensor([ids + new])).logits[0, -1].argmax()))
    ended = new[-1] in (1, chat.tokenizer.eos_token_id)
    answer = chat.tokenizer.decode(new[:-1] if ended else new)
    return (answer if ended else answer.rstrip("\ufffd")), not ended


@pytest.fixture(scope="module")
def expected(target_folder):
    """The output as plain decoding makes it turn by turn, and how many answers were cut."""
    target = TargetModel.from_pretrained(str(target_folder), "float32", "cpu", engine="stock")
    chat = ChatTokenizer(chatml())
    records, truncated = [], 0
    for index in range(7):
        record, messages, cut = dialogue(index), [], 0
        for turn in record["conversations"]:
            if turn["from"] == "gpt":
                turn["value"], short = plain_answer(target, chat, messages)
                cut += short
            role = {"human": "user", "gpt": "assistant", "system": "system"}[turn["from"]]
            messages.append({"role": role, "content": turn["value"]})
        texts = [turn["value"] for turn in record["conversations"] if turn["from"] == "gpt"]
        if all(text.strip() and not any(token in text for token in chat.special_tokens) for text in texts):
            records.append(record)
            truncated += cut
    assert len(records) >= 4 and len({turn["value"] for turn in records[-1]["conversations"]}) > 2
    return records, truncated


@pytest.mark.parametrize("method", ["none", "prompt_lookup", "speculative", "eagle"])
def test_answers_are_the_targets_own_with_any_drafter(
    method, tmp_path, target_folder, draft_folder, eagle_folder, expected
):
    """Catches old answers in the history, padding or a drafter that changes an answer, records in the wrong order."""
    drafter = {
        "none": None,
        "prompt_lookup": {"drafter": "prompt_lookup"},
        "speculative": {"drafter": "speculative", "draft_model": str(draft_folder), "gamma": 2},
        "eagle": {"drafter": "eagle", "checkpoint": str(eagle_folder), "tree": "chain"},
    }[method]
    config = write_config(tmp_path, target_folder, drafter=drafter)
    assert run(config) == expected[0]
    written = facts(config)
    assert written["kept"] == len(expected[0]) and written["truncated"] == expected[1]
    assert written["kept"] + sum(written["dropped"].values()) == written["read"]["kept"] == 7
    assert (written["tau"] >= 1.0) and (method != "none" or written["tau"] == 1.0)
    assert written["commit"] and written["versions"]["torch"] and written["tokens"] > 0
    assert not (tmp_path / "new.jsonl.unfinished").exists()


def test_batches_do_not_change_greedy_answers_and_one_row_drafters_work(
    tmp_path, target_folder, draft_folder, expected
):
    """Catches rows of a batch that see each other, and more rows than a drafter decodes given to it."""
    assert run(write_config(tmp_path / "one", target_folder, batch=1)) == expected[0]
    ouroboros = {"drafter": "ouroboros", "draft_model": str(draft_folder)}
    assert run(write_config(tmp_path / "many", target_folder, batch=5, drafter=ouroboros)) == expected[0]


class Killed(BaseException):
    """A simulated kill, which nothing may catch."""


def run_killed(monkeypatch: pytest.MonkeyPatch, batches: int, config: Path, *arguments: str) -> None:
    """A run that dies right after it has written this number of batches."""
    left = [batches]
    write = AnswerJournal.write

    def counted(self: AnswerJournal, batch: AnsweredBatch) -> None:
        write(self, batch)
        left[0] -= 1
        if not left[0]:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(AnswerJournal, "write", counted)
        run(config, *arguments)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_killed_run_goes_on_and_writes_what_it_would_have_written(temperature, tmp_path, target_folder, monkeypatch):
    """Catches a turn done twice or left out, and seeds that depend on where a run began."""
    whole = run(write_config(tmp_path / "whole", target_folder, temperature=temperature))
    written: list[Turn] = []
    write = AnswerJournal.write
    with monkeypatch.context() as patch:
        patch.setattr(AnswerJournal, "write", lambda self, batch: written.extend(batch.turns) or write(self, batch))
        run(write_config(tmp_path / "counted", target_folder, temperature=temperature))
    config, kills = write_config(tmp_path / "killed", target_folder, temperature=temperature), 0
    journals = tmp_path / "killed" / "new.jsonl.unfinished"
    while sum(len(batch.turns) for batch in read_journals(journals)) < len(written):
        run_killed(monkeypatch, 1, config)
        assert not (tmp_path / "killed" / "new.jsonl").exists()
        kills += 1
    turns = [(turn.index, turn.turn) for batch in read_journals(journals) for turn in batch.turns]
    assert kills > 3 and sorted(turns) == sorted((turn.index, turn.turn) for turn in written)
    assert run(config) == whole
    assert facts(config)["tokens"] == facts(tmp_path / "whole" / "regenerate.yaml")["tokens"]


def test_damaged_lines_are_done_again(tmp_path, target_folder, expected, monkeypatch):
    """Catches a damaged or torn line of a journal that ends the run, loses dialogues, or joins with the next line."""
    config = write_config(tmp_path, target_folder)
    run_killed(monkeypatch, 4, config)
    journal = tmp_path / "new.jsonl.unfinished" / "rank-0-of-1.jsonl"
    lines = journal.read_bytes().splitlines()
    torn = b'{"turns": [{"index": 1'
    journal.write_bytes(b"\n".join([lines[0], b"\0" * 50, b'{"turns": 3}', b"[1]", lines[3], torn]))
    assert run(config) == expected[0]


def test_finished_runs_are_not_repeated_and_others_are_refused(tmp_path, target_folder, monkeypatch, capsys):
    """Catches answers of two settings in one file, an hour spent again because a batch size changed, and a
    replaced file that is taken for the target's own answers."""
    config = write_config(tmp_path, target_folder, count=3)
    run_killed(monkeypatch, 1, config)
    with refused(r"unfinished was made with other settings: temperature was 0.0, is 0.5"):
        run(config, "temperature=0.5")
    run(config, "batch=2", "drafter={drafter: prompt_lookup}")
    monkeypatch.setattr(TargetModel, "from_pretrained", lambda *a, **k: pytest.fail("the target was loaded again"))
    run(config, "batch=1")
    assert "finished already: 3 of 3 dialogues" in capsys.readouterr().out
    with refused(r"new.jsonl was made with other settings: seed was 0, is 1; undo that"):
        run(config, "seed=1")
    answers = (tmp_path / "new.jsonl").read_text()
    (tmp_path / "new.jsonl").write_text(answers.replace("Tell", "Ask"))
    with refused(r"new.jsonl was changed or replaced .*delete both"):
        run(config)
    (tmp_path / "new.jsonl").write_text(answers)
    (tmp_path / "source.jsonl").write_text(json.dumps(dialogue(9)))
    with refused("source_digest was"):
        run(config)


def test_processes_share_the_work_and_the_last_one_merges(tmp_path, target_folder, expected, monkeypatch):
    """Catches shares that overlap or leave dialogues out, a merge before all are done, and a second merge."""
    config = write_config(tmp_path, target_folder)
    assert run(config, "--rank", "2", "--ranks", "3") == []
    assert run(config, "--rank", "0", "--ranks", "3") == []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert run(config) == expected[0]
    before = (tmp_path / "new.jsonl").stat().st_mtime_ns
    assert run(config, "--rank", "0", "--ranks", "3") == expected[0]
    assert (tmp_path / "new.jsonl").stat().st_mtime_ns == before


def test_another_number_of_processes_goes_on_with_the_same_run(tmp_path, target_folder, expected, monkeypatch):
    """Catches work that is lost or mixed up when a run of two processes is finished by one."""
    config = write_config(tmp_path, target_folder)
    run_killed(monkeypatch, 2, config, "--rank", "1", "--ranks", "2")
    identity = json.loads((tmp_path / "new.jsonl.unfinished" / "run.json").read_text())
    with AnswerJournal(tmp_path / "new.jsonl.unfinished", identity, Rank(1, 2)):
        with refused("so by 2 processes, and this is one of 1"):
            run(config)
        with refused("written by process .*rank 1 of 2; .*own --rank"):
            run(config, "--rank", "1", "--ranks", "2")
    assert run(config) == expected[0]


def test_a_kill_during_the_merge_leaves_it_to_the_next_start(tmp_path, target_folder, expected, monkeypatch):
    """Catches an output without its summary taken for a stranger's file, and journals deleted too early."""
    config = write_config(tmp_path, target_folder)
    replace_text = finished.replace_text

    def dies(path, text):
        if path.suffix == ".json":
            raise Killed
        replace_text(path, text)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(finished, "replace_text", dies)
        run(config)
    monkeypatch.setattr(TargetModel, "from_pretrained", lambda *a, **k: pytest.fail("answered again"))
    assert run(config) == expected[0]
    assert facts(config)["kept"] == len(expected[0])


def test_a_limit_of_time_leaves_out_the_rest_and_counts_what_a_killed_run_spent(
    tmp_path, target_folder, expected, monkeypatch, capsys
):
    """A run told to take minutes that takes hours; or one that loses its answers, or starts its clock again."""
    config = write_config(tmp_path, target_folder, minutes=60, temperature=1.0)
    run_killed(monkeypatch, 2, config)
    journal = next((tmp_path / "new.jsonl.unfinished").glob("rank-*.jsonl"))
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    journal.write_text("".join(json.dumps({**line, "seconds": 3590 / len(lines)}) + "\n" for line in lines))
    moments = iter(range(0, 10**6, 20))
    monkeypatch.setattr("data_prep.answers.journal.time.perf_counter", lambda: float(next(moments)))
    kept = run(config)
    found = facts(config)
    assert 0 < len(kept) < 7 and found["dropped"]["out_of_time"] == 7 - len(kept)
    assert found["answers"] - 3 <= sum(len(line["turns"]) for line in lines) and found["seconds"] > 3600
    assert "out_of_time" in capsys.readouterr().out


@pytest.fixture(scope="module")
def answers(target_folder):
    target = TargetModel.from_pretrained(str(target_folder), "float32", "cpu")
    chat = ChatTokenizer(chatml())

    def make(**changes):
        writing = Writing(**{"max_new_tokens": NEW, "max_context": 256, **changes})
        return TargetAnswers(target, make_drafter("autoregressive", target), chat, writing, 4)

    return make


def conversation(index: int, *questions: str) -> Conversation:
    messages = [m for q in questions for m in ({"role": "user", "content": q}, {"role": "assistant", "content": "x"})]
    return Conversation(index, Dialogue(str(index), tuple(messages)))


def test_what_becomes_of_an_answer(answers):
    """Catches the end-of-turn token in the text, blank answers kept, special tokens kept, and cut ones not counted."""
    ours, dropping = answers(), answers(truncated="drop")
    ids = ours.chat.tokenizer("Hello!", add_special_tokens=False)["input_ids"]
    end, start = (ours.chat.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|im_start|>"))
    count = len(ids)
    assert ours.turn(4, 1, [*ids, end], "") == Turn(4, 1, "Hello!", count + 1)
    assert ours.turn(4, 1, [*ids, 1], "Hel").answer == "lo!"  # the generation config's EOS; and a lead
    assert ours.turn(4, 1, ids, "") == Turn(4, 1, "Hello!", count, truncated=True)
    assert dropping.turn(4, 1, ids, "") == Turn(4, 1, end="truncated")
    assert ours.turn(4, 1, [end], "").drop == "empty_answer"
    spaces = ours.chat.tokenizer(" \n ", add_special_tokens=False)["input_ids"]
    assert ours.turn(4, 1, [*spaces, end], "").drop == "empty_answer"
    assert ours.turn(4, 1, [*ids, start, end], "").drop == "special_token_in_text"
    thought = ours.chat.tokenizer("<think>\nIt is", add_special_tokens=False)["input_ids"]
    assert ours.turn(4, 1, thought, "") == Turn(4, 1, end="only_reasoning")
    euro = ours.chat.tokenizer("no €", add_special_tokens=False)["input_ids"]
    assert ours.turn(4, 1, euro[:-1], "").answer == "no "  # half a character is no text


THINKING = {  # templates whose prompts open the reasoning
    "qwen3-thinking": QWEN3.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"),
    "r1": CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"),
}


@pytest.mark.parametrize("template", THINKING.values(), ids=THINKING)
def test_reasoning_that_the_prompt_opens_is_no_answer(template, answers, monkeypatch):
    """Catches cut reasoning stored as the answer where the prompt ends with <think>, so that no answer begins so."""
    ours, one = answers(), conversation(0, "What is 1?")
    monkeypatch.setattr(ours, "chat", ChatTokenizer(byte_level(template, CHATML_SPECIALS, None, "<|im_end|>")))
    prompt, lead = ours.chat.prompt(one.history())
    for text in ("Okay, so I", "Okay.\n</think>\n\nIt", "\n</think>\n\nIt"):
        ids = ours.chat.tokenizer(text, add_special_tokens=False)["input_ids"]
        found = ours.turn(0, 0, ids, lead, prompt)
        is_answer = "</think>" in text
        assert found.answer == (text.removeprefix(lead) if is_answer else None)
        assert found.end == (None if is_answer else "only_reasoning")
    for made in (ours.answer([one]), next(ours.batches([one]))):  # sampled and greedy answers
        assert [turn.end for turn in made.turns] == ["only_reasoning"]


def test_an_answer_ends_where_the_template_says(answers):
    """Catches answers that run to the limit and are dropped: the target's EOS is not its template's end of turn."""
    ours = answers()
    ours.chat.tokenizer.eos_token = "<|endoftext|>"
    end = ours.chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert text_ends(ours.target, ours.chat) == {0, 1} and turn_ends(ours.target, ours.chat) == {0, 1, end}


def test_dialogues_with_tools_are_not_answered():
    """Catches new answers to a dialogue whose calls are not run, with the results of the old calls left out."""
    definitions = {"role": "user", "content": "Rain?", "tools": [{"name": "weather"}]}
    one = Conversation(0, Dialogue("x", (definitions, {"role": "assistant", "content": "No."})))
    assert one.done and one.dropped == "tools" and one.result() is None


def test_a_dialogue_ends_where_there_is_no_room(answers):
    """Catches one long prompt that ends the whole run, and dialogues without a turn that are kept."""
    ours = answers(max_context=60)
    long = "why? " * 20
    rows = [
        conversation(0, "Hi", long),
        conversation(1, long),
        conversation(2, "Hi", "Ho"),
        conversation(3, "<|im_end|>"),
    ]
    ours.eos = frozenset()  # random answers end anywhere
    for batch in ours.batches(rows):
        for turn in batch.turns:
            rows[turn.index].take(turn)
    assert rows[3].dropped == "special_token_in_text"
    assert (rows[1].dropped, rows[1].ended, rows[1].result()) == ("no_room", None, None)
    if rows[0].dropped is None:
        assert rows[0].ended == "no_room"
        result = rows[0].result()
        assert result is not None and [m["role"] for m in result.messages] == ["user", "assistant"]


def test_a_conversation_takes_each_turn_once():
    """Catches an answer counted twice when two journals hold it, turns taken out of order, and a refusal that stays."""
    one = conversation(0, "a", "b", "c")
    one.take(Turn(0, 1, "too early"))
    one.take(Turn(0, 0, "A"))
    one.take(Turn(0, 0, "again"))
    assert [m["content"] for m in one.history()] == ["a", "A", "b"]
    one.take(Turn(0, 1, end="no_room"))
    result = one.result()
    assert one.ended == "no_room" and result is not None and [m["content"] for m in result.messages] == ["a", "A"]
    one.take(Turn(0, 1, "too late"))
    assert one.answers == ["A"]
    journals = [AnsweredBatch([Turn(0, 1, "B"), Turn(1, 0, drop="refused"), Turn(5, 0, "of a longer source")])]
    journals += [AnsweredBatch([Turn(0, 0, "A"), Turn(1, 0, "Z")])]
    both = [conversation(0, "a", "b"), conversation(1, "z")]
    replay(both, journals, retry=False)
    assert [c.answers for c in both] == [["A", "B"], ["Z"]]
    again = [conversation(0, "a", "b"), conversation(1, "z")]
    replay(again, journals[:1], retry=True)
    assert not again[1].done


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "give either target .* or endpoint"),
        ({"drafter": {"drafter": "mjsd", "draft_model": "x"}}, "'mjsd' is lossy"),
        ({"drafter": {"drafter": "eagle", "checkpoint": "."}}, "config.json"),
        ({"drafter": {"drafter": "prompt_lookup", "gama": 3}}, "gama"),
        ({"max_new_tokens": 256}, "max_new_tokens is 256, but .* was made for 256 tokens"),
        ({"max_context": 512}, "max_context is 512, but .* was made for 256 tokens"),
        ({"max_context": 8}, "leaves no room for a prompt"),
        ({"device": "cuda"}, "no GPU is visible"),
    ],
)
def test_bad_configs_are_refused(changes, message, tmp_path, target_folder, monkeypatch):
    """Catches mistakes that end in a stack trace, or only after the work was done."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with refused(message):
        run(write_config(tmp_path, target_folder, **changes))
    assert not (tmp_path / "new.jsonl").exists()


def test_files_in_the_way_are_refused(tmp_path, target_folder):
    """Catches another program's file, or the source itself, overwritten."""
    config = write_config(tmp_path, target_folder)
    (tmp_path / "new.jsonl").write_text("mine")
    with refused("was not written by this program"):
        run(config)
    assert (tmp_path / "new.jsonl").read_text() == "mine"
    with refused("is the source"):
        run(config, f"out={tmp_path / 'source.jsonl'}")
