"""What the front page shows runs, lies where it says, and is what was measured."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eval.figures.metrics import ends_in_loop

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def test_the_first_python_example_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches an example that no longer runs, drafts nothing, or whose answer runs in circles until it is cut off."""
    (code,) = re.findall(r"^## Use a drafter from Python\n```python\n(.*?)^```", README, re.M | re.S)
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(code, names)
    tokens = names["result"].tokens[0].tolist()
    assert not ends_in_loop(tokens)
    assert tokens[-1] == names["tokenizer"].convert_tokens_to_ids("<|end|>")
    assert 8 < len(tokens) < 128 and names["result"].trace.tau > 2
    assert "regular file" in capsys.readouterr().out


def texts(value: Any) -> list[str]:
    """Every string in a config."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


def test_the_quickstart_makes_the_corpus_that_all_configs_read() -> None:
    """Catches commands of the README that end in "no prompt file" right after the quickstart."""
    (made,) = re.findall(r"^CORPUS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert f"python -m data_prep.stdlib_corpus --out {made} " in README
    read = [text for path in CONFIGS for text in texts(yaml.safe_load(path.read_text())) if text.endswith(".jsonl")]
    corpus = [Path(text) for text in read if Path(text).parent.name == "stdlib"]
    assert len(corpus) > 20
    assert {str(file.parent) for file in corpus} == {made}


def test_no_row_claims_several_drafts_where_there_is_one() -> None:
    """Catches greedy rows of SpecTr with a draft temperature of 0: its k drafts are then one and the same."""
    rows = 0
    for path in CONFIGS:
        config = yaml.safe_load(path.read_text())
        for entry in config.get("drafters", []):
            if entry["drafter"] == "spectr" and not entry.get("draft_temperature"):
                rows += 1
                assert 0.0 not in entry.get("temperatures", config.get("temperatures", [0.0, 1.0])), path
    assert rows


def test_the_front_page_says_how_long_its_prompts_are_and_who_is_fastest() -> None:
    """Catches prompts that flatter a method unsaid, and a trained head quoted without the lookup that beats it."""
    results = ROOT / "docs" / "results" / "2-core-cpu"

    def report(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((results / name / "report.json").read_text())
        return found

    mean = report("speed-bf16")["environment"]["prompt_set"]["prompt_tokens"]["mean"]
    assert f"{mean:.0f} tokens on average" in README
    real = [report(f"real-data/{name}")["rows"] for name in ("mt_bench", "spec_bench", "gsm8k")]
    for label in ("prompt_lookup", "EAGLE, chain"):
        rows = [row for rows in real for row in rows if row["drafter"] == label]
        assert ", ".join(f"{row['speedup']:.2f}" for row in rows) in README
