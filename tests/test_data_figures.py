"""Every figure that data_prep prints, against one worked by hand or added up from the files."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_regenerate import conversation
from test_split import records, write
from test_store import HIDDEN, header
from test_store_ranks import LENGTHS, work

from data_prep import inspect
from data_prep.answers import questions
from data_prep.answers.journal import AnsweredBatch, Turn, replay
from data_prep.answers.regeneration import describe, summary
from data_prep.common.ranks import Rank
from data_prep.configs import MagpieConfig, RegenerateConfig
from data_prep.dialogues.encoding import EncodedSplit, Sample
from data_prep.dialogues.loss_mask import MaskedTokens
from data_prep.dialogues.reader import ReadCounts
from data_prep.extraction.dump import Tokens
from data_prep.extraction.stores import Work, report_written
from data_prep.split import main as split
from data_prep.store import inspection
from data_prep.store.reader import FeatureStore
from data_prep.store.sizes import size_table
from drafters.common.wording import size_text

TOKENS = sum(LENGTHS)  # 58
ANSWERED = sum(LENGTHS[::2])  # 38: the mask of dialogue i is true for even i


def text(printed: str) -> str:
    """What was printed, with single spaces."""
    return " ".join(printed.split())


def test_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches statistics of the store's beginning only, a share of dialogues in place of tokens, and percentiles of
    shards. A state of dialogue i is i everywhere, so a sample of 3 of 11 has 0, 3 and 7, on 7, 2 and 1 tokens.
    """
    monkeypatch.setenv("COLUMNS", "300")
    assert work(tmp_path / "store", Rank()).complete
    store = FeatureStore.open(tmp_path / "store")
    sums = inspection.state_sums(store, 3)
    assert sums == {"features": [HIDDEN * (3 * 2 + 7 * 1), HIDDEN * 7, HIDDEN * 10, 7.0]}
    assert inspection.state_sums(store, 99)["features"][2] == HIDDEN * TOKENS
    assert inspect.main([str(tmp_path / "store"), "--sample", "3"]) == 0
    printed = capsys.readouterr().out
    size = sum(file.stat().st_size for file in (tmp_path / "store").glob("*.safetensors"))
    for expected in (
        "dialogues 11 ",
        f"tokens {TOKENS}, {ANSWERED / TOKENS:.1%} of them the assistant's",
        "dropped broken_json 1 changed none shards 6",
        f"size {size:,} bytes, {size / TOKENS:,.1f} a token",
        "tokens of a dialogue 0% 5% 25% 50% 75% 95% 100% mean 1 2 3 5 8 10 10 5.3",  # of 1 2 3 3 4 5 6 7 8 9 10
        "states mean |x| max |x| zeros features 1.3 7 70.00%",
    ):
        assert expected in text(printed), expected


def test_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches tokens that padding counts as, a share of padding over the real tokens, and bytes of other states."""
    manifest = work(tmp_path, Rank())
    split = Work("train", tmp_path, manifest, EncodedSplit(ids=["x"] * 12))
    report_written(split, Rank(), manifest, Tokens(real=75, padded=100))
    printed = text(capsys.readouterr().out)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert printed.startswith("train: 25.0% of the tokens on which the target ran were padding train: ")
    assert (
        f"11 dialogues, 58 tokens (66% of them the assistant's), 6 shards, {size_text(size)} of bfloat16 (each "
        f"token {4 + 1 + 2 * HIDDEN} bytes); answers: " in printed
    )
    assert f"dropped: broken_json 1 -> {tmp_path}" in printed
    half = work(tmp_path / "half", Rank(0, 2), most=2)
    report_written(split, Rank(0, 2), half, Tokens())
    printed = text(capsys.readouterr().out)
    assert "padding" not in printed and f"the store has {half.consumed:,} of 12 dialogues." in printed
    states = {"features": "A", "tap_1": "B", "tap_3": "C"}
    table = text(size_table(header(taps=[1, 3], hidden_size=100, states=states), 2_000_000))
    # 5 bytes of id and mask; three states of 100 bfloat16; int8 has 100 bytes and a float32 scale.
    assert "state bytes per token 2,000,000 tokens token id and loss mask 5 10.0 MB" in table
    assert table.count(" 200 400 MB") == 3 and "all, in bfloat16 605 1.21 GB" in table
    assert "int8 saves 576 MB (317 bytes per token are left)" in table


def test_planned_sizes_of_a_file() -> None:
    """Catches answers of the sample taken for those of the file, and means over records in place of dialogues.

    Two of four sampled dialogues are usable, one of them as two records: 10 + 6 + 8 tokens, 4 + 3 + 2 of answers.
    """
    ones = [MaskedTokens(np.zeros(n), np.arange(n) < answers) for n, answers in ((10, 4), (6, 3), (8, 2))]
    encoded = EncodedSplit(["a/0", "a/1", "b"], ones, ReadCounts(2, Counter(no_room=2)), used=2)
    sample = Sample(4, encoded, ReadCounts(40, Counter(broken_json=1234)), None, 0.0)
    assert (sample.usable, sample.tokens, sample.trained) == (20, 20 * 24 // 2, 20 * 9 // 2)
    sample.limit = 6
    assert (sample.usable, sample.tokens, sample.trained) == (6, 6 * 24 // 2, 6 * 9 // 2)
    assert sample.describe() == (
        "40 kept, dropped 1,234 (broken_json 1,234); 2 of a sample of 4 cannot be used (no_room 2)"
    )


def test_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches both sides swapped, and dropped records counted with those that are kept."""
    source, out = write(tmp_path / "all.jsonl", [{"id": "bad"}, *records(20), {"conversations": []}]), tmp_path / "out"
    split([str(source), "--out", str(out), "--heldout", "3"])
    assert capsys.readouterr().out == (
        f"{source}: 20 kept, dropped 2 (no_conversations 1, empty_dialogue 1); 17 to train on, 3 held out -> {out}\n"
    )
    assert [len((out / f"{side}.jsonl").read_text().splitlines()) for side in ("train", "heldout")] == [17, 3]


def test_regenerate() -> None:
    """Catches tau over batches in place of forwards, answers of dropped dialogues, and tokens of kept ones only.

    Four dialogues with two questions each: one whole, one that ends early, two dropped.
    """
    every = [conversation(index, "q", "r") for index in range(4)]
    batches = [
        AnsweredBatch([Turn(0, 0, "a", 1000, reasoning="why"), Turn(1, 0, "b", 200, truncated=True)], 1100, 500, 3.0),
        AnsweredBatch(
            [Turn(0, 1, "c", 30, truncated=True), Turn(1, 1, end="no_room"), Turn(2, 0, "d", 4)], 33, 11, 0.5
        ),
        AnsweredBatch([Turn(2, 1, drop="refused"), Turn(3, 0, end="only_reasoning")], 0, 0, 0.5),
    ]
    replay(every, batches, retry=False)
    config = RegenerateConfig(target="t", source="s", out="o")
    counts = ReadCounts(4, Counter(broken_json=3))
    facts = summary(config.model_copy(update={"target": None}), {}, counts, every, batches)
    assert (facts["tau"], facts["seconds"]) == (round(1133 / 511, 4), 4.0)
    assert facts["read"] == {"kept": 4, "dropped": {"broken_json": 3}, "changed": {}}
    assert describe(facts) == (
        "2 of 4 dialogues, 3 answers, 1,234 tokens, 2 answers cut at the limit, 2 with reasoning (a chat_template "
        "whose prompts end with empty thoughts switches it off), refused 1, only_reasoning 1, ended early: no_room 1, "
        "308 tokens/s, tau 2.22"
    )


def test_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches repeated questions counted with the surplus, and tokens of dropped ones left out."""
    monkeypatch.setattr(questions, "dtype_here", lambda config: "float32")
    turns = [Turn(0, 0, "a", 500), Turn(1, 0, "b", 20), Turn(2, 0, "a", 500), Turn(3, 0, "c", 20)]
    turns.append(Turn(4, 0, tokens=200, drop="no_end"))
    config = MagpieConfig(target="t", out="o", count=2)
    facts = questions.summary(config, {}, [AnsweredBatch(turns, seconds=4.0)], questions=2, different=3)
    assert facts["dropped"] == {"no_end": 1, "asked_before": 1, "more_than_count": 1}
    line = "2 questions, 1,240 tokens, no_end 1, asked_before 1, more_than_count 1, 310 tokens/s"
    assert questions.describe(facts) == line
    few: dict[str, Any] = json.loads(json.dumps(facts)) | {"questions": 1}
    assert questions.describe(few) == re.sub("^2", "1 of 2", line)
