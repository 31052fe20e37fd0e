"""The feature store: round trip, damage, resumption, locks, and a full disk."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from data_prep import store_writer
from data_prep.store import FeatureStore, StoreManifest
from data_prep.store_writer import Shard, StoreWriter

HIDDEN, TAPS = 6, [1, 3]
LENGTHS = [[3, 5], [1], [4, 2, 7]]
ROOT = Path(__file__).resolve().parents[1]


def header(**changes: Any) -> StoreManifest:
    settings = {
        "target_name": "some/target",
        "target_revision": None,
        "target_fingerprint": "f00",
        "hidden_size": HIDDEN,
        "vocab_size": 100,
        "target_dtype": "bfloat16",
        "taps": TAPS,
        "dtype": "bfloat16",
        "tokenizer_hash": "70c",
        "template_hash": "7e3",
        "max_length": 64,
        "source": "data.jsonl",
        "source_digest": "d16",
    }
    return StoreManifest(**{**settings, **changes})


def make_shard(index: int, dtype: torch.dtype = torch.bfloat16) -> Shard:
    generator = torch.Generator().manual_seed(index)
    lengths = LENGTHS[index]
    count = sum(lengths)
    states = [torch.randn(count, HIDDEN, generator=generator).to(dtype) for _ in range(1 + len(TAPS))]
    return Shard(
        ids=[f"dialogue-{index}-{i}" for i in range(len(lengths))],
        lengths=lengths,
        input_ids=torch.randint(100, (count,), generator=generator),
        loss_mask=torch.rand(count, generator=generator) < 0.5,
        features=states[0],
        taps=dict(zip(TAPS, states[1:], strict=True)),
    )


def write_all(path: Path, start: int = 0, stop: int = 3, **changes: Any) -> None:
    with StoreWriter(path, header(**changes)) as writer:
        for index in range(start, stop):
            writer.write(make_shard(index))
        if stop == 3:
            writer.finish({"broken_json": 2}, {"truncated": 1})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip(tmp_path: Path, dtype: str) -> None:
    """Catches dialogues mixed up at shard borders, a lost dtype, and wrong counts."""
    kind = getattr(torch, dtype)
    with StoreWriter(tmp_path / "store", header(dtype=dtype)) as writer:
        for index in range(3):
            writer.write(make_shard(index, kind))
        writer.finish({"broken_json": 2}, {"truncated": 1})
    store = FeatureStore.open(tmp_path / "store")
    store.verify()
    assert len(store) == 6
    assert store.lengths.tolist() == sum(LENGTHS, [])
    position = 0
    for index in range(3):
        shard = make_shard(index, kind)
        parts = [tensor.split(LENGTHS[index]) for tensor in (shard.input_ids, shard.loss_mask, shard.features)]
        taps = {layer: tensor.split(LENGTHS[index]) for layer, tensor in shard.taps.items()}
        for i in range(len(LENGTHS[index])):
            found = store[position]
            assert found.input_ids.dtype == torch.int64 and found.loss_mask.dtype == torch.bool
            assert found.features.dtype == kind
            for tensor, expected in zip((found.input_ids, found.loss_mask, found.features), parts, strict=True):
                assert torch.equal(tensor, expected[i])
            assert {layer: torch.equal(found.taps[layer], taps[layer][i]) for layer in TAPS} == {1: True, 3: True}
            position += 1
    assert torch.equal(store[-1].features, store[5].features)
    with pytest.raises(IndexError):
        store[6]
    manifest = store.manifest
    assert (manifest.dialogues, manifest.tokens) == (6, 22)
    assert manifest.response_tokens == sum(int(make_shard(index).loss_mask.sum()) for index in range(3))
    assert manifest.dropped == {"broken_json": 2} and manifest.changed == {"truncated": 1}
    assert [entry.tokens for entry in manifest.shards] == [8, 1, 13]
    assert sorted(p.name for p in (tmp_path / "store").iterdir() if not p.name.startswith(".")) == [
        "manifest.json",
        *(f"shard-0000{i}.safetensors" for i in range(3)),
    ]


def test_reading_maps_the_file_and_survives_pickling(tmp_path: Path) -> None:
    """Catches a reader that copies whole shards into memory, holds a file open per shard, or ships them to workers."""
    rows = 400_000
    with StoreWriter(tmp_path, header(taps=[])) as writer:
        ones = torch.ones(rows, HIDDEN, dtype=torch.bfloat16)
        mask = torch.ones(rows, dtype=torch.bool)
        writer.write(Shard(["long"], [rows], torch.ones(rows, dtype=torch.int64), mask, ones, {}))
        writer.finish({}, {})
    store = FeatureStore.open(tmp_path)
    before = _private_kilobytes()
    assert store[0].features[rows // 2].tolist() == [1.0] * HIDDEN
    # input_ids are converted (3.2 MB), the 4.8 MB of features are not copied
    assert _private_kilobytes() - before < 4_500
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if "safetensors" in link]
    assert len(pickle.dumps(store)) < 10_000
    assert torch.equal(pickle.loads(pickle.dumps(store))[0].features, store[0].features)  # noqa: S301 (our own bytes)


def _private_kilobytes() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("memory is read from /proc")
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("RssAnon"))


def test_interrupted_writing_continues_to_the_same_bytes(tmp_path: Path) -> None:
    """Catches a shard written twice, skipped or left half written when a run dies and starts again."""
    write_all(tmp_path / "whole")
    broken = tmp_path / "broken"
    write_all(broken, stop=2)
    (broken / "shard-00002.safetensors.tmp").write_bytes(b"half")  # died while writing
    (broken / "shard-00002.safetensors").write_bytes(b"not in the manifest")  # or between shard and manifest
    with pytest.raises(ValueError, match=r"half written \(3 dialogues in 2 shards so far\); run the same"):
        FeatureStore.open(broken)
    with StoreWriter(broken, header()) as writer:
        assert writer.manifest.dialogues == 3
    write_all(broken, start=2)
    names = [f"shard-0000{i}.safetensors" for i in range(3)] + ["manifest.json"]
    assert [(broken / n).read_bytes() for n in names] == [(tmp_path / "whole" / n).read_bytes() for n in names]
    assert not list(broken.glob("*.tmp"))
    FeatureStore.open(broken).verify()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_fingerprint", "other"),
        ("tokenizer_hash", "other"),
        ("template_hash", "other"),
        ("max_length", 128),
        ("taps", [2]),
        ("dtype", "float16"),
        ("limit", 5),
        ("source_digest", "other"),
    ],
)
def test_a_store_made_otherwise_is_not_continued(tmp_path: Path, key: str, value: Any) -> None:
    """Catches mixing two targets, tokenizers, templates, lengths, taps, dtypes or data files in one store."""
    write_all(tmp_path, stop=1)
    there = getattr(header(), key)
    with (
        pytest.raises(ValueError, match="another `out`, or delete") as error,
        StoreWriter(tmp_path, header(**{key: value})),
    ):
        pass
    assert f"{key} {there!r} there, {value!r} here" in str(error.value)
    with StoreWriter(tmp_path, header()) as writer:  # the refused one has left no lock and no change
        assert writer.manifest.dialogues == 2


def test_the_same_target_under_another_path(tmp_path: Path) -> None:
    """Catches refusing a store because the folder of the target was moved."""
    write_all(tmp_path, stop=1)
    with StoreWriter(tmp_path, header(target_name="/elsewhere/target")) as writer:
        assert writer.manifest.dialogues == 2


def test_damage_is_found(tmp_path: Path) -> None:
    """Catches training on a cut, missing, exchanged or silently changed shard."""
    write_all(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(
        ValueError, match=rf"shard-00001\.safetensors has {len(data) - 1:,} bytes, .* {len(data):,} bytes"
    ):
        FeatureStore.open(tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"shard-00001\.safetensors is missing"):
        FeatureStore.open(tmp_path)
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    FeatureStore.open(tmp_path)[0]
    with pytest.raises(ValueError, match=r"content of shard-00001\.safetensors is not what was written"):
        FeatureStore.open(tmp_path).verify()
    shard.write_bytes(b"\xff" * len(data))
    with pytest.raises(ValueError, match="not a readable shard"):
        FeatureStore.open(tmp_path)
    shard.write_bytes(data)
    FeatureStore.open(tmp_path).verify()


def test_opening_what_is_no_store(tmp_path: Path) -> None:
    """Catches a stack trace where the user gave the folder above, a wrong one, or a manifest of another version."""
    with pytest.raises(ValueError, match=r"does not exist; make one with python -m data_prep\.features"):
        FeatureStore.open(tmp_path / "none")
    write_all(tmp_path / "features" / "train")
    with pytest.raises(ValueError, match="sub-folders train are stores: give one of them"):
        FeatureStore.open(tmp_path / "features")
    manifest = tmp_path / "features" / "train" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[:100])
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        FeatureStore.open(manifest.parent)
    manifest.write_text(json.dumps({**json.loads(text), "format_version": 2}))
    with pytest.raises(ValueError, match="format version 2, this code reads version 1"):
        FeatureStore.open(manifest.parent)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with (
        pytest.raises(ValueError, match=r"no feature store, yet holds thesis\.txt"),
        StoreWriter(tmp_path / "mine", header()),
    ):
        pass


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["features", "tap"])
def test_values_that_are_not_finite_name_the_dialogue(tmp_path: Path, bad: float, where: str) -> None:
    """Catches a drafter trained to NaN by one overflowing activation, found only hours later."""
    shard = make_shard(2)
    (shard.features if where == "features" else shard.taps[3])[5, 2] = bad
    with StoreWriter(tmp_path, header()) as writer:
        writer.write(make_shard(0))
        with pytest.raises(ValueError, match=rf"dialogue dialogue-2-1: {where}.* at token 1 are NaN or infinite"):
            writer.write(shard)
        assert writer.manifest.dialogues == 2
    assert not (tmp_path / "shard-00001.safetensors").exists()


def test_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a full disk that leaves a broken shard behind, or a message about serialization."""

    def disk_full(tensors: dict[str, torch.Tensor], path: Path) -> None:
        Path(path).write_bytes(b"as much as fitted")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with StoreWriter(tmp_path, header()) as writer:
        writer.write(make_shard(0))
        monkeypatch.setattr(store_writer, "save_file", disk_full)
        with pytest.raises(
            OSError, match=r"disk is full; the 1 shards before it \(2 dialogues\) are kept.*same command"
        ) as error:
            writer.write(make_shard(1))
        assert error.value.errno == 28
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.undo()
    write_all(tmp_path, start=1)
    FeatureStore.open(tmp_path).verify()


HOLD_THE_LOCK = """
import sys, time
from test_store import header
from data_prep.store_writer import StoreWriter
with StoreWriter(sys.argv[1], header()):
    print("locked", flush=True)
    time.sleep(60)
"""


def test_a_second_writer_is_refused_and_a_dead_one_is_not_waited_for(tmp_path: Path) -> None:
    """Catches two processes writing one store, and a killed one locking it for ever."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        host = os.uname().nodename
        with (
            pytest.raises(ValueError, match=rf"is being written by process {holder.pid} on {host}; wait for it"),
            StoreWriter(tmp_path, header()),
        ):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        time.sleep(0.05)
        with StoreWriter(tmp_path, header()) as writer:
            assert writer.stale_writer == f"process {holder.pid} on {host}"
        with StoreWriter(tmp_path, header()) as writer:
            assert writer.stale_writer is None
    finally:
        holder.kill()
        holder.wait()
