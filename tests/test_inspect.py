"""python -m data_prep.inspect: what it says of whole, half-written and damaged stores, and how it marks the mask."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_features import run, write_config

from data_prep import inspect
from data_prep.store.manifest import read_manifest


@pytest.fixture
def made(tmp_path, target_folder):  # noqa: F811
    """A folder of two finished int8 stores."""
    run(write_config(tmp_path, target_folder, store_dtype="int8"))
    return tmp_path / "out"


def test_what_is_in_a_folder_of_splits(made, capsys, monkeypatch):
    """Catches a split that is left out, counts of another store, and a mask that is shown off its tokens."""
    monkeypatch.setenv("COLUMNS", "300")
    capsys.readouterr()
    assert inspect.main([str(made), "--verify", "--sample", "5"]) == 0
    printed = capsys.readouterr().out
    manifest = read_manifest(made / "train")
    for expected in (
        f"{made / 'train'} ",
        f"{made / 'heldout'} ",
        f"{manifest.tokens:,}, {manifest.response_tokens / manifest.tokens:.1%} of them the assistant's",
        f"{manifest.size:,} bytes, {manifest.size / manifest.tokens:,.1f} a token",
        "broken_json 1, empty_dialogue 1",
        f"int8, features and taps [2], {manifest.hidden_size} wide",
        f"fingerprint {manifest.target_fingerprint}",
        f"torch {torch.__version__}",
        f"All {len(manifest.shards)} shards are as they were written",
        "[[It is four.<|im_end|>]]",
    ):
        assert expected in printed
    assert "\x1b" not in printed
    assert printed.splitlines()[-1] == "Result: fine (every byte is as it was written)"


def test_features_that_are_not_finite(tmp_path, features, capsys):
    """Catches a store with NaN in it, as another program may write one, that is found fine."""
    shutil.copytree(features / "train", tmp_path / "train")
    shard = tmp_path / "train" / "shard-00000.safetensors"
    tensors = load_file(shard)
    tensors["tap_2"][40, 7] = torch.nan
    save_file(tensors, shard)
    assert inspect.main([str(tmp_path / "train"), "--sample", "1000"]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"Result: NOT fine: {tmp_path / 'train'}: NaN or infinite values in tap 2; make the features again"


def test_a_flipped_byte(made, capsys):
    """Catches --verify that looks at sizes only, stops at the first bad store, or ends with status 0."""
    assert inspect.main([str(made)]) == 0
    for split, name in (("train", "shard-00001.safetensors"), ("heldout", "shard-00000.safetensors")):
        data = bytearray((made / split / name).read_bytes())
        data[-7] ^= 4
        (made / split / name).write_bytes(data)
    capsys.readouterr()
    assert inspect.main([str(made)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "Result: fine (files and sizes are right; --verify reads all)"
    assert inspect.main([str(made), "--verify"]) == 1
    printed, errors = capsys.readouterr()
    said = printed.splitlines()[-1]
    assert said.startswith(f"Result: NOT fine: {made / 'heldout'}: the content of shard-00000.safetensors is not what")
    assert said.endswith(", and 1 more, named above")
    for split, name in (("train", "shard-00001"), ("heldout", "shard-00000")):
        assert f"error: {made / split}: the content of {name}.safetensors is not what was written" in errors
