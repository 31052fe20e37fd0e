"""Our proposer for vLLM, without vLLM: the drafts of our loop, also when rows move in its batch."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from conformance import NO_EOS, prompt, target_of

from drafters import generate, make_drafter
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.vllm_proposer import Proposer

CONTEXT, MOST = 200, 5
ENTRIES: dict[str, dict[str, Any]] = {
    "prompt_lookup": {"min_ngram": 1, "max_ngram": 3},
    "suffix": {"alpha": 2.0, "chance": 0.2, "memory": 500},
}


def vllm_config(rows: int, entry: Any, eos: Any = None, most: int = MOST, context: int = CONTEXT) -> Any:
    model = SimpleNamespace(model="none", revision=None, max_model_len=context, get_vocab_size=lambda: tiny.VOCAB_SIZE)
    model.try_get_generation_config = lambda: {} if eos is None else {"eos_token_id": eos}
    return SimpleNamespace(
        model_config=model,
        additional_config=entry,
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
    )


class Batch:
    """Requests in the rows of vLLM's batch, whose texts it hands over in one large array."""

    def __init__(self, rows: int, entry: Any, **options: Any) -> None:
        self.proposer = Proposer(vllm_config(rows, {"drafter": entry}, **options))
        self.proposer.load_model(None)
        self.tokens = np.zeros((rows, CONTEXT), np.int32)

    def step(self, texts: list[list[int]], new: list[int]) -> list[list[int]]:
        """``new``: how many of the last tokens of each the step has committed."""
        for row, text in enumerate(texts):
            self.tokens[row] = -1  # what a row held before
            self.tokens[row, : len(text)] = text
        sampled = [text[len(text) - count :] for text, count in zip(texts, new, strict=True)]
        lengths = np.array([len(text) for text in texts], np.int32)
        return self.proposer.propose(sampled, lengths, self.tokens, slot_mappings=None)


@pytest.mark.parametrize("name", ENTRIES)
def test_the_drafts_are_those_of_our_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches another text, length or memory than our loop's: acceptance here would not be acceptance there."""
    target = target_of("llama")
    entry = {"drafter": name, **ENTRIES[name]}
    lengths = {"gamma": MOST} if name == "prompt_lookup" else {"chain": True, "nodes": MOST}
    options = {key: value for key, value in entry.items() if key != "drafter"} | lengths
    drafter = make_drafter(name, target, **options)
    seen: list[tuple[list[int], list[int] | None]] = []  # texts, and what our loop drafts then
    propose = type(drafter).propose

    def noted(self: Any, state: DecodeState) -> DraftTree:
        draft = propose(self, state)
        # Near its limit our loop drafts less, and vLLM tells no limit.
        seen.append((list(state.tokens[0]), draft.tokens[0].tolist() if state.room() > MOST else None))
        return draft

    monkeypatch.setattr(type(drafter), "propose", noted)
    batch, drafted = Batch(1, entry), 0
    for seed in range(4):
        ids = prompt(20, seed) * 2
        result = generate(target, drafter, [list(ids)], max_new_tokens=60, eos_token_id=NO_EOS)
        before = len(ids)
        for text, expected in [*seen, (ids + result.tokens[0].tolist(), None)]:
            (draft,) = batch.step([text], [len(text) - before])
            assert expected in (None, draft)
            before, drafted = len(text), drafted + (len(expected or []) > 1)
        seen.clear()
    assert drafted > 20


def test_rows_move() -> None:
    """Catches a request that is given another one's text, or restarts, when vLLM moves it in its batch."""
    dice = random.Random(0)
    texts = {n: [dice.randrange(6) for _ in range(12)] for n in range(9)}
    entry = {"drafter": "suffix", "alpha": 3.0, "memory": 0}
    batch, running, waiting = Batch(4, entry), [], list(texts)
    for _ in range(60):
        dice.shuffle(running)
        if running and dice.random() < 0.2:
            running.pop()
        while waiting and len(running) < 4:
            running.append(waiting.pop())
        new = [dice.randrange(1, 3) for _ in running]
        for n, count in zip(running, new, strict=True):
            texts[n] += [dice.randrange(6) for _ in range(count)]
        drafts = batch.step([texts[n] for n in running], new)
        alone = [Batch(1, entry).step([texts[n]], [1])[0] for n in running]
        assert drafts == alone
    assert len(batch.proposer._texts) == 4


def test_what_ends_is_remembered() -> None:
    """Catches answers of ended requests that no later one finds, and prompts taken for answers."""
    batch = Batch(2, {"drafter": "suffix", "alpha": 9.0, "nodes": 3})
    assert batch.step([[1, 2, 3, 7, 8, 9, 4]], [4]) == [[]]
    assert batch.step([[5, 7, 8], [6, 1, 2]], [1, 1]) == [[9, 4], []]
    assert batch.step([[5, 7, 8], [6, 1, 2, 7]], [0, 1]) == [[], [8, 9, 4]]  # the first one is not read to its end


def test_the_ends_of_a_draft() -> None:
    """Catches drafts behind EOS, of more tokens than vLLM verifies, and beyond the model's length."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    lookup = {"drafter": "prompt_lookup"}
    assert Batch(1, lookup).step([text], [1]) == [[3, 4, 5, 6, 7]]
    assert Batch(1, lookup, eos=[4, 99]).step([text], [1]) == Batch(1, lookup, eos=4).step([text], [1]) == [[3, 4]]
    assert Batch(1, lookup, context=len(text) + 3).step([text], [1]) == [[3, 4]]
    assert Batch(1, lookup | {"gamma": 3}).step([text], [1]) == [[3, 4, 5]]
    assert Batch(1, lookup | {"gamma": 30}).step([text], [1]) == [[3, 4, 5, 6, 7]]
    assert Proposer(vllm_config(1, {}))._drafter.name == "prompt_lookup"
