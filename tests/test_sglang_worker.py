"""`python -m eval.parity --engine sglang`: the worker, with a fake ``sglang`` that sends chunks as 0.5.23 does."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import fake_sglang
import overfitted
import pytest
import test_block_layouts
import test_eagle3_layouts
from conformance import plain_greedy
from programs import status

import eval.parity
from drafters.layouts.export import export
from eval.engine_workers.sglang_worker import SGLang, accepted_tokens, arguments
from eval.entries import EngineEntry
from eval.figures.diagnosis import PASS

JOB = {"target": "T", "revision": None, "dtype": "float32", "max_context": 128, "eos": [], "top_k": 0, "top_p": 1.0}


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fake into the working directory, where the worker's Python finds it first."""
    (tmp_path / "sglang").mkdir()
    shutil.copy(str(fake_sglang.__file__), tmp_path / "sglang" / "__init__.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEAD", str(tmp_path / "head"))


def eagle3(folder: Path) -> list[Any]:
    """Save the head that learnt texts by heart, and its target."""
    overfitted.save_eagle3(folder)
    return overfitted.texts()[:6, : overfitted.BEGUN].tolist()


def parity(prompts: list[Any], *more: str) -> tuple[int, dict[str, Any]]:
    """Exit status and parity.json."""
    line = ["--checkpoint", "head", "--target", "target", "--engine", "sglang", f"python={sys.executable}", "out=out"]
    line += ["target.dtype=float32", "target.device=cpu", "threads=1", f"max_new_tokens={overfitted.NEW}", *more]
    with mock.patch("eval.figures.diagnosis.prompts_of", lambda config, drafter: prompts):
        found = status(eval.parity.main, *line)
    return found, json.loads(Path("out/parity.json").read_text()) if Path("out/parity.json").exists() else {}


def test_a_served_head_passes(tmp_path: Path) -> None:
    """Catches steps read wrongly from chunks, acceptance cut by the limit, and a head that SGLang would not know."""
    code, found = parity(eagle3(tmp_path), "depth=3")
    assert (code, found["verdict"]) == (0, PASS)
    served, (ours,) = found["engine"], found["readings"]
    assert ours["alike"]["value"] == 1.0 and ours["tau"]["value"] > 2
    assert served["tau"]["value"] == pytest.approx(ours["tau"]["value"])
    assert found["environment"]["engine_facts"]["engine"] == "SGLang"


def test_joined_chunks_are_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a joined chunk taken for one step, and a verdict on steps that are not known."""
    prompt = eagle3(tmp_path)[0]
    export("head", "sglang", tmp_path / "exported", "target")
    monkeypatch.setitem(sys.modules, "sglang", fake_sglang)
    job = JOB | {"target": "target", "method": "eagle3", "gamma": 3, "drafter": "exported"}
    made = []
    for joined in ("0", "1"):
        monkeypatch.setenv("JOINED", joined)
        made.append(SGLang(job).decode(prompt, 0, 0.0, overfitted.NEW))
    once, again = ({key: value for key, value in one.items() if "seconds" not in key} for one in made)
    assert once == again and len(set(once["accepted"])) > 1
    assert once["tokens"] == plain_greedy(overfitted.target(), prompt, overfitted.NEW)[-overfitted.NEW :]
    monkeypatch.setenv("JOINED", "3")
    with pytest.raises(ValueError, match=r"chunks, in 3 tries, so the accepted tokens of each step are not known"):
        SGLang(job).decode(prompt, 0, 0.0, overfitted.NEW)


@pytest.mark.long
def test_dspark_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a head that is exported for vLLM, another number of draft tokens than its block, and shorter blocks."""
    target = test_eagle3_layouts.save_target(tmp_path / "target")
    test_block_layouts.save_head(tmp_path / "head", "dspark", target, layout="anchor-first")
    code, found = parity([[3, 4, 5, 6], [7, 8, 9, 10]])
    assert (code, found["verdict"]) == (0, PASS) and len(found["engine"]["cumulative"]) == 5
    assert parity([], "depth=4")[0] == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "SGLang's blocks have 4 rows, and the head was trained with 5" in told and "give depth=5" in told


def test_plain_decoding_stops_at_eos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches stop tokens that SGLang ignores, and steps of plain decoding that joined chunks hide."""
    overfitted.target().model.save_pretrained(tmp_path / "target")
    prompt = overfitted.texts()[0, : overfitted.BEGUN].tolist()
    tokens = plain_greedy(overfitted.target(), prompt, 12)[-12:]
    monkeypatch.setitem(sys.modules, "sglang", fake_sglang)
    monkeypatch.setenv("JOINED", "1")
    job = JOB | {"target": "target", "method": "plain", "gamma": 5, "drafter": None, "eos": tokens[7:8]}
    made = SGLang(job).decode(prompt, 0, 0.0, 12)
    assert made["tokens"] == tokens[: tokens.index(tokens[7]) + 1]
    assert made["commits"] == [1] * len(made["tokens"]) and made["accepted"] == []


def test_accepted_tokens_are_those_of_the_histogram() -> None:
    """Worked by hand. Catches a last step that the limit cut, and joined chunks that pass for steps."""
    assert accepted_tokens([1, 3, 1, 2], [1, 0, 1, 1]) == [2, 0, 3]
    assert accepted_tokens([1, 3, 1, 2], [1, 1, 1]) == [2, 0, 1]
    assert accepted_tokens([1, 3, 1, 3], [1, 1, 1]) is None  # the last one accepted too few
    assert accepted_tokens([1, 3, 3], [2, 0, 1, 1]) is None  # four verifications
    assert accepted_tokens([1, 4, 2], [0, 2, 0, 1]) is None  # 1, 1 in one chunk, and 3, which the limit cut
    assert accepted_tokens([3, 1, 2], [2, 0, 1]) is None  # the prefill's chunk has a step
    assert accepted_tokens([1, 4, 1, 2], [1, 1, 1]) is None  # no verification accepted three
    assert accepted_tokens([1], []) == []


def test_the_draft_vocabulary_is_handed_over(tmp_path: Path) -> None:
    """Catches an EAGLE head that drafts with all tokens there."""
    (tmp_path / "hot_token_ids.pt").touch()
    found = arguments(JOB | {"method": "eagle", "gamma": 4, "drafter": str(tmp_path)})
    assert found["speculative_token_map"] == str(tmp_path / "hot_token_ids.pt")
    assert (found["speculative_num_steps"], found["speculative_num_draft_tokens"]) == (4, 5)


@pytest.mark.parametrize(("engine", "method"), [("vllm", "dspark"), ("sglang", "prompt_lookup")])
def test_methods_that_an_engine_lacks_are_refused(engine: str, method: str) -> None:
    """Catches a row that fails after the models are loaded."""
    given = {"dspark": {"checkpoint": "c"}}.get(method, {})
    with pytest.raises(ValueError, match=f"there is no method {method} for {engine}"):
        EngineEntry.model_validate({"label": "E", "engine": engine, "method": method, **given})
