"""The worked examples of CONTRIBUTING.md, taken out of the page and run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nursery
import pytest
import tiny_run

from drafters.config import load_config
from eval.configs import SpeedConfig
from train.core.config import TrainConfig

ROOT = Path(__file__).parents[1]
FILES = (
    "drafters/methods/bigram.py",
    "tests/test_bigram.py",
    "drafters/heads/step.py",
    "drafters/methods/step.py",
    "train/step.py",
    "train/plan/templates/step.yaml",
    "tests/test_step.py",
)
# Found without another edit: the capture of states, the checks before a run, the benchmark of training, train.start.
PROGRAMS = """
import tiny_run
from test_start import Plan, described

from data_prep.configs import FeatureKeys
from drafters.config import validate
from drafters.methods import taps_for
from train.tools import throughput


def test_programs_know_the_method(tmp_path, capsys):
    target = tiny_run.save_target(tmp_path / "target")
    features = tiny_run.write_stores(tmp_path / "features", target)
    line = tiny_run.command("step", tmp_path, tiny_run.settings(target.name, features, tmp_path / "run"), "--dry-run")
    assert tiny_run.main("step", [*line[2:], "--device", "H200"]) == 0
    said = capsys.readouterr().out
    assert "StepModule, 9,360 parameters" in said and "GFLOP a token" in said
    shape = ["--shape", "hidden=32,vocab=101,heads=4,kv_heads=2,intermediate=48", "--method", "step"]
    assert throughput.main([*shape, "--rounds", "1", "--steps", "1", "--tokens", "100", "precision=float32"]) == 0
    assert "times the tokens/s" in capsys.readouterr().out


def test_its_states_are_captured():
    keys = validate(FeatureKeys, {"target": "t", "splits": {"train": "d"}, "for": ["step"]}, "test")
    assert taps_for(keys.methods, 12) == [6]


def test_a_start(tmp_path, monkeypatch):
    from transformers import AutoConfig

    monkeypatch.setattr("train.plan.facts.load_config_only", AutoConfig.from_pretrained)
    monkeypatch.setattr("train.plan.facts.load_tokenizer", lambda name: None)
    target = tiny_run.save_target(tmp_path / "target")
    made = Plan(tmp_path, described(target.name, monkeypatch), method="step")
    assert made.config("features")["exit_layers"] == [2]
    assert made.config("speed")["drafters"][2:] == [
        {"label": "step", "drafter": "step", "checkpoint": f"{tmp_path}/mine/step", "draft_dtype": "int8"}
    ]
"""


def example(name: str) -> str:
    """The code block that follows the mention of the file ``name`` in CONTRIBUTING.md."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(rf"^`{re.escape(name)}`.*?^```\w+\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert found, f"CONTRIBUTING.md shows no {name}"
    return found[1]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples' files, which pytest takes for a part of the packages."""
    folder = tmp_path_factory.mktemp("examples")
    paths = []
    for name in FILES:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(example(name))
    for package in ("drafters.heads", "drafters.methods", "train"):
        place = folder / package.replace(".", "/")
        paths.append(f"import {package}\n{package}.__path__.append({str(place)!r})\n")
    for line in re.findall(r'`("\w+": Method\([^`]+\))`', (ROOT / "CONTRIBUTING.md").read_text()):
        paths.append(f"drafters.methods.METHODS |= {{{line.replace('Method', 'drafters.methods.Method')}}}\n")
    (folder / "tests" / "conftest.py").write_text("".join(paths))
    (folder / "tests" / "test_programs_of_examples.py").write_text(PROGRAMS)
    return folder


def test_the_worked_examples_pass_their_tests(copied: Path) -> None:
    """Catches a page that says one file, one config and one test file while the code has moved on."""
    style = ["ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--ignore", "I001,E402"]
    subprocess.run(
        [sys.executable, "-m", *style, *(copied / name for name in FILES if name.endswith(".py"))], check=True
    )
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", "-n0", str(copied / "tests")]
    log = copied / "pytest.log"
    status = nursery.run("tiny_run.be_pytest", json.dumps(options), tiny_run.environment(), log, 300)
    assert status == 0, log.read_text()
    assert int(re.search(r"(\d+) passed", log.read_text())[1]) > 50  # the suite ran, three times


def test_a_new_methods_mistyped_key_is_answered_without_torch(copied: Path, tmp_path: Path) -> None:
    """Catches an example whose mistyped key waits for torch."""
    (tmp_path / "run.yaml").write_text(example("configs/step/stdlib.yaml"))
    cases = json.dumps([["--config", "run.yaml", "learning_rat=1"]])
    found = f"import drafters.heads; drafters.heads.__path__.append({str(copied / 'drafters/heads')!r})"
    runs = f"{found}; import runpy; runpy.run_path({str(ROOT / 'tests/without_torch.py')!r}, run_name='__main__')"
    line = [sys.executable, "-c", runs, str(copied / "train" / "step.py"), cases]
    done = subprocess.run(
        line, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert "unknown key 'learning_rat'; did you mean 'learning_rate'" in done.stdout, done.stdout


def test_the_examples_configs_are_read(tmp_path: Path) -> None:
    """Catches a key that eval.speed or training has renamed since."""
    path = tmp_path / "run.yaml"
    path.write_text(example("configs/speed/bigram.yaml"))
    config = load_config(SpeedConfig, path)
    assert [entry.drafter for entry in config.drafters] == ["autoregressive", "bigram"]
    path.write_text(example("configs/step/stdlib.yaml").partition("head:")[0])  # without the example's own keys
    assert load_config(TrainConfig, path).minutes == 3
