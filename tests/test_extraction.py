"""data_prep.features with an engine in its own process: the store equals that of our own dump, also after a kill.

The engine is tests/fake_extraction.py, and vLLM itself in tests/test_vllm.py where that is installed.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_extraction import Fake
from test_features import run, write_config

from data_prep.extraction import process, stores, worker
from data_prep.extraction.shards import Job
from data_prep.store.manifest import read_manifest
from data_prep.store.reader import FeatureStore


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
            assert one.taps.keys() == other.taps.keys()
            for tap in one.taps:
                torch.testing.assert_close(one.taps[tap], other.taps[tap], atol=atol, rtol=1e-3)


def test_the_store_is_that_of_our_own_dump(here, capfd):
    """Catches states before the norm, of another layer, block or dialogue, and what is left in the folder."""
    run(here)
    assert_same(here)
    assert sorted(path.name for path in (here.parent / "out").iterdir()) == ["heldout", "train"]
    assert len(read_manifest(here.parent / "out" / "train").shards) > 2
    assert "starting vLLM" in capfd.readouterr().out
    run(here)  # finished: nothing is started
    assert "starting vLLM" not in capfd.readouterr().out


def test_any_set_of_layers(here):
    """Catches states handed to the wrong tap when there are several, and an engine asked for Kangaroo's layer only."""
    run(here, "for=[eagle3]", "exit_layers=[]", f"out={here.parent / 'three'}")
    run(here, "for=[eagle3]", "exit_layers=[]", "engine=own", f"out={here.parent / 'ours'}")
    theirs, ours = (FeatureStore.open(here.parent / out / "train") for out in ("three", "ours"))
    assert theirs.manifest.taps == ours.manifest.taps == [1, 2, 3]
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one.features, other.features, atol=1e-4, rtol=1e-3)
        for tap in (1, 2, 3):
            torch.testing.assert_close(one.taps[tap], other.taps[tap], atol=1e-4, rtol=1e-3)


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
