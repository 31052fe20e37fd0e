"""drafters/common/paths.py and drafters/common/files.py: what may be opened, and who may read what was written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from data_prep.dialogues.encoding import load_tokenizer
from drafters import TargetModel, load_frozen_ends
from drafters.common.paths import names_only
from drafters.drafting.draft_model import load_draft_model
from drafters.heads.eagle.module import EagleHead
from drafters.hub.checkpoint import load_checkpoint, load_state, make_config, save_checkpoint

OPENERS: dict[str, Callable[[str], object]] = {
    "target": lambda path: TargetModel.from_pretrained(path, "float32", "cpu"),
    "frozen ends": lambda path: load_frozen_ends(path),
    "tokenizer": lambda path: load_tokenizer(path),
    "draft model": lambda path: load_draft_model(TargetModel(tiny.build("llama"), name="tiny"), path),
}


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin", "model.gguf"])
def test_a_file_is_no_model(opener: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a file that reaches torch.load (pickle) because a model's path names it in place of its folder."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    tiny.build("llama").save_pretrained(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=rf"{name}' is a file; give its folder: '{tmp_path}'"):
        OPENERS[opener](str(tmp_path / name))


@pytest.mark.parametrize("opener", ["target", "frozen ends"])
@pytest.mark.parametrize("shard", ["../outside.safetensors", "/outside.safetensors", "weights.bin", 7])
def test_an_index_names_weights_beside_it(
    shard: object, opener: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches weights that are read from anywhere, or unpickled, because a model's index says so."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    tiny.build("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json names .* as a file of weights; it must be a \.safetensors"):
        OPENERS[opener](str(tmp_path))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("./run.sh --foo a/b", "run.sh --foo a/b"),
        ("/home/u/run.sh --foo a/b", "run.sh --foo a/b"),
        ("/no_think please answer yes/no", "no_think please answer yes/no"),
        ("/home/u/a, /home/u/b", "a, b"),
        ("/home/u/my runs/x", "x"),
        ("out=/home/u/my runs/x", "out=x"),
        ("a --out=/home/u/x --in=/home/u/y", "a --out=x --in=y"),
        ("C:\\My Documents\\x", "x"),
        ("\\\\srv\\share\\x", "x"),
        ("of \\\\srv\\share\\x, y", "of x, y"),
        ("-I/home/u/x", "-Ix"),
        ("cc -I/home/u/x -L~/lib/y", "cc -Ix -Ly"),
        ("a value of -1/2, 3-a/b/c, https://host/a/b and owner/name", None),
    ],
)
def test_a_published_text_has_no_folders(text: str, shown: str | None) -> None:
    """Catches words lost behind a path at the beginning, and a path on a server or behind an option that is sent."""
    assert names_only(text) == (text if shown is None else shown)


def test_weights_are_no_whole_numbers(tmp_path: Path) -> None:
    """Catches a drafter or a target whose weights lost their fractions: it loads, and drafts or answers rubbish."""
    target = TargetModel(tiny.build("llama"), name="tiny")
    save_checkpoint(tmp_path / "head", EagleHead(target.config), make_config("eagle", {}, target))
    with pytest.raises(ValueError, match=r"fc\.weight: int8, not bfloat16") as caught:
        cast(tmp_path / "head" / "model.safetensors", "fc.weight", torch.int8)
        load_state(EagleHead(target.config).bfloat16(), load_checkpoint(tmp_path / "head")[1], str(tmp_path / "head"))
    assert "layer" not in str(caught.value)  # one tensor alone
    tiny.build("llama").save_pretrained(tmp_path / "target")
    cast(tmp_path / "target" / "model.safetensors", "model.embed_tokens.weight", torch.int32)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is stored as I32, and weights must be floating"):
        TargetModel.from_pretrained(str(tmp_path / "target"), "float32", "cpu")
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is stored as I32"):
        load_frozen_ends(str(tmp_path / "target"))


def cast(file: Path, name: str, dtype: torch.dtype) -> None:
    """Store the tensor ``name`` of a safetensors file in another dtype."""
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(dtype)}, file, {"format": "pt"})
