"""What was trained is what is served: our EAGLE checkpoint in vLLM itself, where that is installed (make engines).

Minutes on a busy machine: vLLM binds its threads to cores and compiles the model first.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import status
from test_eval_prompts import sharegpt, write

import data_prep.features
import eval.engines
import eval.entries
from data_prep.store.reader import FeatureStore
from eval.report.sections import differences

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / eval.entries.PYTHONS["vllm"]))
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM is not installed: there is no {PYTHON}")
QUESTIONS = ("What is {} for?", "Show me an example of {}.", "Which arguments does {} take?")
NAMES = ("os.path.join", "collections.deque", "json.dumps", "asyncio.gather", "pathlib.Path.glob", "re.compile")


def measured(folder: Path, drafters: list[dict[str, Any]], engines: list[dict[str, Any]]) -> dict[str, Any]:
    """The report on 16 questions."""
    questions = [sharegpt(text.format(name), "w") for name in NAMES for text in QUESTIONS]
    config = {
        "target": {"path": str(ROOT / "checkpoints" / "stdlib-target"), "dtype": "float32", "device": "cpu"},
        "prompts": {"file": str(write(folder / "prompts.jsonl", questions)), "count": 16},
        "drafters": drafters,
        "engines": [{"engine": "vllm", "python": str(PYTHON)} | engine for engine in engines],
        "stock_generate": False,
        "temperatures": [0.0],
        "max_new_tokens": 96,
        "warmup": 1,
        "out": str(folder / "out"),
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    assert status(eval.engines.main, "--config", folder / "run.yaml") == 0
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    assert not report["environment"]["engines_left_out"]
    return report


def test_the_acceptance_trained_is_the_acceptance_served(tmp_path: Path) -> None:
    """Catches an export that vLLM loads without a word and drafts nonsense with, and acceptance counted otherwise."""
    head = str(ROOT / "checkpoints" / "stdlib-eagle")
    drafters = [{"label": "ours", "drafter": "eagle", "checkpoint": head, "tree": "chain", "depth": 5}]
    engines = [{"label": "theirs", "method": "eagle", "checkpoint": head, "gamma": 5, "beside": "ours"}]
    report = measured(tmp_path, drafters, engines)
    _, ours, theirs = report["rows"]
    apart = differences(ours, theirs)
    assert len(apart) == 5
    assert max(map(abs, apart)) < 3.5, apart
    assert theirs["tau"] == pytest.approx(ours["tau"], rel=0.05)
    assert ours["tau"] > 1.8  # so that there is something to compare


def test_features_are_our_own(tmp_path: Path) -> None:
    """Catches a connector that vLLM does not load, blocks read in another layout, and states of another layer: exact to
    float32's rounding, over dialogues that share a prefix, in shards of a few."""
    prefix = "Here is a question about Python. "
    dialogues = [sharegpt(prefix + text.format(name), name * 20) for name in NAMES for text in QUESTIONS]
    settings = {
        "target": str(ROOT / "checkpoints" / "stdlib-target"),
        "dtype": "float32",
        "splits": {"train": str(write(tmp_path / "train.jsonl", dialogues))},
        "exit_layers": [1, 3],
        "max_length": 256,
        "batch_tokens": 300,
        "shard_tokens": 900,
        "vllm": {"python": str(PYTHON), "options": {"enforce_eager": True}},
    }
    for engine in ("own", "vllm"):
        file = tmp_path / f"{engine}.yaml"
        file.write_text(yaml.safe_dump(settings | {"engine": engine, "out": str(tmp_path / engine)}))
        assert status(data_prep.features.main, "--config", file) == 0
    ours, theirs = (FeatureStore.open(tmp_path / engine / "train") for engine in ("own", "vllm"))
    assert len(theirs.manifest.shards) == len(ours.manifest.shards) > 2
    for one, other in zip(ours, theirs, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        for a, b in ((one.features, other.features), *((one.taps[layer], other.taps[layer]) for layer in (1, 3))):
            assert (a - b).abs().max() < 2e-5 * a.abs().max()
