"""`python -m eval.engines`: an engine that dies is a row without figures, and the others go on."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from programs import run
from test_eval_prompts import sharegpt, tiny_tokenizer, write

import eval.engines
from eval.measure.run_journal import run_from_line

FAKE = {"python": sys.executable, "module": "tests.fake_engine"}
ENDS = {
    91: "SIGSEGV ended the engine's process; .*log is empty",
    92: "SIGKILL ended the engine's process",
    93: "no answer from the engine in 4 seconds, so its process was ended",
    94: "the engine answered '.*what is this.*', no JSON object",
    95: "the engine answered '.*no.*answer.*', no JSON object",
    96: "the engine's answer: prefill_seconds: .*finite number",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run beside engines that die on the second of four prompts, each in another way, or at their first token."""
    folder = tmp_path_factory.mktemp("failures")
    target = tiny_run.save_target(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    prompts = write(folder / "prompts.jsonl", [sharegpt(f"w{i} w7", "w1") for i in range(6)])
    llama = {"engine": "llama_cpp", "gguf": str(prompts), "gamma": 98, **FAKE}
    config = {
        "target": {"path": target.name, "dtype": "float32", "device": "cpu"},
        "prompts": {"file": str(prompts), "count": 4},
        "drafters": [{"drafter": "autoregressive"}],
        "engines": [
            {"label": "lives", "engine": "vllm", **FAKE},
            *({"label": f"dies {gamma}", "engine": "vllm", "gamma": gamma, **FAKE} for gamma in [*ENDS, 97]),
            {"label": "repacked", **llama},
            {"label": "must be repacked", **llama, "repack": True},
        ],
        "patience": 4,
        "stock_generate": False,
        "temperatures": [0.0],
        "max_new_tokens": 4,
        "warmup": 1,
        "out": str(folder / "out"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_ENGINE", "mortal")
        assert run(eval.engines.main, config) == 0
    return folder, json.loads((folder / "out" / "report.json").read_text())


@pytest.mark.parametrize("gamma", ENDS)
def test_an_engine_that_dies_has_no_figures(gamma: int, finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches a run that ends, waits for ever, or takes what an engine made before it died for a row's figures."""
    folder, report = finished
    (failure,) = [row for row in report["failures"] if row["drafter"] == f"dies {gamma}"]
    lines = [json.loads(line) for line in (folder / "out" / "measurements.jsonl").read_text().splitlines()[1:]]
    runs = [run_from_line(line) for line in lines if line["method"] == f"dies {gamma}"]
    assert [run.failure for run in runs] == [None, *[failure["reason"]] * 3]
    assert re.search(ENDS[gamma], failure["reason"])
    assert f"dies-{gamma}.log" in failure["reason"]
    page = (folder / "out" / "report.md").read_text()
    assert re.search(rf"\| dies {gamma} \(Mortal 1, Q4\) \| 0 \| failed \|( - \|)+\n", page)
    assert f"dies {gamma} (Mortal 1, Q4), T = 0: no figures, it failed on prompt" in page


def test_the_others_go_on(finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches a failure that takes the rows of the living with it."""
    _, report = finished
    assert [row["drafter"] for row in report["rows"]] == ["autoregressive", "lives", "repacked"]
    assert [row["new_tokens"] for row in report["rows"][1:]] == [8, 8]


def test_llama_cpp_goes_on_without_repacked_weights(finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches a fall-back that the report keeps quiet about, or that overrules what the entry asks for."""
    folder, report = finished
    without = "repacked weights, because with them it crashes here"
    assert report["environment"]["engines"]["repacked"]["without"] == without
    assert f"without {without}" in (folder / "out" / "report.md").read_text()
    assert "without" not in report["environment"]["engines"]["lives"]
