"""REST: the suffix array against a scan, continuations by hand, a datastore's file and the program that makes one."""

import json
import random
from pathlib import Path
from typing import Any

import conformance
import numpy as np
import pytest
import tiny
import torch
from conformance import prompt, target_of
from distribution import LIMIT, PROMPT, WARPS, deviation, toy
from safetensors.torch import load_file, save_file
from test_suffix import places, state_of

from data_prep import datastore as program
from data_prep.answers.datastore import datastore_of, save_datastore, suffix_order
from drafters import TargetModel, make_drafter
from drafters.drafting.datastore import load_datastore
from drafters.drafting.retrieval import BETWEEN, Copy
from drafters.drafting.token_file import vocabulary_facts
from drafters.methods.papers.rest import RestDrafter


def written(path: Path, texts: list[list[int]], target: TargetModel) -> str:
    """The file of a datastore for a target."""
    save_datastore(path, datastore_of(texts), vocabulary_facts(target.name, target.vocab_size, None))
    return str(path)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the suite's targets answer to some of the suite's prompts, with a misprint here and there."""
    texts = []
    for family, length in (("llama", 5), ("llama", 9), ("llama", 11), ("qwen3", 5), ("mistral-sliding", 11)):
        ids = prompt(length)
        texts.append([*ids[-2:], *conformance.plain_greedy(target_of(family), ids, 24)])
        texts[-1][8::7] = [(token + 1) % tiny.VOCAB_SIZE for token in texts[-1][8::7]]
    return written(tmp_path_factory.mktemp("rest") / "answers.safetensors", texts, target_of("llama"))


class TestRest(conformance.suite(lambda t: t, accepts="some", families=("llama", "qwen3"))):  # type: ignore[misc]
    """With what it needs to be accepted."""

    @pytest.fixture(autouse=True)
    def _datastore(self, answers: str) -> None:
        self.make: Any = lambda target: RestDrafter.from_options(target, datastore=answers, nodes=12, depth=6)


def test_the_order_is_that_of_the_suffixes() -> None:
    """Catches ranks of another length, ended suffixes out of place, and an order that depends on how it was found."""
    dice = random.Random(0)
    for size in (1, 2, 7, 40, 90):
        for symbols in (1, 2, 5):
            text = np.array([dice.randrange(symbols) for _ in range(size)], np.int32)
            suffixes = [text[at:].tolist() for at in range(size)]
            assert suffix_order(text, size).tolist() == sorted(range(size), key=lambda at: suffixes[at])
            kept = sorted(range(size), key=lambda at: (suffixes[at][:4], at))
            found = suffix_order(text, 4).tolist()
            assert [suffixes[at][:4] for at in found] == [suffixes[at][:4] for at in kept]


def test_matches_are_those_of_a_scan() -> None:
    """Catches a match over two texts, a shorter one than there is, and places left out."""
    dice, found = random.Random(1), set()
    for _ in range(60):
        texts = [[dice.randrange(3) for _ in range(dice.randrange(1, 30))] for _ in range(3)]
        store = datastore_of(texts)
        whole = [token for text in texts for token in (*text, BETWEEN)]
        assert store.tokens.tolist() == whole
        query = [dice.randrange(3) for _ in range(dice.randrange(1, 12))]
        match, among = store.find(query, 2, 8)
        sizes = [n for n in range(2, min(8, len(query)) + 1) if places(whole, query[-n:])]
        assert match == max(sizes, default=0)
        begin = [int(store.suffixes[place]) for place in among]
        assert sorted(begin) == ([end - match for end in places(whole, query[-match:])] if match else [])
        found.add(match)
    assert len(found) > 4


def test_continuations_by_hand(tmp_path: Path) -> None:
    """Catches a tree that is not of the most frequent, goes on over a text's end or EOS, or is too deep."""
    target = toy()
    store = written(tmp_path / "s.safetensors", [[2, 3, 4, 3, 2], [2, 3, 4, 4], [2, 3, 0, 1, 4], [0, 2, 3]], target)

    def of(text: list[int], eos: int = 9, room: int = 99, **options: Any) -> Copy:
        drafter = RestDrafter.from_options(target, datastore=store, **options)
        return drafter.retrieve(state_of(text, eos, room))

    # 2 3 is followed by 4 twice, by 0 once, and once by the end.
    whole = of([1, 2, 3])
    assert whole.match == 2 and whole.tokens[0] == 4 and whole.shares[0] == pytest.approx(2 / 5)
    paths = {tuple(path_of(whole, node)) for node in range(len(whole.tokens))}
    assert paths == {(4,), (4, 3), (4, 3, 2), (4, 4), (0,), (0, 1), (0, 1, 4)}
    assert of([1, 2, 3], nodes=1).tokens == [4] and set(of([1, 2, 3], nodes=2).tokens) <= {4, 3, 0}
    assert len(of([1, 2, 3], depth=1).tokens) == 2 == len(of([1, 2, 3], room=2).tokens)
    assert of([1, 2, 3], room=1).tokens == [] and sorted(of([1, 2, 3], eos=4, depth=2).tokens) == [0, 1, 4]
    assert of([0, 2, 3]) == Copy([], [], [], 3) and of([1, 1]) == of([1, 0]) == Copy([], [], [], 0)
    assert of([1, 0], min_ngram=1).match == of([1, 0], nodes="auto").match == 1
    # Of the four places every other one, in the order of what follows: the end, and 4 3.
    assert of([1, 2, 3], places=2, depth=2) == Copy([4, 3], [-1, 0], [1 / 3, 0.5], 2)


@pytest.mark.parametrize("shortest", [1, 3])
def test_a_text_that_goes_on_is_looked_up_from_where_it_was(shortest: int, tmp_path: Path) -> None:
    """Catches a match that may not grow by the tokens that have come since the last look, and the match of a row or of
    a prompt that is taken for that of the text after it."""
    target, rng = target_of("llama"), random.Random(0)
    path = written(tmp_path / "some", [[rng.randrange(4) for _ in range(60)] for _ in range(9)], target)
    options: dict[str, Any] = {"datastore": path, "min_ngram": shortest, "max_ngram": 6, "nodes": 4}
    kept = RestDrafter.from_options(target, **options)
    for _ in range(40):
        state = state_of([rng.randrange(4) for _ in range(rng.randrange(1, 12))], 99, 99)
        if rng.randrange(2):
            kept.begin(state, None)  # type: ignore[arg-type]
        else:
            kept.join(state, [0], state, None)  # type: ignore[arg-type]
        for _ in range(12):
            fresh = RestDrafter.from_options(target, **options).retrieve(state)
            assert kept.retrieve(state) == fresh
            state.tokens[0].extend(rng.randrange(4) for _ in range(rng.randrange(5)))


def path_of(found: Copy, node: int) -> list[int]:
    return [] if node < 0 else [*path_of(found, found.parents[node]), found.tokens[node]]


@pytest.mark.parametrize("warp", [0, 1])
def test_output_is_distributed_as_the_targets(warp: int, tmp_path: Path) -> None:
    """Catches siblings that are copied and not removed from p when they are rejected."""
    target = toy()
    with torch.inference_mode():
        rows = target.model.generate(torch.tensor([PROMPT] * 20), do_sample=True, max_new_tokens=30, eos_token_id=None)
    store = written(tmp_path / "s.safetensors", rows.tolist(), target)
    drafter = RestDrafter.from_options(target, datastore=store, nodes=10, depth=4)
    assert deviation(drafter, WARPS[warp], tokens=2_000) < LIMIT


def test_what_is_refused(tmp_path: Path) -> None:
    """Catches another model's ids, a file cut short, and ids that no embedding has, found in the middle of a text."""
    target = target_of("llama")
    path = Path(written(tmp_path / "s.safetensors", [[5, 6, 7]], target))
    facts = vocabulary_facts("other", target.vocab_size + 1, None)
    other = tmp_path / "o.safetensors"
    save_datastore(other, datastore_of([[5]]), facts)
    with pytest.raises(ValueError, match=f"is of other, whose vocabulary has {target.vocab_size + 1} tokens"):
        load_datastore(str(other), target)
    (tmp_path / "cut.safetensors").write_bytes(path.read_bytes()[:-4])
    save_file({"x": torch.zeros(2)}, tmp_path / "plain.safetensors")
    metadata = {"content": "datastore", "format_version": "1"} | vocabulary_facts("t", target.vocab_size, None)
    arrays = load_file(path)
    for name, changed in (
        ("ids", arrays | {"tokens": arrays["tokens"] + target.vocab_size}),
        ("place", arrays | {"suffixes": arrays["suffixes"] + 1}),
        ("shape", arrays | {"suffixes": arrays["suffixes"][:-1]}),
    ):
        save_file(changed, tmp_path / f"{name}.safetensors", metadata)
    for name, said in {
        "none": "there is no datastore",
        "cut": "or only part of one",
        "plain": "no datastore of version 1",
        "ids": "damaged: tokens run from",
        "place": "damaged: suffixes run from 1 to 4, not from 0 to 3",
        "shape": "damaged: it has 4 tokens and 3 suffixes",
    }.items():
        with pytest.raises(ValueError, match=said):
            make_drafter("rest", target, datastore=str(tmp_path / f"{name}.safetensors"))
    with pytest.raises(ValueError, match="min_ngram is 4 and max_ngram 3"):
        make_drafter("rest", target, datastore=str(path), min_ngram=4, max_ngram=3)
    with pytest.raises(ValueError, match="a datastore needs at least one token"):
        datastore_of([[]])


def test_the_program(tmp_path: Path, target_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches questions among the answers, an answer without its EOS, and another tokenizer's file that is taken."""
    target = TargetModel.from_pretrained(str(target_folder), "float32", "cpu")
    turns = [("human", "what is it"), ("gpt", "it is this"), ("human", "and then"), ("gpt", "that")]
    record = {"id": "a", "conversations": [{"from": who, "value": said} for who, said in turns]}
    (tmp_path / "answers.jsonl").write_text(json.dumps(record) + "\n")
    out = tmp_path / "out" / "store.safetensors"
    program.main([str(tmp_path / "answers.jsonl"), "--target", target.name, "--out", str(out)])
    store = load_datastore(str(out), target)
    assert f"2 texts, {len(store.tokens)} tokens" in capsys.readouterr().out
    assert store.tokens.tolist().count(BETWEEN) == 2 and out.stat().st_size < 8 * len(store.tokens) + 1024
    (tmp_path / "text.txt").write_text("it is this and that")
    program.main([str(tmp_path / "text.txt"), "--target", target.name, "--out", str(out)])
    assert load_datastore(str(out), target).tokens.tolist().count(BETWEEN) == 1
    with pytest.raises(ValueError, match="does not end in .safetensors"):
        program.main([str(tmp_path / "text.txt"), "--target", target.name, "--out", str(tmp_path / "x.bin")])
