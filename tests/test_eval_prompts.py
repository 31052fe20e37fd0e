"""Prompt files of both formats become the token ids that the report counts."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.prompts import Prompt, PromptsConfig, PromptSet, in_turns, load_prompts, render_up_to

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


def test_sharegpt_prompt_ends_before_the_first_answer(tmp_path: Path) -> None:
    """Catches the reference answer, or a second question, leaking into the prompt, and a missing generation prompt."""
    file = write(tmp_path / "p.jsonl", [sharegpt("w1 w2", "w3", "w4", "w5"), sharegpt("w7", "w8")])
    prompts = load(file)
    ids = {tuple(prompt.ids) for prompt in prompts.measured + prompts.warmup}
    assert prompts.format == "sharegpt"
    assert ids == {(3, 7, 8, 5), (3, 13, 5)}


def test_questions_in_another_encoding(tmp_path: Path) -> None:
    """Catches questions in UTF-16 taken for no questions at all, and in Latin-1 for the few that have no accent."""
    file = tmp_path / "p.jsonl"
    lines = [json.dumps({"question_id": i, "turns": [f"w{i} \u00e9"]}, ensure_ascii=False) for i in range(3)]
    file.write_text("\n".join(lines), encoding="utf-16")
    prompts = load(file)
    assert prompts.format == "spec-bench"
    assert len(prompts.measured + prompts.warmup) == 3
    file.write_text("\n".join(lines), encoding="latin-1")
    with pytest.raises(ValueError, match="probably Latin-1; convert it with: iconv"):
        load(file)


def test_spec_bench_takes_the_first_turn_and_the_category(tmp_path: Path) -> None:
    """Catches Spec-Bench files read as ShareGPT, and turns glued together."""
    records = [{"question_id": 81 + i, "category": "qa", "turns": [f"w{i}", "w9"]} for i in range(3)]
    prompts = load(write(tmp_path / "p.jsonl", records))
    assert prompts.format == "spec-bench"
    assert {prompt.id for prompt in prompts.measured + prompts.warmup} == {"81", "82", "83"}
    assert all(len(prompt.ids) == 3 and prompt.category == "qa" for prompt in prompts.measured)


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


def test_too_few_usable_prompts_is_an_error_with_the_counts(tmp_path: Path) -> None:
    """Catches a report over no prompts at all."""
    file = write(tmp_path / "p.jsonl", [{"turns": ["w1"]}, {"turns": [" "]}])
    with pytest.raises(ValueError, match="1 usable prompts.*empty_prompt"):
        load(file)


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


def test_turns_go_on_when_a_category_runs_out() -> None:
    """Catches prompts lost where the categories are unequal, or no multiple of the row; and the order given ignored."""
    prompts = [Prompt(f"{name}{i}", name, [i]) for name, count in (("a", 5), ("b", 1)) for i in range(count)]
    assert [p.id for p in in_turns(prompts, 2, ["b", "a"])] == ["b0", "a0", "a1", "a2", "a3", "a4"]


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


def test_warmup_needs_prompts_of_its_own_beside_the_quotas(tmp_path: Path) -> None:
    """Catches categories quietly measured on fewer prompts than the others because warm-up took them."""
    file = write(tmp_path / "p.jsonl", questions("a", "b", count=5))
    with pytest.raises(ValueError, match="10 usable prompts, of which warm-up has 0 and takes 1"):
        load(file, warmup=1, per_category=5)


def test_several_files_are_categories(tmp_path: Path) -> None:
    """Catches files told apart by nothing, and a record's own category overruled."""
    one = write(tmp_path / "gsm8k.jsonl", [sharegpt(f"w{i}", "w1") for i in range(3)])
    two = write(tmp_path / "mbpp.test.jsonl", questions("own", count=2, start=10) + [{"turns": ["w30"]}])
    prompts = load([one, two], warmup=0)
    assert prompts.describe()["categories"] == {"gsm8k": 3, "own": 2, "mbpp": 1}
    assert prompts.format == "sharegpt, spec-bench"
    assert {prompt.category for prompt in load(one, warmup=0).measured} == {None}
    with pytest.raises(ValueError, match="no prompt file at .*none"):
        load([one, tmp_path / "none"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 3, "per_category": 3}, "count is 3 and per_category 3"),
        ({"categories": ["a", "a"]}, "categories: each must be given once"),
        ({"categories": []}, "at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    """Catches one of two contradicting keys silently ignored."""
    with pytest.raises(ValueError, match=message):
        PromptsConfig(file=Path("x"), **options)


def test_a_huge_prompt_is_left_out_by_its_beginning(tmp_path: Path) -> None:
    """Catches a prompt of 10 MB that is tokenised to its end, and one left out for its characters, not its tokens.

    The limit is 10 tokens, of which the template takes two.
    """
    asked: list[int] = []

    class Counting:
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
            asked.append(sum(len(message["content"]) for message in messages))
            return tokenizer.apply_chat_template(messages, **options)

    tokenizer = tiny_tokenizer()
    long_word, most, too_many = "x" * 50_000, " ".join(["w1"] * 7 + ["y" * 9_000]), "  ".join(["w1"] * 9)
    texts = [long_word, most, too_many, "w1 " * 3_000_000, "w2", "w3"]
    file = write(tmp_path / "p.jsonl", [{"turns": [text]} for text in texts])
    config = PromptsConfig(file=file)
    prompts = load_prompts(config, Counting(), warmup=1, max_new_tokens=10, max_context=20)
    assert prompts.skipped == {"too_long": 2}
    assert sorted(len(prompt.ids) for prompt in prompts.measured + prompts.warmup) == [3, 3, 3, 10]
    assert sum(asked) < 1_000_000
    too_long = [{"role": "system", "content": "w1"}, {"role": "user", "content": "w1 " * 100_000}]
    assert len(render_up_to(tokenizer, too_long, 10)) > 10


def test_a_cut_prompt_keeps_its_turns() -> None:
    """Catches a template's refusal of a prompt without a user's turn, where the system message alone is too long."""

    class Strict:
        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> Any:
            assert [message["role"] for message in messages] == ["system", "user"]
            assert all(message["content"] for message in messages)
            return tokenizer.apply_chat_template(messages, **options)

    tokenizer = tiny_tokenizer()
    messages = [{"role": "system", "content": "w1 " * 10_000}, {"role": "user", "content": "w1"}]
    assert 10 < len(render_up_to(Strict(), messages, 10)) < 10_000


def test_no_room_for_a_prompt_is_said_with_both_numbers(tmp_path: Path) -> None:
    """Catches "at most -97952 prompt tokens"."""
    file = write(tmp_path / "p.jsonl", [{"turns": ["w1"]}, {"turns": ["w2"]}])
    with pytest.raises(ValueError, match="max_new_tokens is 100,000, but .* were made for 2,048 .*at most 2,047"):
        load_prompts(PromptsConfig(file=file), tiny_tokenizer(), warmup=1, max_new_tokens=100_000, max_context=2048)
