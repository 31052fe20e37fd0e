"""Heads that were stored before drafters/heads existed: they load, draft the same tokens, and export the same files.

``tests/before/heads/`` has a head of random weights for each kind of shape. ``tests/before/heads.json`` has their
drafts (greedy, and sampled with a seed), their sections of config.json, and digests of their exported files.
``tests/before/keys.json`` has training configs as they were written, with the section of config.json that each gives.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from drafters import TargetModel, drafter_class, generate, load_drafter
from drafters.heads.keys import READERS
from drafters.hub.checkpoint import load_checkpoint
from drafters.layouts.export import export
from drafters.model.ends import load_frozen_ends
from train.core.task import make_task
from train.core.weights import exported as checkpoint_of

BEFORE = Path(__file__).parent / "before"
RECORDED = json.loads((BEFORE / "heads.json").read_text())
KEYS = json.loads((BEFORE / "keys.json").read_text())
RAW = ("transformers_version",)  # of the environment
ORIGIN = ("drafter", "target")  # names, which depend on the folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a test."""
    for name in ("target", "heads"):
        shutil.copytree(BEFORE / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def target() -> TargetModel:
    return TargetModel.from_pretrained("target", dtype="float32", device="cpu")


def drafts(drafter: Any, **options: Any) -> dict[str, Any]:
    """The trees and tokens of one answer."""
    trees, propose = [], drafter.propose

    def noted(state: Any) -> Any:
        draft = propose(state)
        trees.append([draft.tokens[0].tolist(), draft.parents[0].tolist()])
        return draft

    drafter.propose = noted
    result = generate(drafter.target, drafter, [[3, 11, 12, 4]], max_new_tokens=8, eos_token_id=[], **options)
    drafter.propose = propose
    return {"trees": trees, "tokens": result.tokens[0].tolist()}


@pytest.mark.parametrize("name", RECORDED["drafts"])
def test_stored_heads_draft_what_they_drafted(name: str, target: TargetModel) -> None:
    """Catches a key of config.json or a weight that is read as something else, and another order of random draws."""
    drafter = load_drafter(f"heads/{name}", target)
    if getattr(drafter.settings, "tree", None) == "auto":
        drafter = load_drafter(f"heads/{name}", target, tree="chain")
    found = [drafts(drafter), drafts(drafter, temperature=1.0, seed=3)]
    assert found == RECORDED["drafts"][name]
    drafter.save_pretrained("again")  # type: ignore[attr-defined]
    assert read(drafter.name, load_checkpoint("again")[0]["drafter"]) == read(drafter.name, RECORDED["sections"][name])


def read(method: str, section: dict[str, Any]) -> Any:
    """Shape and options of a section of config.json, with the defaults that it leaves out."""
    kind: Any = drafter_class(method)
    return kind.read_section(section, "test")


def digest(file: Path) -> str:
    """Of the content, without what the environment or the folder puts into config.json."""
    content = file.read_bytes()
    if file.name == "config.json":
        config = {key: value for key, value in json.loads(content).items() if key not in RAW}
        config["made_from"] = {key: value for key, value in config["made_from"].items() if key not in ORIGIN}
        content = json.dumps(config, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def exported(name: str) -> dict[str, dict[str, str]]:
    """By program, the digests of what it loads; programs that cannot serve the head are left out."""
    found = {}
    for to in READERS:
        out = Path(f"{name}-{to}")
        try:
            export(f"heads/{name}", to, out, "target")
        except ValueError:
            continue
        files = [file for file in sorted(out.iterdir()) if file.suffix in (".json", ".safetensors")]
        found[to] = {file.name: digest(file) for file in files}
    return found


@pytest.mark.parametrize("name", RECORDED["exports"])
def test_exports_have_the_bytes_they_had(name: str) -> None:
    """Catches a key or a tensor of an exported head that changed, and a program that is served or refused anew."""
    assert exported(name) == RECORDED["exports"][name]


@pytest.mark.parametrize("case", KEYS, ids=lambda case: case["method"])
def test_keys_of_training_are_read_as_they_were(case: dict[str, Any]) -> None:
    """Catches an old key of a training config that is refused, ignored or read as something else."""
    task = make_task(tiny_run.read(case["method"], case["config"]), load_frozen_ends("target", "float32"))
    section = checkpoint_of(task, task.module.state_dict())[1]
    assert read(case["method"], section) == read(case["method"], case["section"])
