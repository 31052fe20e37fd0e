"""data_prep.features with an engine in its own process: the store equals that of our own dump, also after a kill.

The engine is tests/fake_extraction.py, and vLLM itself in tests/test_vllm.py where that is installed.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fake_extraction import Fake
from test_features import run, write_config

from data_prep import throughput
from data_prep.extraction import process, stores, worker
from data_prep.extraction.shards import Job
from data_prep.store.manifest import read_manifest
from data_prep.store.reader import FeatureStore
from data_prep.store.writer import StoreWriter


class Here:
    """That engine in the tests' own process, which need not import it again."""

    def __init__(self, python: Path, settings: dict[str, Any], folder: Path) -> None:
        self.engine, self.folder, self.jobs = Fake(dict(settings)), folder, 0

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, store: Path, header: Any, spans: Any, split: Any, progress: Any) -> None:
        self.jobs += 1
        Job.write(self.folder / f"{self.jobs}", store, header, spans, split)
        worker.run(self.engine, str(self.folder / f"{self.jobs}"), lambda told: progress(told["tokens"]))


@pytest.fixture
def apart(tmp_path, target_folder, monkeypatch):
    """A config of that engine in a process, in a folder of its own."""
    monkeypatch.setattr(process, "WORKER", "tests.fake_extraction")
    return write_config(tmp_path, target_folder, device=None, engine="vllm", vllm={"python": sys.executable})


@pytest.fixture
def here(apart, monkeypatch):
    """The same without the process."""
    monkeypatch.setattr(stores, "VLLM", Here)
    return apart


def assert_same(here: Path, out: str = "out", atol: float = 1e-4) -> None:
    """Of that engine's stores and our own dump's."""
    run(here, "engine=own", f"out={here.parent / 'own'}")
    for split in ("train", "heldout"):
        theirs, ours = FeatureStore.open(here.parent / out / split), FeatureStore.open(here.parent / "own" / split)
        theirs.verify()
        facts = [store.manifest.model_dump(exclude={"shards", "versions"}) for store in (theirs, ours)]
        assert facts[0] == facts[1]
        assert [shard.tokens for shard in theirs.manifest.shards] == [shard.tokens for shard in ours.manifest.shards]
        for one, other in zip(theirs, ours, strict=True):
            assert one.input_ids.tolist() == other.input_ids.tolist()
            assert one.loss_mask.tolist() == other.loss_mask.tolist()
            torch.testing.assert_close(one.features, other.features, atol=atol, rtol=1e-3)
            torch.testing.assert_close(one.taps[2], other.taps[2], atol=atol, rtol=1e-3)


def test_the_store_is_that_of_our_own_dump(here, capfd):
    """Catches states before the norm, of another layer, block or dialogue, and what is left in the folder."""
    run(here)
    assert_same(here)
    assert sorted(path.name for path in (here.parent / "out").iterdir()) == ["heldout", "train"]
    assert len(read_manifest(here.parent / "out" / "train").shards) > 2
    assert "starting vLLM" in capfd.readouterr().out
    run(here)  # finished: nothing is started
    assert "starting vLLM" not in capfd.readouterr().out


def test_eight_bits(here):
    """Catches scales of other tokens, or states that are quantised before the norm."""
    run(here, "store_dtype=int8")
    exact, store = here.parent / "own", FeatureStore.open(here.parent / "out" / "train")
    run(here, "engine=own", f"out={exact}")
    for one, other in zip(store, FeatureStore.open(exact / "train"), strict=True):
        assert (one.features.float() - other.features).abs().max() < other.features.abs().max() / 100


def test_what_died_goes_on(apart, monkeypatch):
    """Catches shards that are made twice or never when the engine dies between them, and a death without a word."""
    here = apart
    monkeypatch.setenv("FAKE_DIES", "14")  # 3 are of the other split
    with pytest.raises(ValueError, match=r"vLLM ended \(status 9\).*vllm.log"):
        run(here, "batch_tokens=128")
    train = here.parent / "out" / "train"
    done = {file: file.stat().st_mtime_ns for file in train.glob("*.safetensors")}
    assert done and not read_manifest(train).complete
    monkeypatch.delenv("FAKE_DIES")
    monkeypatch.setattr(stores, "VLLM", Here)
    run(here)
    assert {file: file.stat().st_mtime_ns for file in done} == done
    assert_same(here)


def test_a_shard_that_cannot_be_written(here, monkeypatch):
    """Catches a dump that waits for ever for its last shard, and a reason that is lost."""
    monkeypatch.setattr(StoreWriter, "write", mock.Mock(side_effect=OSError("no space left")))
    with pytest.raises((ValueError, OSError), match="no space left"):
        run(here)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("device=cpu", "device is 'cpu', but vLLM uses all visible GPUs"),
        ("device_map=auto", "device_map is 'auto'.*tensor_parallel_size"),
        ("vllm.python=none", r"not installed, no file none; run make \.venv-vllm/\.installed"),
        ('vllm.options={"enable_lora": true}', "enable_lora: .*merge the adapter"),
        ('vllm.options={"max_model_len": 99}', "max_model_len: give max_length"),
        ("dtype=float8", "dtype.*float8"),
        ("heldout_answers=own", "this process does not load the target to write them"),
        ("vllm.python=pyproject.toml", "pyproject.toml cannot be started"),
    ],
)
def test_mistakes_are_found_at_the_start(apart, override, message):
    """Catches what shows only when a large target has been loaded for minutes."""
    with pytest.raises(ValueError, match=message):
        run(apart, override)
    assert not list((apart.parent / "out").rglob("*.safetensors"))


def test_throughput_beside_our_own_dump(here, capsys):
    """Catches the one side measured twice, and loading within the clock."""
    out = here.parent / "throughput.json"
    throughput.main(["--config", str(here), "--rounds", "2", "--out", str(out)])
    result: dict[str, Any] = json.loads(out.read_text())
    assert len(result["dump_seconds"]) == len(result["vllm_seconds"]) == 2
    assert result["ratio"] == pytest.approx(sum(result["ratios"]) / 2)
    assert "dump by vLLM" in capsys.readouterr().out
    assert not list((here.parent / "out").rglob("*"))
