"""Suites by name: published records become prompts, conversations go on after an answer, each suite has its limits."""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import status, without_pictures
from test_eval_prompts import tiny_tokenizer, write, write_target
from transformers import PreTrainedModel

import eval.prompts.suites
import eval.speed
from eval.measure.turns import with_later_turns
from eval.prompts.choice import PromptsConfig
from eval.prompts.prompts import Prompt, PromptSet, load_prompts
from eval.prompts.suites import filled, load_suite, read_suite, suite_names

# A record of each as it is published, its prompt, id and category, and what an answer is compared with.
PUBLISHED: dict[str, tuple[dict[str, Any], str, str, str | None, str | None]] = {
    "spec-bench": (
        {"question_id": 241, "category": "summarization", "turns": ["Summarize: w1"], "reference": ["w2"]},
        "Summarize: w1", "241", "summarization", "w2",
    ),
    "mt-bench": ({"question_id": 81, "category": "writing", "turns": ["w1", "w2"]}, "w1", "81", "writing", None),
    "speed-bench": (
        {"question_id": "a", "category": "qa", "sub_category": "w9", "turns": ["w1", "w2"], "source": "x"},
        "w1", "a", "qa", None,
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "", "entry_point": "f", "canonical_solution": ""},
        "block.\n\n```python\ndef f():\n\n```", "HumanEval/0", None, None,
    ),
    "mbpp": (
        {"task_id": 511, "text": "Do.", "code": "", "test_list": ["assert a", "assert b"], "test_setup_code": "",
         "challenge_test_list": []},
        "task: Do. Your code should pass these tests:\n\nassert a\nassert b", "511", None, None,
    ),
    "gsm8k": ({"question": "w1?", "answer": "w2\n#### 18"}, "w1?", "line 1", None, "w2\n#### 18"),
    "alpaca": (
        {"instruction": "w1", "input": "w2", "output": "w3", "text": "w4"}, "w1\n\nw2", "line 1", None, None,
    ),
    "cnn-dm": ({"article": "w1", "highlights": "w2", "id": "f00"}, "Summarize: w1", "f00", None, "w2"),
    "wmt16-de-en": (
        {"translation": {"de": "w1", "en": "w2"}}, "Translate German to English: w1", "line 1", None, "w2",
    ),
    "natural-questions": ({"question": "w1", "answer": ["w2"]}, "w1", "line 1", None, None),
}  # fmt: skip


def test_every_suite_that_ships_has_its_case() -> None:
    """Catches a new suite whose fields were not compared with the published ones."""
    assert set(suite_names()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_record_becomes_its_prompt(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a field of another name, the reference in the prompt, and a split or a limit left out."""
    record, prompt, id_, category, reference = PUBLISHED[name]
    suite = load_suite(name)
    if suite.file is None:
        monkeypatch.setattr(eval.prompts.suites, "dataset_records", lambda name, subset: [record])
    else:
        place = tmp_path / suite.file
        place = place if place.suffix else place / "qualitative" / "test.jsonl"
        place.parent.mkdir(parents=True)
        data = json.dumps(record).encode()
        place.write_bytes(gzip.compress(data) if place.suffix == ".gz" else data)
    (found,) = read_suite(name, tmp_path, Counter())
    text = found.messages[-1]["content"]
    assert text == prompt or (len(prompt) > 30 and text.endswith(prompt))
    assert (found.id, found.category) == (id_, category)
    assert (filled(suite.reference, record) if suite.reference else None) == reference
    assert found.later == (("w2",) if "turns" in record and len(record["turns"]) > 1 else ())


def suite_file(folder: Path, name: str, **keys: Any) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(keys))
    return str(path)


def test_each_suite_has_its_own_count_and_limit(tmp_path: Path) -> None:
    """Catches one suite's limits on another's prompts, two prompts of one name, a measured prompt in the warm-up, and a
    suite that is measured whole but for the warm-up."""
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [{"ask": f"w{n + 40 * (name == 'b')} w1", "kind": "x"} for n in range(6)])
    few = suite_file(tmp_path, "few", file="a.jsonl", prompt="{{ ask }}", count=2, max_new_tokens=3)
    whole = suite_file(tmp_path, "whole", file="b.jsonl", prompt="{{ ask }}")

    def load(**keys: Any) -> PromptSet:
        config = PromptsConfig(data=tmp_path, **keys)
        return load_prompts(config, tiny_tokenizer(), warmup=5, max_new_tokens=9, max_context=14)

    both = load(suite=[few, whole])
    assert Counter((p.category, p.max_new_tokens) for p in both.measured) == {("few", 3): 2, ("whole", None): 6}
    assert len(both.warmup) == 5 and both.requested == 8
    assert len({p.id for p in both.measured}) == 8 and {p.id.partition("/")[0] for p in both.measured} == {
        "few",
        "whole",
    }
    assert not {tuple(p.ids) for p in both.warmup} & {tuple(p.ids) for p in both.measured}
    assert [p.id for p in both.warmup][4] == "warm-up 1"
    assert len(load(suite=whole).measured) == 6 and len(load(suite=[few, whole], count=3).measured) == 3
    with pytest.raises(ValueError, match="give one of the two"):
        PromptsConfig(file=tmp_path / "a.jsonl", suite=few)


def test_a_conversation_goes_on_after_the_answer(tmp_path: Path) -> None:
    """Catches a second turn without the first answer, two methods with different ones, an answer made again by a run
    that goes on, and a turn that is too long."""
    write(tmp_path / "c.jsonl", [{"turns": ["w1", "w2", "w3"]}, {"turns": ["w4", "w5 " * 30]}, {"turns": ["w6"]}])
    config = PromptsConfig(suite=suite_file(tmp_path, "talk", file="c.jsonl", turns="all"), data=tmp_path)
    tokenizer = tiny_tokenizer()
    prompts = load_prompts(config, tokenizer, warmup=0, max_new_tokens=3, max_context=40)
    asked: list[list[int]] = []

    def answer(prompt: Prompt) -> list[int]:
        asked.append(prompt.ids)
        return [90 + len(asked) % 2, 1]

    kept = tmp_path / "out" / "turns.jsonl"
    found = with_later_turns(prompts, tokenizer, answer, lambda prompt: 30, kept, ["target"])
    by_id = {prompt.id: prompt for prompt in found.measured}
    assert {"line 1", "line 1/2", "line 1/3", "line 2", "line 3"} == set(by_id)
    assert len(asked) == 3 and found.skipped == {"too_long": 1}
    first, second, third = (by_id[f"line 1{place}"].ids for place in ("", "/2", "/3"))
    assert second[: len(first) - 1] == first[:-1] and second[-3:] == [3, 8, 5]
    assert second[2] == 4 and second[3] in (90, 91) and third[: len(second) - 1] == second[:-1]
    with kept.open("ab") as file:
        file.write(b'{"prompt": "ha')
    again = with_later_turns(prompts, tokenizer, answer, lambda prompt: 30, kept, ["target"])
    assert [p.ids for p in again.measured] == [p.ids for p in found.measured] and len(asked) == 3
    with_later_turns(prompts, tokenizer, answer, lambda prompt: 30, kept, ["another target"])
    assert len(asked) == 6
    assert all(json.loads(line) for line in kept.open())


def test_a_speed_run_takes_suites(
    tiny_model: Callable[..., PreTrainedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches --suite that leaves the config's prompts, or replaces its report, and an answer beyond its limit."""
    without_pictures(monkeypatch)
    records = [{"turns": [f"w{n} w7", "w2"], "category": "ab"[n % 2], "sub_category": f"s{n % 2}"} for n in range(4)]
    write(tmp_path / "talk.jsonl", records)
    write(tmp_path / "more.jsonl", [{"ask": "w30"}, {"ask": "w31"}])
    talk = suite_file(tmp_path, "talk", file="talk.jsonl", turns="all", max_new_tokens=3)
    judged = {"metric": "number", "reference": "{{ ask }}"}
    more = suite_file(tmp_path, "more", file="more.jsonl", prompt="{{ ask }}", **judged)
    config = {
        "target": {"path": write_target(tmp_path, tiny_model("llama")), "dtype": "float32", "device": "cpu"},
        "prompts": {"file": "none.jsonl", "count": 1},
        "drafters": [{"drafter": "prompt_lookup"}],
        "out": str(tmp_path / "out"),
        "max_new_tokens": 5,
        "temperatures": [0.0],
        "stock_generate": False,
    }
    (tmp_path / "speed.yaml").write_text(yaml.safe_dump(config))
    given = ("--config", tmp_path / "speed.yaml", "--suite", f"{talk},{more}", f"prompts.data={tmp_path}")
    (tmp_path / "target" / "chat_template.jinja").rename(tmp_path / "chat.jinja")
    assert status(eval.speed.main, *given) == 1
    assert "has no chat template; write the one that the target was tuned with" in capsys.readouterr().err
    given = (*given, f"target.chat_template={tmp_path / 'chat.jinja'}")
    assert status(eval.speed.main, *given, "warmup=1") == 0
    out = tmp_path / "out" / "talk+more"
    report = json.loads((out / "report.json").read_text())
    facts = report["environment"]["prompt_set"]
    assert (facts["prompts"], facts["later_turns"], facts["requested"]) == (10, 4, 6)
    row = next(row for row in report["rows"] if row["drafter"] == "prompt_lookup")
    assert row["exact_match"] == 1.0 and set(row["categories"]) == {"talk", "more"}
    assert set(row["sub_categories"]) == {"a", "b"}
    assert row["accuracy"].keys() == {"more"} and row["accuracy"]["more"]["answers"] == 2
    assert "| prompt_lookup | 0 | 0.0 |" in (out / "report.md").read_text().partition("## Accuracy")[2]
    lines = [json.loads(line) for line in (out / "measurements.jsonl").open()]
    most = {"talk": 3, "more": 5}
    for line in (line for line in lines if "method" in line):
        assert line["new_tokens"] <= most["more" if line["prompt_tokens"] == 3 else "talk"]
    assert status(eval.speed.main, *given, "batch=2") == 1
