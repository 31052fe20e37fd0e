"""python -m data_prep.inspect: what it says of whole, half-written and damaged stores, and how it marks the mask."""

import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from test_features import run, write_config
from test_store_ranks import LENGTHS, work
from transformers import AutoTokenizer

from data_prep import inspect
from data_prep.common.ranks import Rank
from data_prep.store import inspection
from data_prep.store.manifest import read_manifest
from data_prep.store.reader import FeatureStore


@pytest.fixture
def made(tmp_path: Path, target_folder: Path) -> Path:  # noqa: F811
    """A folder of two finished int8 stores."""
    run(write_config(tmp_path, target_folder, store_dtype="int8"))
    return tmp_path / "out"


def test_what_is_in_a_folder_of_splits(
    made: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_features_that_are_not_finite(tmp_path: Path, features: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a store with NaN in it, as another program may write one, that is found fine."""
    shutil.copytree(features / "train", tmp_path / "train")
    shard = tmp_path / "train" / "shard-00000.safetensors"
    tensors = load_file(shard)
    tensors["tap_2"][40, 7] = torch.nan
    save_file(tensors, shard)
    assert inspect.main([str(tmp_path / "train"), "--sample", "1000"]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"Result: NOT fine: {tmp_path / 'train'}: NaN or infinite values in tap 2; make the features again"


def test_statistics_of_the_states(made: Path) -> None:
    """Catches a mean over dialogues in place of tokens, a largest value without the negative ones, and taps swapped."""
    store = FeatureStore.open(made / "train")
    table = inspection.states_table(inspection.state_sums(store, list(range(len(store)))), len(store))
    cells = {name: column for name, *column in zip(*(column.cells for column in table.columns), strict=True)}
    for name, values in (
        ("features", torch.cat([dialogue.features for dialogue in store]).double()),
        ("tap 2", torch.cat([dialogue.taps[2] for dialogue in store]).double()),
    ):
        mean, largest, zeros = cells[name]
        assert float(mean) == pytest.approx(values.abs().mean().item(), rel=1e-3)
        assert float(largest) == pytest.approx(values.abs().max().item(), rel=1e-3)
        assert float(zeros.rstrip("%")) / 100 == pytest.approx((values == 0).double().mean().item(), abs=1e-4)
    assert inspection.spread(10, 4) == [0, 2, 5, 7] and inspection.spread(3, 64) == [0, 1, 2]


def test_a_flipped_byte(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches --verify that looks at sizes only, stops at the first bad store, or ends with status 0."""
    assert inspect.main([str(made)]) == 0
    for split, name in (("train", "shard-00001.safetensors"), ("heldout", "shard-00000.safetensors")):
        data = bytearray((made / split / name).read_bytes())
        data[-7] ^= 4
        (made / split / name).write_bytes(data)
    capsys.readouterr()
    assert inspect.main([str(made)]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "Result: fine (files and sizes are right; --verify reads every byte)"
    assert inspect.main([str(made), "--verify"]) == 1
    printed, errors = capsys.readouterr()
    said = printed.splitlines()[-1]
    assert said.startswith(f"Result: NOT fine: {made / 'heldout'}: the content of shard-00000.safetensors is not what")
    assert said.endswith(", and 1 more, named above")
    for split, name in (("train", "shard-00001"), ("heldout", "shard-00000")):
        assert f"error: {made / split}: the content of {name}.safetensors is not what was written" in errors


def test_a_cut_shard_and_other_mistakes(made: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Catches a stack trace where a line would do, and a truncated shard that hides what the manifest still tells."""
    shard = made / "train" / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])
    capsys.readouterr()
    assert inspect.main([str(made / "train")]) == 1
    printed = capsys.readouterr()
    assert "12 " in printed.out and f"{shard} has {shard.stat().st_size:,} bytes, the manifest says" in printed.err
    assert inspect.main([str(made / "heldout"), "--dialogue", "3"]) == 1
    assert "holds dialogues 0 to 2" in capsys.readouterr().err
    with pytest.raises(ValueError, match=f"no feature store at {tmp_path / 'none'}: it does not exist"):
        inspect.main([str(tmp_path / "none")])


def test_a_half_written_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a store that cannot be looked at while it is written, or that looks finished."""
    path = tmp_path / "store"
    work(path, Rank(0, 2), most=2)
    assert inspect.main([str(path), "--verify"]) == 0
    printed = capsys.readouterr().out
    there = read_manifest(path).dialogues
    said = printed.splitlines()[-1]
    assert said == f"Result: fine as far as it goes (every byte is as it was written), but not finished: {path}"
    assert f"half written: {there} of {len(LENGTHS)} dialogues so far" in " ".join(printed.split())
    assert "Not decoded: no tokenizer could be loaded from 'some/target'" in " ".join(printed.split())
    empty = tmp_path / "empty"
    work(empty, Rank(0, 2), most=0)
    assert inspect.main([str(empty)]) == 0
    assert "No dialogue has been written yet." in capsys.readouterr().out


def test_colour_and_what_a_terminal_must_not_see(made: Path, target_folder: Path) -> None:  # noqa: F811
    """Catches colours on the user's words, colours where NO_COLOR or a pipe forbids them, and escape codes in data."""
    store = FeatureStore.open(made / "heldout")
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    plain = inspection.decoded(store[0], tokenizer, coloured=False).plain
    assert plain.replace("[[", "").replace("]]", "") == tokenizer.decode(store[0].input_ids)
    trained = tokenizer.decode(store[0].input_ids[store[0].loss_mask])
    assert "".join(part.partition("]]")[0] for part in plain.split("[[")[1:]) == trained
    text = inspection.decoded(store[0], tokenizer, coloured=True)
    assert "".join(text.plain[span.start : span.end] for span in text.spans) == trained
    console = Console(force_terminal=True, color_system="standard", width=200)
    with console.capture() as captured:
        console.print(text)
    assert "\x1b[1;32m" in captured.get()
    assert inspection.printable("a\x1b[2J\x07b\n\tü") == "a�[2J�b\n\tü"


def test_another_tokenizer_is_noticed(
    made: Path,
    target_folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches text decoded with a tokenizer that never made these ids, without a word about it."""
    other = AutoTokenizer.from_pretrained(target_folder)
    other.add_tokens(["<new>"])
    other.save_pretrained(tmp_path / "other")
    capsys.readouterr()
    assert inspect.main([str(made / "heldout"), "--tokenizer", str(tmp_path / "other")]) == 0
    assert "is another tokenizer than the store's" in capsys.readouterr().out
