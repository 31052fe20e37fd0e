"""Every figure that data_prep prints, against one worked by hand or added up from the files."""

from collections import Counter

import numpy as np
from test_regenerate import conversation

from data_prep.answers.journal import AnsweredBatch, Turn, replay
from data_prep.answers.regeneration import describe, summary
from data_prep.configs import RegenerateConfig
from data_prep.dialogues.encoding import EncodedSplit, Sample
from data_prep.dialogues.loss_mask import MaskedTokens
from data_prep.dialogues.reader import ReadCounts


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


def test_regenerate() -> None:
    """Catches tau over batches in place of forwards, answers of dropped dialogues, and tokens of kept ones only."""
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
