"""The corpus made from the installed standard library: its format, its split, its determinism."""

import json
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from data_prep.stdlib_corpus import build_corpus, main

STDLIB = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def written(small_stdlib, tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus")
    main(["--out", str(out), "--stdlib", str(small_stdlib), "--max-dialogues", "400"])
    return out


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_same_arguments_give_the_same_files(written, small_stdlib, tmp_path):
    """Catches an order or a choice that depends on hash salting or on the file system."""
    main(["--out", str(tmp_path), "--stdlib", str(small_stdlib), "--max-dialogues", "400"])
    for name in ("train.jsonl", "heldout.jsonl", "tune.jsonl", "manifest.json"):
        assert (tmp_path / name).read_bytes() == (written / name).read_bytes()


def test_records_are_sharegpt_and_counted(written):
    """Catches empty turns, a wrong speaker order, over-long answers, lost kinds, and a manifest that is wrong."""
    manifest = json.loads((written / "manifest.json").read_text())
    total = 0
    kinds = Counter()
    for name, entry in manifest["files"].items():
        rows = read(written / name)
        total += len(rows) if name != "tune.jsonl" else 0
        assert entry["dialogues"] == len(rows)
        assert entry["bytes"] == (written / name).stat().st_size
        kinds.update(row["category"] for row in rows)
        for row in rows:
            assert row["id"].endswith(f"#{row['category']}")
            speakers = [turn["from"] for turn in row["conversations"]]
            assert speakers == ["human", "gpt"] * (len(speakers) // 2) and speakers
            assert all(turn["value"].strip() for turn in row["conversations"])
            assert all(len(turn["value"]) <= 1600 + len("```python\n\n```") for turn in row["conversations"])
    assert total == 400
    assert kinds == manifest["kinds"]
    assert set(kinds) == {"doc", "source", "methods", "doc+source", "source+doc"}
    assert not list(written.glob("*.tmp"))


def test_no_object_is_in_two_splits():
    """Catches a held-out method whose code is in a training dialogue about its class, and drafters that are tuned
    on what they are measured on."""
    splits: dict[str, set[str]] = {}
    answers: dict[str, set[str]] = {}
    questions: dict[str, set[str]] = {}
    for split, record in build_corpus(STDLIB, 13_000):
        module = record["source"].removeprefix("python-stdlib/")
        name = record["id"].rsplit("#", 1)[0]
        top = name.removeprefix(module).strip(".").split(".")[0]
        splits.setdefault(f"{module}:{top}", set()).add(split)
        turns = [turn["value"] for turn in record["conversations"]]
        answers.setdefault("\n".join(turns[1::2]), set()).add(split)
        questions.setdefault(turns[0], set()).add(split)
    for places in (splits, answers, questions):
        assert all(len(names) == 1 for names in places.values())
    share = sum("train" not in names for names in splits.values()) / len(splits)
    assert 0.02 < share < 0.06
    assert sum(names == {"tune"} for names in questions.values()) >= 24
