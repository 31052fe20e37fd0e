"""The feature store: round trip, damage, resumption, locks, and a full disk."""

import json
import os
import pickle
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import nursery
import pytest
import safetensors.torch
import torch
from programs import refused
from safetensors import SafetensorError

from data_prep.store.manifest import StoreManifest
from data_prep.store.reader import FeatureStore
from data_prep.store.writer import Shard, StoreWriter

HIDDEN, TAPS = 6, [1, 3]
LENGTHS = [[3, 5], [1], [4, 2, 7]]


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
        states=dict(zip(("features", *(f"tap_{layer}" for layer in TAPS)), states, strict=True)),
    )


def write_all(path: Path, start: int = 0, stop: int = 3, **changes: Any) -> None:
    with StoreWriter(path, header(**changes)) as writer:
        for index in range(start, stop):
            writer.write(make_shard(index))
        if stop == 3:
            writer.finish({"broken_json": 2}, {"truncated": 1})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_round_trip(tmp_path, dtype):
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
        whole = (shard.input_ids, shard.loss_mask, shard.states["features"])
        parts = [tensor.split(LENGTHS[index]) for tensor in whole]
        taps = {layer: shard.states[f"tap_{layer}"].split(LENGTHS[index]) for layer in TAPS}
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


def test_reading_maps_the_file_and_survives_pickling(tmp_path):
    """Catches a reader that copies whole shards into memory, holds a file open per shard, or ships them to workers."""
    rows = 400_000
    with StoreWriter(tmp_path, header(taps=[])) as writer:
        ones = torch.ones(rows, HIDDEN, dtype=torch.bfloat16)
        mask = torch.ones(rows, dtype=torch.bool)
        writer.write(Shard(["long"], [rows], torch.ones(rows, dtype=torch.int64), mask, {"features": ones}))
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


def test_interrupted_writing_continues_to_the_same_bytes(tmp_path):
    """Catches a shard written twice, skipped or left half written when a run dies and starts again."""
    write_all(tmp_path / "whole")
    broken = tmp_path / "broken"
    write_all(broken, stop=2)
    (broken / ".shard-00002.safetensors.tmp").write_bytes(b"half")  # died while writing
    (broken / "shard-00002.safetensors").write_bytes(b"not in the manifest")  # or between shard and manifest
    with refused(r"half written \(3 dialogues in 2 shards so far\); run the same"):
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
def test_a_store_made_otherwise_is_not_continued(tmp_path, key, value):
    """Catches mixing two targets, tokenizers, templates, lengths, taps, dtypes or data files in one store."""
    write_all(tmp_path, stop=1)
    there = getattr(header(), key)
    with refused("another `out`, or delete") as error, StoreWriter(tmp_path, header(**{key: value})):
        pass
    assert f"{key} {there!r} there, {value!r} here" in str(error.value)
    # The refused writer has left no lock and no change. The target's folder may move.
    with StoreWriter(tmp_path, header(target_name="/elsewhere/target")) as writer:
        assert writer.manifest.dialogues == writer.manifest.consumed == 2


def test_damage_is_found(tmp_path):
    """Catches training on a cut, missing, exchanged or silently changed shard."""
    write_all(tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with refused(rf"shard-00001\.safetensors has {len(data) - 1:,} bytes, .* {len(data):,} bytes"):
        FeatureStore.open(tmp_path)
    shard.unlink()
    with refused(r"shard-00001\.safetensors is missing"):
        FeatureStore.open(tmp_path)
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    FeatureStore.open(tmp_path)[0]
    with refused(r"content of shard-00001\.safetensors is not what was written"):
        FeatureStore.open(tmp_path).verify()
    shard.write_bytes(b"\xff" * len(data))
    with refused("not a readable shard"):
        FeatureStore.open(tmp_path)
    shard.write_bytes(data)
    FeatureStore.open(tmp_path).verify()


def test_opening_what_is_no_store(tmp_path):
    """Catches a stack trace where the user gave the folder above, a wrong one, or a manifest of another version."""
    with refused(r"does not exist; make one with python -m data_prep\.features"):
        FeatureStore.open(tmp_path / "none")
    write_all(tmp_path / "features" / "train")
    with refused("sub-folders train are stores: give one of them"):
        FeatureStore.open(tmp_path / "features")
    manifest = tmp_path / "features" / "train" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[:100])
    with refused(r"manifest\.json is damaged"):
        FeatureStore.open(manifest.parent)
    manifest.write_text(json.dumps({**json.loads(text), "format_version": 3}))
    with refused("format version 3, this code reads version 2"):
        FeatureStore.open(manifest.parent)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with refused(r"no feature store, yet holds thesis\.txt"), StoreWriter(tmp_path / "mine", header()):
        pass


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["features", "tap 3"])
def test_a_dialogue_that_is_not_finite_is_left_out_and_counted(tmp_path, bad, where):
    """Catches a drafter trained to NaN by one overflowing activation, neighbours lost with it, or a wrong count."""
    shard = make_shard(2)
    shard.states[where.replace(" ", "_")][5, 2] = bad  # token 1 of the second dialogue
    with StoreWriter(tmp_path, header()) as writer:
        assert writer.write(make_shard(0)) == []
        assert writer.write(shard) == [f"dialogue-2-1 ({where})"]
        manifest = writer.manifest
        assert (manifest.consumed, manifest.dialogues, manifest.tokens) == (5, 4, 19)
        kept = int(make_shard(0).loss_mask.sum()) + int(shard.loss_mask.sum()) - int(shard.loss_mask[4:6].sum())
        assert manifest.response_tokens == kept < kept + int(shard.loss_mask[4:6].sum())
        assert manifest.dropped == {"non_finite": 1}
        writer.finish({"broken_json": 2}, {})
    store, whole = FeatureStore.open(tmp_path), make_shard(2)
    store.verify()
    assert store.manifest.dropped == {"broken_json": 2, "non_finite": 1}
    assert store.lengths.tolist() == [3, 5, 4, 7]
    for stored, tokens in ((store[2], slice(0, 4)), (store[3], slice(6, 13))):
        assert torch.equal(stored.input_ids, whole.input_ids[tokens])
        assert torch.equal(stored.loss_mask, whole.loss_mask[tokens])
        assert torch.equal(stored.features, whole.states["features"][tokens])
        assert all(torch.equal(stored.taps[layer], whole.states[f"tap_{layer}"][tokens]) for layer in TAPS)


def test_a_shard_without_one_finite_dialogue_has_no_file(tmp_path):
    """Catches an empty shard, which no reader opens, and a resumed run that takes its dialogues again or skips some."""
    write_all(tmp_path, stop=1)
    single = make_shard(1)
    single.states["features"][0, 0] = float("nan")
    with StoreWriter(tmp_path, header()) as writer:
        writer.write(single)
    with StoreWriter(tmp_path, header()) as writer:
        assert (writer.manifest.consumed, writer.manifest.dialogues) == (3, 2)
        writer.write(make_shard(2))
        assert writer.finish({}, {}).dropped == {"non_finite": 1}
    store = FeatureStore.open(tmp_path)
    assert [entry.file for entry in store.manifest.shards] == ["shard-00000.safetensors", "shard-00002.safetensors"]
    assert torch.equal(store[2].features, make_shard(2).states["features"][:4])


def one_token_shard(count: int, not_finite: int) -> Shard:
    """``count`` dialogues of a token, the first ``not_finite`` of them with an overflow."""
    features = torch.zeros(count, HIDDEN, dtype=torch.float16)
    features[:not_finite, 0] = 70_000
    ones = torch.ones(count, dtype=torch.int64)
    return Shard([f"d{i}" for i in range(count)], [1] * count, ones, ones.bool(), {"features": features})


def test_many_that_are_not_finite_mean_the_dtype(tmp_path):
    """Catches a store that quietly keeps the few dialogues that float16 could hold, and a refusal without a way out."""
    settings = {"taps": [], "dtype": "float16", "target_dtype": "float16"}
    said = r"20 of the first 399 .*in float16.*for example d0 \(features\).*set dtype .* to bfloat16 or float32"
    with StoreWriter(tmp_path / "few", header(**settings)) as writer:
        assert len(writer.write(one_token_shard(400, 20))) == 20  # 5 %: still odd dialogues
    with StoreWriter(tmp_path / "many", header(**settings)) as writer, refused(said) as error:
        writer.write(one_token_shard(399, 20))
    assert "another `out`" not in str(error.value)
    with StoreWriter(tmp_path / "many", header(taps=[])) as writer:  # nothing was written: the advice can be followed
        assert writer.manifest.dtype == "bfloat16" and writer.manifest.consumed == 0
    with StoreWriter(tmp_path / "all", header(**settings)) as writer:
        writer.write(one_token_shard(3, 3))
        with refused("3 of the first 3 dialogues"):
            writer.finish({}, {})
    with StoreWriter(tmp_path / "few", header(**settings)) as writer, refused("another `out`"):
        writer.write(one_token_shard(1, 1))


def test_full_disk_loses_nothing(tmp_path, monkeypatch):
    """Catches a full disk that leaves a broken shard behind, or a message about serialization."""

    def disk_full(tensors, path, metadata):
        Path(path).write_bytes(b"as much as fitted")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with StoreWriter(tmp_path, header()) as writer:
        writer.write(make_shard(0))
        monkeypatch.setattr(safetensors.torch, "save_file", disk_full)
        with pytest.raises(
            OSError, match=r"disk is full; the 1 shards before it \(2 dialogues\) are kept.*same command"
        ) as error:
            writer.write(make_shard(1))
        assert error.value.errno == 28
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.undo()
    write_all(tmp_path, start=1)
    FeatureStore.open(tmp_path).verify()


def hold_the_lock(path: str) -> int:
    with StoreWriter(path, header()):
        print("locked")
        time.sleep(60)
    return 0


def test_a_second_writer_is_refused_and_a_dead_one_is_not_waited_for(tmp_path):
    """Catches two processes writing one store, and a killed one locking it for ever."""
    log = tmp_path.with_suffix(".log")
    holder = nursery.begin("test_store.hold_the_lock", str(tmp_path), dict(os.environ), log)
    try:
        while not (log.exists() and log.read_text()) and holder.poll() is None:
            time.sleep(0.01)
        host = os.uname().nodename
        with (
            refused(rf"is being written by process {holder.pid} on {host}; wait for it"),
            StoreWriter(tmp_path, header()),
        ):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        time.sleep(0.05)
        with StoreWriter(tmp_path, header()):
            pass
    finally:
        holder.kill()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("file", "../../outside.safetensors", r"shards\.0\.file is '\.\./\.\./outside\.safetensors'"),
        ("dialogues", -2, r"shards\.0\.dialogues is -2: Input should be greater"),
        ("sha256", "", r"shards\.0\.sha256 is ''"),
    ],
)
def test_a_manifest_does_not_point_elsewhere(tmp_path, key, value, message):
    """Catches a file out of the store that is read because a manifest names it."""
    folder = tmp_path / "a" / "store"
    write_all(folder)
    shutil.copy(folder / "shard-00000.safetensors", tmp_path / "outside.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0][key] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with refused(rf"manifest\.json is damaged \({message}.*delete .* and make the features"):
        FeatureStore.open(folder)
