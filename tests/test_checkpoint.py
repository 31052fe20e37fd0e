"""Checkpoints on disk: what is saved is what is loaded, and nothing else loads."""

import errno
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drafters.hub import checkpoint
from drafters.hub.checkpoint import check_target, load_checkpoint, load_state, make_config, save_checkpoint


@dataclass
class Target:
    """A target's identity, without its weights."""

    name: str = "org/target-7b"
    revision: str | None = None
    hidden_size: int = 64
    vocab_size: int = 97
    num_layers: int = 4
    print_: str = "aaaa"

    def fingerprint(self) -> str:
        return self.print_


def config(**changes: Any) -> dict[str, Any]:
    return make_config("eagle", {"bias": False}, Target(), {"steps": 10}) | changes


class Head(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width, bias=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "drafter", Head(), config(), dtype=None)
    return tmp_path / "drafter"


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_round_trip(tmp_path: Path, dtype: torch.dtype | None) -> None:
    """Catches weights lost, renamed or rounded more than the chosen dtype rounds, and a config that changes."""
    head = Head()
    save_checkpoint(tmp_path / "d", head, config(), dtype)
    loaded_config, state = load_checkpoint(tmp_path / "d")
    assert loaded_config == config()
    assert state.keys() == head.state_dict().keys()
    for name, value in head.state_dict().items():
        assert torch.equal(state[name], value.to(dtype or torch.float32)), name
    other = Head()
    load_state(other, state)
    assert other.fc.weight.dtype == torch.float32  # the module keeps its own
    assert torch.equal(other.fc.weight, head.fc.weight.to(dtype or torch.float32).float())


def test_shared_and_strided_weights_are_saved(tmp_path: Path) -> None:
    """Catches safetensors' refusal of tied or transposed tensors, which would end a run at its last line."""
    tied = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    tied["b"].weight = tied["a"].weight
    tied["a"].weight.data = torch.randn(4, 4).T
    save_checkpoint(tmp_path, tied, config(), dtype=None)
    state = load_checkpoint(tmp_path)[1]
    assert torch.equal(state["a.weight"], tied["a"].weight)
    assert torch.equal(state["b.weight"], tied["a"].weight)


def save_and_die(folder: Path, last: str) -> None:
    """Save over the checkpoint in ``folder`` and kill -9 this process right after its system call named ``last``."""
    calls = {"unlink": 0, "replace": 0}

    def dying(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Path, *arguments: Any, **options: Any) -> Any:
            result = original(self, *arguments, **options)
            calls[name] += 1
            if last == f"{name} {calls[name]}":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    Path.unlink = dying("unlink", Path.unlink)  # type: ignore[method-assign]
    Path.replace = dying("replace", Path.replace)  # type: ignore[method-assign]
    save_checkpoint(folder, Head(), config(training={"steps": 20}), dtype=None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.parametrize("last", ["unlink 1", "replace 1", "replace 2"])
def test_a_killed_save_never_mixes(folder: Path, last: str) -> None:
    """Catches a save that, killed between its two files, leaves new weights under the old config (or the reverse)."""
    before = load_checkpoint(folder)[1]["fc.weight"]
    child = os.fork()
    if child == 0:
        try:
            save_and_die(folder, last)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    try:
        loaded, state = load_checkpoint(folder)
    except ValueError as error:
        assert "config.json" in str(error)
    else:
        assert last == "replace 2"
        assert loaded["training"] == {"steps": 20}
        assert not torch.equal(state["fc.weight"], before)
    save_checkpoint(folder, Head(), config())  # and the folder can be saved into again
    load_checkpoint(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("full", ["config.json", "model.safetensors"])
def test_a_full_disk_keeps_the_older_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    """Catches the old config taken away before the new one is on the disk, and an error that names the other file."""
    before = load_checkpoint(folder)[1]["fc.weight"]
    no_space = OSError(errno.ENOSPC, "No space left on device")

    def write_text(self: Path, *arguments: Any, **options: Any) -> int:
        raise no_space

    def save_tensors(*_: Any) -> None:
        raise no_space

    if full == "config.json":
        monkeypatch.setattr(Path, "write_text", write_text)
    else:
        monkeypatch.setattr(checkpoint, "save_tensors", save_tensors)
    with pytest.raises(OSError, match=re.escape(str(folder / full))):
        save_checkpoint(folder, Head(), config())
    assert torch.equal(load_checkpoint(folder)[1]["fc.weight"], before)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_diverged_weights_are_refused(folder: Path) -> None:
    """Catches a diverged run that is saved, published and only noticed when no draft is ever accepted."""
    head = Head()
    head.norm.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match=r"NaN or infinite values in norm\.weight"):
        save_checkpoint(folder, head, config())
    state = load_checkpoint(folder)[1]  # the older checkpoint is still whole
    with pytest.raises(ValueError, match=r"fc\.bias"):
        load_state(Head(), state | {"fc.bias": torch.full((8,), float("inf"))})


def test_strict_state(folder: Path) -> None:
    """Catches a silent strict=False: a head with one random layer still runs, and drafts badly without a word."""
    state = load_checkpoint(folder)[1]
    wrong = {name: value for name, value in state.items() if name != "fc.bias"}
    wrong |= {"fc.scale": torch.ones(1), "norm.weight": torch.ones(9)}
    head = Head()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_state(head, wrong, source="user/d")
    for part in (
        "user/d",
        "Head",
        "missing weights: fc.bias",
        "unexpected weights: fc.scale",
        "norm.weight: [9]",
        "[8]",
    ):
        assert part in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"holds no config\.json"),
        ("{", "not valid JSON"),
        (json.dumps({"model_type": "llama", "num_hidden_layers": 1}), "not a drafter of this toolkit.*llama"),
        (json.dumps(config(format_version=2)), "format_version 2, and this toolkit reads 1"),
        (json.dumps({key: value for key, value in config().items() if key != "target"}), "missing key 'target'"),
        (json.dumps(config(target=config()["target"] | {"hidden_size": "wide"})), r"target\.hidden_size"),
    ],
)
def test_broken_config(folder: Path, content: str | None, message: str) -> None:
    """Catches a KeyError deep in a constructor where the file should have been named."""
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_checkpoint(folder)
    assert str(folder) in str(caught.value)


def test_broken_weights(folder: Path) -> None:
    """Catches a cut-off download and a pickled checkpoint: the one must be named, the other must never be read."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match="cannot be read"):
        load_checkpoint(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors; found: config\.json"):
        load_checkpoint(folder)
    torch.save({"fc.weight": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*convert it"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        (
            Target(name="org/wide", hidden_size=128, vocab_size=50),
            ["hidden size 64 against 128", "vocabulary 97 against 50"],
        ),
        (Target(name="org/deep", num_layers=5), ["layers 4 against 5"]),
        (Target(name="org/tuned", print_="bbbb"), ["fingerprint aaaa", "fingerprint bbbb", "other weights"]),
    ],
)
def test_wrong_target(other: Target, parts: list[str]) -> None:
    """Catches a drafter run beside another target: lossless, so nothing looks wrong, but it drafts for nothing."""
    check_target(config(), Target(name="/a/copy/of/it"))  # the same weights under another name are the same target
    with pytest.raises(ValueError) as caught:
        check_target(config(), other)
    for part in [*parts, "org/target-7b", other.name, "train a drafter for"]:
        assert part in str(caught.value)
