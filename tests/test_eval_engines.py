"""`python -m eval.engines`: engines of other environments beside our methods; a fake one speaks their protocol."""

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from programs import run
from test_eval_prompts import sharegpt, tiny_tokenizer, write

import eval.engine_workers
import eval.engines
from drafters.heads.eagle.module import EagleHead
from drafters.hub.checkpoint import make_config, save_checkpoint
from eval.measure.engine_worker import Worker, WorkerError, question, steps_of, worker_method
from eval.measure.run_journal import run_from_line
from eval.measure.runs import Limits

ROOT = Path(__file__).parents[1]
FAKE = {"python": sys.executable, "module": "tests.fake_engine"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of our chain beside an engine that serves the same head, one that is not there, and one that fails."""
    folder = tmp_path_factory.mktemp("engines")
    target = tiny_run.save_target(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    save_checkpoint(folder / "head", EagleHead(target.config), make_config("eagle", {}, target))
    prompts = write(folder / "prompts.jsonl", [sharegpt(f"w{i} w{2 * i} w7", "w1") for i in range(8)])
    head = {"engine": "vllm", "method": "eagle", "checkpoint": str(folder / "head"), "gamma": 2}
    config = {
        "target": {"path": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "prompts": {"file": str(prompts), "count": 4},
        "drafters": [{"label": "chain", "drafter": "eagle", "checkpoint": str(folder / "head"), "tree": "chain"}],
        "engines": [
            {"label": "served", **head, **FAKE, "beside": "chain"},
            {"label": "absent", "engine": "vllm", "python": str(folder / "none")},
            {"label": "broken", "engine": "vllm", "python": sys.executable},  # which has no vLLM
        ],
        "stock_generate": False,
        "temperatures": [0.0],
        "max_new_tokens": 12,
        "warmup": 1,
        "out": str(folder / "out"),
    }
    assert run(eval.engines.main, config) == 0
    return folder, json.loads((folder / "out" / "report.json").read_text())


def test_the_report_names_engines_and_reasons(finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches a silent report, our checkpoint handed over as it is, and a context that cuts prompts."""
    folder, report = finished
    facts, page = report["environment"], (folder / "out" / "report.md").read_text()
    why, served = facts["engines_left_out"], facts["engines"]["served"]
    assert why["absent"] == f"not installed: there is no {folder / 'none'} (make engines, see docs/engines.md)"
    assert "No module named 'vllm'" in why["broken"] and list(facts["engines"]) == ["served"]
    assert "- left out: absent: not installed" in page
    assert json.loads((Path(served["drafter"]) / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert served["context"] >= facts["prompt_set"]["prompt_tokens"]["max"] + 12 + 2
    assert "## Acceptance by depth in two engines" in page and "| difference, in standard errors |" in page


def test_an_engine_has_a_row_by_our_counts(finished: tuple[Path, dict[str, Any]]) -> None:
    """Catches an engine decoded with other limits than ours, a tau by another rule, and no mark of what it is."""
    folder, report = finished
    plain, chain, served = report["rows"]
    assert served["drafter"] == "served"
    assert served["engine"] == "Fake 1.0"
    assert served["new_tokens"] == plain["new_tokens"] == chain["new_tokens"]
    assert served["decoded_tokens"] == plain["decoded_tokens"]
    assert served["exact_match"] == 1.0
    assert served["tau"] == pytest.approx(served["decoded_tokens"] / served["steps"])
    assert 1.5 < served["tau"] <= 2.0  # steps of one and of three tokens in turns, the last one cut
    assert served["n_alpha"][1] == 1.0
    lines = [json.loads(line) for line in (folder / "out" / "measurements.jsonl").read_text().splitlines()[1:]]
    theirs = [line for line in lines if line["method"] == "served"]
    assert served["tokens_per_second"] == pytest.approx(11 * 4 / sum(line["decode_seconds"] for line in theirs))
    page = (folder / "out" / "report.md").read_text()
    assert "| served (Fake 1.0) | 0 |" in page
    assert "served (Fake 1.0): 4 of 4 greedy outputs are plain decoding's" in page


def test_steps_are_put_together_from_commits_and_verifications() -> None:
    """Catches steps without a draft taken for failed drafts, and acceptance lowered by the limit that cut a step."""
    steps = steps_of([1, 3, 1, 2], [4, 3, 5], [2, 0, 4])
    assert [(step.drafted, step.accepted, step.committed) for step in steps] == [
        (0, 0, 1),
        (4, 2, 3),
        (3, 0, 1),
        (5, 4, 2),
    ]
    assert [step.drafted for step in steps_of([1, 1], [], [])] == [0, 0]
    with pytest.raises(ValueError, match="step 0 gave 3 tokens, more than its verification"):
        steps_of([3, 1], [2], [1])
    with pytest.raises(ValueError, match="1 verifications belong to no step"):
        steps_of([1, 1], [2, 2, 2], [0, 0, 0])


@pytest.fixture
def simple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    monkeypatch.setenv("FAKE_ENGINE", "simple")
    return lambda **job: Worker(Path(sys.executable), "tests.fake_engine", job, tmp_path / "log")


def test_a_worker_that_fails_says_why(simple: Callable[..., Worker], tmp_path: Path) -> None:
    """Catches a run that waits for ever for a dead engine, or ends with nothing but a broken pipe."""
    with simple() as worker:
        assert worker.ask(question([3], 7, 0.0, 4))["tokens"] == [7]
        made = worker_method(worker, 0.0, Limits(4), 9)([[3]], 8)
        assert (made.tokens, made.trace, made.prefill_seconds, made.decode_seconds) == ([8], None, 0.1, 0.2)
        with pytest.raises(WorkerError, match="ValueError: a prompt of two lines"):
            worker.ask(question([14], 0, 0.0, 4))
        with pytest.raises(WorkerError, match="ValueError: a prompt of two lines"):  # it has ended: why, is said again
            worker.ask(question([3], 0, 0.0, 4))
    with simple() as worker, pytest.raises(WorkerError, match="without an answer .status 9.; .*log: out of memory"):
        worker.ask(question([13], 0, 0.0, 4))
    with simple() as worker:
        made = worker_method(worker, 0.0, Limits(4), 9)([[3]], 9)
        assert str(made.failure).startswith("token 9, and the target has 9 (see ")
    with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'engine'"), simple(fails=True):
        pass
    with pytest.raises(WorkerError, match="none cannot be started"), Worker(Path("/none"), "x", {}, tmp_path / "log"):
        pass


def test_workers_need_nothing_of_ours() -> None:
    """Catches a worker that imports torch, pydantic or the library at its start: an engine's environment has others."""
    allowed, shared = set(sys.stdlib_module_names) | {"eval", "data_prep"}, "data_prep.common.other_python"
    workers = sorted(Path(str(eval.engine_workers.__file__)).parent.glob("*.py"))
    for file in (*workers, ROOT / f"{shared.replace('.', '/')}.py"):
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, file.name
            own = [name for name in names if name.startswith(("eval", "data_prep"))]
            assert all(name.startswith(("eval.engine_workers", shared)) for name in own)
    for package in ("eval", "data_prep", "data_prep/common"):  # they are imported on the way
        assert len(ast.parse((ROOT / package / "__init__.py").read_text()).body) == 1


ENDS = {
    91: "SIGSEGV ended the engine's process; .*log is empty",
    92: "SIGKILL ended the engine's process",
    93: "no answer from the engine in 4 seconds, so its process was ended",
    94: "the engine answered '.*what is this.*', no JSON object",
    95: "the engine answered '.*no.*answer.*', no JSON object",
    96: "the engine's answer: prefill_seconds: .*finite number",
}


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
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
def test_an_engine_that_dies_has_no_figures(gamma: int, survived: tuple[Path, dict[str, Any]]) -> None:
    """Catches a run that ends, waits for ever, or takes what an engine made before it died for a row's figures."""
    folder, report = survived
    (failure,) = [row for row in report["failures"] if row["drafter"] == f"dies {gamma}"]
    lines = [json.loads(line) for line in (folder / "out" / "measurements.jsonl").read_text().splitlines()[1:]]
    runs = [run_from_line(line) for line in lines if line["method"] == f"dies {gamma}"]
    assert [run.failure for run in runs] == [None, *[failure["reason"]] * 3]
    assert re.search(ENDS[gamma], failure["reason"])
    assert f"dies-{gamma}.log" in failure["reason"]
    page = (folder / "out" / "report.md").read_text()
    assert re.search(rf"\| dies {gamma} \(Mortal 1, Q4\) \| 0 \| failed \|( - \|)+\n", page)
    assert f"dies {gamma} (Mortal 1, Q4), T = 0: no figures, it failed on prompt" in page
