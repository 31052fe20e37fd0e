"""Prompt files of both formats become the token ids that the report counts."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from eval.prompts.choice import PromptsConfig
from eval.prompts.prompts import Prompt, PromptSet, in_turns, load_prompts

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}go{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """97 whole words; ids 3, 4 and 5 are user, assistant and the generation prompt."""
    words = ["<bos>", "<eos>", "<pad>", "user", "assistant", "go", *(f"w{i}" for i in range(91))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast


def write_target(folder: Path, model: PreTrainedModel) -> str:
    """``target`` in the folder, with a tokenizer beside the model."""
    target = str(folder / "target")
    model.save_pretrained(target)
    tiny_tokenizer().save_pretrained(target)
    return target


def sharegpt(*texts: str) -> dict[str, Any]:
    roles = ("human", "gpt")
    return {"conversations": [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]}


def write(path: Path, records: Iterable[Any]) -> Path:
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines) + "\n")
    return path


def load(file: Path | list[Path], warmup: int = 1, **options: Any) -> PromptSet:
    config = PromptsConfig(file=file, **options)
    return load_prompts(config, tiny_tokenizer(), warmup=warmup, max_new_tokens=10, max_context=20)


def test_what_is_skipped_is_counted_by_reason(tmp_path: Path) -> None:
    """Catches unusable lines that vanish, or that end the run, and prompts that leave no room for the output."""
    long = " ".join(["w1"] * 9)
    records = ["{broken", [1], {"turns": []}, {"turns": [" "]}, {"turns": [long]}]
    records += [{"turns": ["w1"]}, {"turns": ["w1"]}, {"turns": ["w2"]}]
    prompts = load(write(tmp_path / "p.jsonl", records))
    expected = {"broken_json": 1, "not_an_object": 1, "no_turns": 1, "empty_prompt": 1, "too_long": 1, "duplicate": 1}
    assert prompts.skipped == expected
    assert len(prompts.measured) == len(prompts.warmup) == 1


def test_warmup_prompts_are_never_measured(tmp_path: Path) -> None:
    """Catches a drafter that meets a measured prompt during warm-up, so that its pool holds the answer."""
    file = write(tmp_path / "p.jsonl", [{"turns": [f"w{i}"]} for i in range(20)])
    prompts = load(file, warmup=3, count=5, seed=1)
    assert len(prompts.measured) == 5
    assert not {tuple(p.ids) for p in prompts.measured} & {tuple(p.ids) for p in prompts.warmup}
    assert [p.ids for p in prompts.measured] == [p.ids for p in load(file, warmup=3, count=5, seed=1).measured]
    assert [p.ids for p in prompts.measured] != [p.ids for p in load(file, warmup=3, count=5, seed=2).measured]


def questions(*categories: str, count: int, start: int = 0) -> list[dict[str, Any]]:
    """``count`` records of each category, all different."""
    return [
        {"question_id": f"{name}{i}", "category": name, "turns": [f"w{start + place * count + i}"]}
        for place, name in enumerate(categories)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("consecutive", "expected"),
    [
        (1, [f"{name}{i}" for i in range(20) for name in "abcd"]),
        (4, [f"{name}{start + i}" for start in range(0, 20, 4) for name in "abcd" for i in range(4)]),
        (10, [f"{name}{start + i}" for start in (0, 10) for name in "abcd" for i in range(10)]),
        (20, [f"{name}{i}" for name in "abcd" for i in range(20)]),
    ],
)
def test_consecutive_prompts_are_of_one_category(consecutive: int, expected: list[str]) -> None:
    """Catches another order than that of Ouroboros, Appendix F: 4 tasks of 20 entries, CN of one task in a row."""
    shuffled = [Prompt(f"{name}{i}", name, [i]) for i in range(20) for name in "dbac"]
    assert [prompt.id for prompt in in_turns(shuffled, consecutive)] == expected


def test_so_many_prompts_of_every_category(tmp_path: Path) -> None:
    """Catches a draw that follows the file's shares, takes warm-up prompts from a quota, or changes with the order."""
    file = write(tmp_path / "p.jsonl", questions("a", count=20) + questions("b", "c", count=5, start=20))
    prompts = load(file, warmup=3, per_category=5)
    assert prompts.describe()["categories"] == {"a": 5, "b": 5, "c": 5}
    assert prompts.requested == 15
    assert [prompt.category for prompt in prompts.warmup] == ["a"] * 3
    assert not {p.id for p in prompts.warmup} & {p.id for p in prompts.measured}
    ids = {prompt.id for prompt in prompts.measured}
    for consecutive in (1, 5):
        ordered = load(file, warmup=3, per_category=5, consecutive=consecutive)
        assert {prompt.id for prompt in ordered.measured} == ids
        assert ordered.warmup == prompts.warmup
    categories = [prompt.category for prompt in ordered.measured]
    assert categories == ["a"] * 5 + ["b"] * 5 + ["c"] * 5
    assert [prompt.category for prompt in prompts.measured] != categories
    assert load(file, warmup=0, per_category=6, categories=["c", "b"]).describe()["categories"] == {"b": 5, "c": 5}


def test_only_the_categories_asked_for(tmp_path: Path) -> None:
    """Catches prompts of other kinds under a category's name, and a misspelt one that measures nothing."""
    records = [sharegpt(f"w{i}", "w1") | {"category": "ab"[i % 2]} for i in range(8)] + [sharegpt("w50", "w1")]
    file = write(tmp_path / "p.jsonl", records)
    prompts = load(file, categories=["b"])
    assert {prompt.category for prompt in prompts.measured} == {"b"}
    assert (len(prompts.measured), prompts.skipped) == (3, {"other_category": 5})
    assert load(file, consecutive=2).skipped == {"no_category": 1}
    assert not load(file).skipped
    with pytest.raises(ValueError, match="no prompt has category 'd'; there are: a, b"):
        load(file, categories=["a", "d"])
    plain = write(tmp_path / "q.jsonl", [sharegpt("w50", "w1")])
    with pytest.raises(ValueError, match="no prompt has a category; there are: none"):
        load(plain, per_category=3)


@pytest.mark.parametrize(
    ("record", "format_", "prompt"),
    [
        ({"question_id": 81, "category": "writing", "turns": ["w1 w2", "w3"]}, "spec-bench", ("81", "writing")),
        ({"question": "w1 w2", "answer": "w3 <<1+1=2>>2\n#### 2"}, "gsm8k", ("line 3", None)),
        (
            {
                "task_id": "HumanEval/0",
                "prompt": "w1\n w2\n",
                "entry_point": "w1",
                "canonical_solution": "w3",
                "test": "",
            },
            "humaneval",
            ("HumanEval/0", None),
        ),
        (sharegpt("w1 w2", "w3") | {"id": "a", "prompt": "another's field"}, "sharegpt", ("a", None)),
    ],
)
def test_published_formats_are_read_as_they_are(
    record: dict[str, Any], format_: str, prompt: tuple[str, str | None], tmp_path: Path
) -> None:
    """Catches MT-bench, GSM8K or HumanEval that must be rewritten first, and the answer decoded with the question."""
    (key,) = {"turns", "question", "prompt", "conversations"} & set(record) - ({"prompt"} if "id" in record else set())
    file = write(tmp_path / "p.jsonl", ["{broken", {key: None} if format_ != "sharegpt" else {}, record])
    prompts = load(file, warmup=0)
    assert prompts.format == format_
    assert [(found.id, found.category) for found in prompts.measured] == [prompt]
    assert prompts.measured[0].ids == [3, 7, 8, 5]
    assert prompts.skipped["broken_json"] == 1
    assert prompts.skipped.total() == 2


def long_prompts(file: Path, tokens: int, **options: Any) -> PromptSet:
    config = PromptsConfig(file=file, context_tokens=tokens, **options)
    return load_prompts(config, tiny_tokenizer(), warmup=2, max_new_tokens=10, max_context=100)


def test_prompts_have_the_length_that_is_wanted(tmp_path: Path) -> None:
    """Catches prompts too short or too long, a context without roles, and one that holds the question's own answer."""
    file = write(tmp_path / "p.jsonl", [sharegpt(f"w{i}", f"w{i} w90") for i in range(40)])
    prompts = long_prompts(file, 60, count=4)
    every = prompts.measured + prompts.warmup
    assert all(54 <= len(prompt.ids) <= 60 for prompt in every)
    asked = {prompt.ids[-2] for prompt in every}
    for prompt in every:
        assert prompt.ids[-3::2][:1] == [3]
        assert prompt.ids[-1] == 5
        turns = prompt.ids[:-3]
        assert len(turns) % 5 == 0  # "user wi assistant wi w90", whole dialogues
        starts = [turns[place : place + 5] for place in range(0, len(turns), 5)]
        assert all(turn == [3, turn[1], 4, turn[1], 96] for turn in starts)
        assert not asked & {turn[1] for turn in starts}
        assert len({turn[1] for turn in starts}) == len(starts)
    assert prompts.describe()["context"] == {"tokens": 60, "files": str(file)}
    assert [p.ids for p in long_prompts(file, 60, count=4).measured] == [p.ids for p in prompts.measured]
    assert [p.id for p in load(file, warmup=2, count=4).measured] == [p.id for p in prompts.measured]
