"""What was trained is what is served: our EAGLE checkpoint in vLLM itself, where that is installed (make engines).

Minutes on a busy machine: vLLM binds its threads to cores and compiles the model first.
"""

import json
import os
from pathlib import Path

import pytest
import yaml
from programs import status
from test_eval_prompts import sharegpt, write

import eval.engines
from eval.report.acceptance import differences

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / eval.engines.PYTHONS["vllm"]))
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"vLLM is not installed: there is no {PYTHON}")
QUESTIONS = ("What is {} for?", "Show me an example of {}.", "Which arguments does {} take?")
NAMES = ("os.path.join", "collections.deque", "json.dumps", "asyncio.gather", "pathlib.Path.glob", "re.compile")


def test_the_acceptance_trained_is_the_acceptance_served(tmp_path: Path) -> None:
    """Catches an export that vLLM loads without a word and drafts nonsense with, and acceptance counted otherwise."""
    questions = [sharegpt(text.format(name), "w") for name in NAMES for text in QUESTIONS]
    head = str(ROOT / "checkpoints" / "stdlib-eagle")
    config = {
        "target": {"path": str(ROOT / "checkpoints" / "stdlib-target"), "dtype": "float32", "device": "cpu"},
        "prompts": {"file": str(write(tmp_path / "prompts.jsonl", questions)), "count": 16},
        "drafters": [{"label": "ours", "drafter": "eagle", "checkpoint": head, "tree": "chain", "depth": 5}],
        "engines": [
            {"label": "theirs", "engine": "vllm", "method": "eagle", "checkpoint": head, "gamma": 5}
            | {"python": str(PYTHON), "beside": "ours"}
        ],
        "stock_generate": False,
        "temperatures": [0.0],
        "max_new_tokens": 96,
        "warmup": 1,
        "out": str(tmp_path / "out"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    assert status(eval.engines.main, "--config", tmp_path / "run.yaml") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert not report["environment"]["engines_left_out"]
    _, ours, theirs = report["rows"]
    apart = differences(ours, theirs)
    assert len(apart) == 5
    assert max(map(abs, apart)) < 3.5, apart
    assert theirs["tau"] == pytest.approx(ours["tau"], rel=0.05)
    assert ours["tau"] > 1.8  # so that there is something to compare
