"""The door to the CPU kernels: nothing else knows them, and the library works without their folder."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_repository import ROOT, imported, modules

from drafters.model import backend

DOOR = "drafters/model/backend.py"
# What asks a processor for its instructions. common/precision.py chooses dtypes, for which it has to.
QUESTIONS = ("get_cpu_capability", "_is_amx", "_is_avx", "cpuinfo")
METHODS = "autoregressive", "eagle", "medusa"
WITHOUT = """
import sys, pytest
status = pytest.main(sys.argv[1:])
import drafters.model.backend as backend
print(backend.__file__, backend.available())
sys.exit(status)
"""


def test_the_kernels_have_one_door() -> None:
    """Catches a second file that imports the kernels, or chooses its way by the processor's instructions."""
    known = modules()
    others = {name: path for name, path in known.items() if not name.startswith("drafters.cpu")}
    importing = [name for name in others if any("drafters.cpu" in other for other in imported(name, known, late=True))]
    assert importing == ["drafters.model.backend"]
    asking = {name for name, path in others.items() if any(question in path.read_text() for question in QUESTIONS)}
    assert asking <= {"drafters.common.precision", "drafters.common.provenance"}
    functions = [node for node in ast.parse((ROOT / DOOR).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert len(functions) <= 6


def test_every_door_has_torch_behind_it() -> None:
    """Catches a tensor that the kernels cannot take handed to them, and an argmax that differs from torch's."""
    half = torch.randn(64, 64).half()
    assert backend.pack(half) is None and backend.attention(half, 64, 1) is None
    assert backend.pack(torch.randn(64, 64)) is None and backend.join_layers([], ()) == []
    for logits in (half, half.double(), torch.zeros(0, 5)):
        assert torch.equal(backend.most_likely(logits), logits.argmax(-1))


@pytest.mark.long
def test_the_library_works_without_the_folder(tmp_path: Path) -> None:
    """Catches a drafter or a target that needs the kernels: they are optional, torch computes the same."""
    for package in ("drafters", "data_prep", "train", "eval", "tests"):
        unwanted = shutil.ignore_patterns("__pycache__", *(["cpu"] if package == "drafters" else []))
        shutil.copytree(ROOT / package, tmp_path / package, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    assert not (tmp_path / "drafters" / "cpu").exists()
    files = [f"tests/test_conformance_{method}.py" for method in METHODS]
    options = ["-q", "-p", "no:cacheprovider", *files, "-k", "Autoregressive or ChainSome or (medusa and StaticSome)"]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *options], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].split() == [str(tmp_path / DOOR), "False"]
