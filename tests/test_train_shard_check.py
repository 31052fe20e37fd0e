"""train/data/shard_check.py: a flipped bit stops a run before a checkpoint is made from it, on any number of ranks."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch

from data_prep.store.reader import FeatureStore
from data_prep.store.writer import Shard, StoreWriter
from drafters import TargetModel
from train.data import shard_check
from train.run.loop import TrainRun

EACH = 5  # dialogues of a shard


@pytest.fixture(scope="module")
def sharded(target: TargetModel, features: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The features in shards of a few dialogues."""
    out = tmp_path_factory.mktemp("sharded")
    for split in ("train", "heldout"):
        whole = FeatureStore.open(features / split)
        with StoreWriter(out / split, tiny_run.header(target)) as writer:
            for start in range(0, len(whole), EACH):
                items = [whole[index] for index in range(start, min(start + EACH, len(whole)))]
                shard = Shard(
                    ids=[str(start + number) for number in range(len(items))],
                    lengths=[len(item.input_ids) for item in items],
                    input_ids=torch.cat([item.input_ids for item in items]),
                    loss_mask=torch.cat([item.loss_mask for item in items]),
                    states={
                        "features": torch.cat([item.features for item in items]),
                        f"tap_{tiny_run.TAP}": torch.cat([item.taps[tiny_run.TAP] for item in items]),
                    },
                )
                writer.write(shard)
            writer.finish({}, {})
    return out


def flip_a_bit(shard: Path) -> None:
    """In the last byte: a value of some state, a little larger or smaller."""
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)


@pytest.fixture
def settings(sharded: Path, target: TargetModel, tmp_path: Path) -> dict[str, Any]:
    """A run on a copy of the shards, which a test may damage."""
    shutil.copytree(sharded, tmp_path / "features")
    return tiny_run.settings(target.name, tmp_path / "features", tmp_path / "run")


@pytest.mark.parametrize("shard", ["train/shard-00001.safetensors", "heldout/shard-00000.safetensors"])
def test_a_flipped_bit_stops_the_run(settings: dict[str, Any], tmp_path: Path, shard: str) -> None:
    """Catches a store that a failing disk changed, trained on and evaluated with as if nothing were."""
    flip_a_bit(tmp_path / "features" / shard)
    FeatureStore.open((tmp_path / "features" / shard).parent)  # nothing that opening sees
    split, name = shard.split("/")
    message = (
        rf"stopped at step \d+, no checkpoint was written yet: the content of {name} in .*{split} is not what was "
        "written .*copy it again, or delete .* continue with --resume.*verify: false"
    )
    with pytest.raises(ValueError, match=message):
        tiny_run.train_here("eagle", settings)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert not list((tmp_path / "run").glob("state/step-*"))


def test_a_run_goes_on_when_the_shard_is_repaired(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches a state made from a broken shard that a resumed run starts from, and a check that resuming skips."""
    tiny_run.train_here("eagle", {**settings, "steps": 3, "schedule": "constant"})
    shard = tmp_path / "features" / "train" / "shard-00000.safetensors"
    good = shard.read_bytes()
    flip_a_bit(shard)
    longer = {**settings, "steps": 8, "schedule": "constant"}
    with pytest.raises(ValueError, match=r"the last good state is .*step-00000003.*shard-00000"):
        tiny_run.train_here("eagle", longer, resume=True)
    assert [path.name for path in (tmp_path / "run" / "state").glob("step-*")] == ["step-00000003"]
    shard.write_bytes(good)
    tiny_run.train_here("eagle", longer, resume=True)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["training"]["steps"] == 8


def test_a_short_run_ends_with_the_verdict(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that is over before its shards are hashed, and calls a drafter trained that was made from them."""
    trained = threading.Event()

    def late(*_: Any) -> bool:
        assert trained.wait(60), "the steps waited for the checksums"
        return False

    def step_done(self: TrainRun, *_: Any) -> None:
        if self.progress.step == 2:
            trained.set()

    monkeypatch.setattr(shard_check, "is_whole", late)
    monkeypatch.setattr(TrainRun, "_report", step_done)
    with pytest.raises(ValueError, match="stopped at step 2, no checkpoint was written yet"):
        tiny_run.train_here("eagle", {**settings, "steps": 2})
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert not list((tmp_path / "run").glob("state/step-*"))


@pytest.mark.slow
def test_all_ranks_stop(settings: dict[str, Any], tmp_path: Path) -> None:
    """Catches a rank that waits for minutes in a collective since another one, which hashed the shard, has left."""
    flip_a_bit(tmp_path / "features" / "train" / "shard-00001.safetensors")  # rank 1's
    failed, said = tiny_run.run_ranks("failing_ranks", 2, tmp_path, [{"kind": "eagle", "values": settings}])
    assert failed == 2 and said.count("shard-00001.safetensors in") >= 2
    assert not (tmp_path / "run" / "model.safetensors").exists()
