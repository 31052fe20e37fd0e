"""The worked example of CONTRIBUTING.md, taken out of the page and run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from drafters.config import load_config
from eval.speed import SpeedConfig

ROOT = Path(__file__).parents[1]


def example(name: str) -> str:
    """The code block that follows the mention of the file ``name`` in CONTRIBUTING.md."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    found = re.search(rf"^`{re.escape(name)}`.*?^```\w+\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert found, f"CONTRIBUTING.md shows no {name}"
    return found[1]


def test_the_worked_example_passes_the_conformance_suite(tmp_path: Path) -> None:
    """Catches a page that promises one file, one config and one test file while the code has moved on."""
    for name in ("drafters/bigram.py", "tests/test_bigram.py"):
        (tmp_path / Path(name).name).write_text(example(name))
    (tmp_path / "conftest.py").write_text(f"import drafters\ndrafters.__path__.append({str(tmp_path)!r})\n")
    style = ["ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--ignore", "I001", str(tmp_path / "bigram.py")]
    subprocess.run([sys.executable, "-m", *style], check=True)
    options = ["-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider", str(tmp_path / "test_bigram.py")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, "-m", "pytest", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 20  # the suite ran, twice


def test_the_example_config_is_a_speed_config(tmp_path: Path) -> None:
    """Catches a key that eval.speed has renamed since."""
    path = tmp_path / "bigram.yaml"
    path.write_text(example("configs/speed/bigram.yaml"))
    config = load_config(SpeedConfig, path)
    assert [entry.drafter for entry in config.drafters] == ["autoregressive", "bigram"]
