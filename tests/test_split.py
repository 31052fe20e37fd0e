"""python -m data_prep.split: nothing lost, nothing on both sides, no other file overwritten."""

import json
from pathlib import Path
from typing import Any

from programs import refused

from data_prep.dialogues.reader import Dialogue, ReadCounts, read_dialogues, unanswered_record
from data_prep.split import main, split


def one(index: int, question: str | None = None) -> Dialogue:
    """A dialogue of one turn; its question is its own unless given."""
    question = question or f"question {index}?"
    return Dialogue(
        f"d{index}", ({"role": "user", "content": question}, {"role": "assistant", "content": f"answer {index}"})
    )


def records(count: int) -> list[dict[str, Any]]:
    """One to three turns; some with a system message, some with a category."""
    made = []
    for index in range(count):
        system = [{"from": "system", "value": "Be brief.\n"}] if index % 3 == 0 else []
        turns = [
            {"from": role, "value": f" {role} {index}.{turn} \u20ac "}
            for turn in range(1 + index % 3)
            for role in ("human", "gpt")
        ]
        category = {"category": f"kind {index % 2}"} if index % 4 else {}
        made.append({"id": f"d{index}", **category, "conversations": [*system, *turns]})
    return made


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(source: Path, out: Path, heldout: int = 3, *more: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    main([str(source), "--out", str(out), "--heldout", str(heldout), *more])
    return read(out / "train.jsonl"), read(out / "heldout.jsonl")


def test_every_usable_record_is_on_one_side_as_it_was(tmp_path):
    """Catches lost dialogues, a changed order or text, and lost turns, system messages, categories or ids."""
    rows = records(20)
    source = write(tmp_path / "all.jsonl", [{"id": "bad"}, *rows, {"conversations": []}])
    train, heldout = run(source, tmp_path / "out")
    assert len(heldout) == 3
    both = {row["id"]: row for row in [*train, *heldout]}
    assert len(both) == len(train) + len(heldout) and [both[row["id"]] for row in rows] == rows
    order = [row["id"] for row in rows]
    for part in (train, heldout):
        assert sorted(part, key=lambda row: order.index(row["id"])) == part
    facts = json.loads((tmp_path / "out" / "split.json").read_text())
    assert facts["dropped"] == {"no_conversations": 1, "empty_dialogue": 1}
    assert (facts["train"], facts["heldout"], facts["seed"]) == (17, 3, 0)
    counts = ReadCounts()
    assert len(list(read_dialogues(tmp_path / "out" / "heldout.jsonl", counts))) == 3 and not counts.dropped


def test_questions_without_answers_are_kept_where_that_is_asked_for(tmp_path):
    """Catches questions that a split drops before anybody could answer them; and one split taken for the other."""
    source = tmp_path / "asked.jsonl"
    source.write_text("".join(json.dumps(unanswered_record(f"q{n}", f"Why {n}?")) + "\n" for n in range(9)))
    out = tmp_path / "out"
    with refused("no_assistant_turn 9"):
        main([str(source), "--out", str(out), "--heldout", "2"])
    main([str(source), "--out", str(out), "--heldout", "2", "--unanswered"])
    lines = [(out / f"{side}.jsonl").read_text().splitlines() for side in ("train", "heldout")]
    assert [len(side) for side in lines] == [7, 2]
    assert {line for side in lines for line in side} == set(source.read_text().splitlines())
    with refused("holds another split: unanswered was (T|t)rue, is (F|f)alse"):
        main([str(source), "--out", str(out), "--heldout", "2"])


def test_the_same_question_is_never_on_both_sides():
    """Catches a drafter tested on questions that it was trained on, written with other spaces or capitals."""
    asked = [f"What is {number}?" for number in range(8)]
    variants = [asked, [f"  {question.upper()}\n" for question in asked], [q.replace(" ", "  ") for q in asked]]
    dialogues = [one(index, question) for index, question in enumerate(q for variant in variants for q in variant)]
    for seed in range(10):
        train, heldout = split(dialogues, 4, seed)
        sides = [{" ".join(d.messages[0]["content"].lower().split()) for d in part} for part in (train, heldout)]
        assert not sides[0] & sides[1]
        assert len(heldout) == 6 and len(train) == 18  # whole groups of three


def test_the_seed_decides_and_nothing_else():
    """Catches a choice that depends on hash salting or on Python"s version, or that ignores the seed."""
    dialogues = [one(index) for index in range(30)]
    chosen = [[d.id for d in split(dialogues, 4, seed)[1]] for seed in (0, 1, 2)]
    assert chosen[0] == ["d3", "d10", "d17", "d18"]
    assert chosen[0] != chosen[1] != chosen[2] != chosen[0]


def test_other_data_is_not_overwritten(tmp_path):
    """Catches the source replaced by a part of itself, a corpus replaced, and two splits mixed in one folder."""
    (tmp_path / "corpus").mkdir()
    source = write(tmp_path / "corpus" / "train.jsonl", records(10))
    other, out = write(tmp_path / "other.jsonl", records(12)), tmp_path / "out"
    before, first = source.read_bytes(), run(source, out)
    assert run(source, out) == first
    for data, folder, heldout, more, message in (
        (source, source.parent, 3, [], "would overwrite the source"),
        (other, source.parent, 3, [], "has a train.jsonl that no split has made"),
        (source, out, 3, ["--seed", "1"], "another split: seed was 0, is 1; give another folder"),
        (other, out, 3, [], "another split: source_digest was"),
        (source, out, 4, [], "another split: wanted was 3, is 4"),
    ):
        with refused(message):
            run(data, folder, heldout, *more)
    assert source.read_bytes() == before
    assert (read(out / "train.jsonl"), read(out / "heldout.jsonl")) == first
    (out / "split.json").write_text("{")
    with refused(r"split.json was not written by this program"):
        run(source, out)
