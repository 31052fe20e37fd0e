"""Prompt files of both formats become the token ids that the report counts."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.prompts import PromptsConfig, PromptSet, load_prompts

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


def load(file: Path, warmup: int = 1, max_new_tokens: int = 10, max_context: int = 20, **options: Any) -> PromptSet:
    config = PromptsConfig(file=file, **options)
    return load_prompts(config, tiny_tokenizer(), warmup=warmup, max_new_tokens=max_new_tokens, max_context=max_context)


def test_sharegpt_prompt_ends_before_the_first_answer(tmp_path: Path) -> None:
    """Catches the reference answer, or a second question, leaking into the prompt, and a missing generation prompt."""
    file = write(tmp_path / "p.jsonl", [sharegpt("w1 w2", "w3", "w4", "w5"), sharegpt("w7", "w8")])
    prompts = load(file)
    ids = {tuple(prompt.ids) for prompt in prompts.measured + prompts.warmup}
    assert prompts.format == "sharegpt"
    assert ids == {(3, 7, 8, 5), (3, 13, 5)}


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
