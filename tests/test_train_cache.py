"""The cache of features: online: what fits the budget is computed once, and the figures are those of a store."""

import json
import shutil
from collections import Counter, namedtuple
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from chat_formats import dialogue
from test_train_online import assert_same_figures, figures

from data_prep import features
from data_prep.common import disk
from data_prep.store.manifest import read_manifest
from data_prep.store.reader import FeatureStore
from data_prep.store.writer import StoreWriter
from drafters import TargetModel
from train.data.cache import SHARD_TOKENS, Cache
from train.data.online import OnlineFeatures
from train.data.packing import Batch, collate
from train.run.inputs import open_inputs

COUNT = 380  # training dialogues, of about 64 tokens: three shards of the cache
TAP = {"exit_layer": tiny_run.TAP}


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Path:
    return target_folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The ``data:`` section."""
    folder = tmp_path_factory.mktemp("dialogues")
    for split, first, count in (("train", 0, COUNT), ("heldout", 5000, 4)):
        lines = (json.dumps(dialogue(index)) for index in range(first, first + count))
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    sources = {split: str(folder / f"{split}.jsonl") for split in ("train", "heldout")}
    return {**sources, "max_length": 120, "target_dtype": "float32", "target_batch_tokens": 512}


@pytest.fixture(scope="module")
def store(target: Path, data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What data_prep.features makes of the same section."""
    folder = tmp_path_factory.mktemp("store")
    splits = {split: data[split] for split in ("train", "heldout")}
    values = {"target": str(target), "dtype": "float32", "splits": splits, "out": str(folder / "features")}
    values |= {"exit_layers": [tiny_run.TAP], "max_length": 120, "heldout_answers": "given"}
    values |= {"shard_tokens": SHARD_TOKENS, "batch_tokens": 512}
    (folder / "features.yaml").write_text(json.dumps(values))
    features.main(["--config", str(folder / "features.yaml")])
    return folder / "features"


@pytest.fixture(scope="module")
def shard_gb(store: Path) -> float:
    """GB of one shard with a tap."""
    return 1.05 * FeatureStore.open(store / "train").manifest.shards[0].bytes / 1e9


def settings(target: Path, out: Path, **changes: Any) -> dict[str, Any]:
    common = {"batch_tokens": 6000, "eval_every": 4, "learning_rate": 0.001, "steps": 10, **TAP}
    return tiny_run.settings(str(target), Path("online"), out, **{**common, **changes})


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the target ran on each training dialogue outside of the filling of the cache."""
    times: Counter[int] = Counter()
    forward = OnlineFeatures._forward

    def counting(self: OnlineFeatures, batch: Batch, rows: Any, states: Any) -> None:
        if len(self) == COUNT:
            times.update(span.dialogue for row in rows for span in row)
        forward(self, batch, rows, states)

    monkeypatch.setattr(OnlineFeatures, "_forward", counting)
    return times


def test_what_fits_is_computed_once(
    target: Path,
    data: dict[str, Any],
    store: Path,
    shard_gb: float,
    tmp_path: Path,
    computed: Counter[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches cached states of another dialogue or layer, a budget that is passed or unused, and a needless pass."""
    tiny_run.train_here("kangaroo", {**settings(target, tmp_path / "store"), "features": str(store)})
    reference = FeatureStore.open(store / "train")
    for name, shards in (("part", 2), ("whole", len(reference.manifest.shards))):
        computed.clear()
        out, budget = tmp_path / name, shards * shard_gb
        run = tiny_run.train_here("kangaroo", {**settings(target, out), "data": {**data, "disk_gb": budget}})
        assert run.progress.epoch >= 2
        assert_same_figures(out, tmp_path / "store")
        cache = read_manifest(out / "cache")
        assert len(cache.shards) == shards and cache.size <= budget * 1e9
        for one, other in zip(FeatureStore(out / "cache", cache), reference, strict=False):
            assert one.input_ids.tolist() == other.input_ids.tolist()
            torch.testing.assert_close(one.features, other.features, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(one.taps[tiny_run.TAP], other.taps[tiny_run.TAP], rtol=1e-4, atol=1e-4)
        # The others are computed in every epoch.
        assert set(computed) == set(range(cache.dialogues, COUNT))
        assert not computed or min(computed.values()) >= 2
        assert f"cache: {cache.dialogues} of {COUNT} training dialogues in {out / 'cache'}" in capsys.readouterr().out


def test_two_ranks_share_a_cache(
    target: Path, data: dict[str, Any], store: Path, shard_gb: float, tmp_path: Path
) -> None:
    """Catches a rank that fills or reads its own part only, and one that reads before the other has written."""
    tiny_run.train_here("kangaroo", {**settings(target, tmp_path / "store"), "features": str(store)})
    values = {**settings(target, tmp_path / "two"), "data": {**data, "disk_gb": 2 * shard_gb}}
    tiny_run.train_on_ranks(2, tmp_path, [{"kind": "kangaroo", "values": values}])
    assert_same_figures(tmp_path / "two", tmp_path / "store")
    assert [one.file for one in read_manifest(tmp_path / "two" / "cache").shards] == [
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]


def test_a_run_that_dies_while_it_fills_the_cache(
    target: Path, data: dict[str, Any], shard_gb: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a folder that the same command refuses, or empties, because only a half-filled cache is in it."""
    values = {**settings(target, tmp_path / "run", steps=2), "data": {**data, "disk_gb": 2 * shard_gb}}
    write = StoreWriter.write

    def dying(self: StoreWriter, shard: Any, number: int | None = None) -> list[str]:
        if number == 1:
            raise RuntimeError("killed")
        return write(self, shard, number)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="killed"):
        patched.setattr(StoreWriter, "write", dying)
        tiny_run.train_here("kangaroo", values)
    first = tmp_path / "run" / "cache" / "shard-00000.safetensors"
    written = first.stat().st_mtime_ns
    tiny_run.train_here("kangaroo", values)
    assert first.stat().st_mtime_ns == written
    assert len(read_manifest(first.parent).shards) == 2
    # A larger budget continues with the same shards; other settings are refused, as a store refuses them.
    other = {**values, "steps": 3, "data": {**values["data"], "disk_gb": 3.5 * shard_gb}}
    assert tiny_run.train_here("kangaroo", other, resume=True).progress.step == 3
    assert first.stat().st_mtime_ns == written and len(read_manifest(first.parent).shards) == 3
    shutil.rmtree(tmp_path / "run" / "state")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(ValueError, match=r"cache holds features with other settings: max_length 120 there, 100 here"):
        tiny_run.train_here("kangaroo", {**values, "data": {**values["data"], "max_length": 100}})


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(
    target: Path, data: dict[str, Any], shard_gb: float, tmp_path: Path
) -> None:
    """Catches a resumed run whose cache has other dialogues or bits than that of a run that was never killed."""
    values = {**settings(target, tmp_path / "whole", save_every=3), "data": {**data, "disk_gb": 1.5 * shard_gb}}
    tiny_run.train_here("kangaroo", values)
    out = tmp_path / "killed"
    jobs = [{"kind": "kangaroo", "values": {**values, "out": str(out)}, "point": "file:5"}]
    tiny_run.killed_and_resumed(jobs, tmp_path)
    assert json.loads((out / "run.json").read_text())["resumed_at_step"] > 0
    assert figures(out) == figures(tmp_path / "whole")  # bit for bit


def test_dialogues_that_are_not_finite(
    target: Path, data: dict[str, Any], shard_gb: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches the neighbour's states for all dialogues after one that the writer left out, and NaN from the cache."""
    values = {**settings(target, tmp_path / "run"), "data": {**data, "disk_gb": 2 * shard_gb}}
    inputs = open_inputs(tiny_run.read("kangaroo", values))
    live: Any = inputs.train
    live.target = TargetModel.from_pretrained(str(target), "float32", engine="stock", capture_only=True)
    chosen = [*range(12), COUNT - 1]
    sound = live.complete(collate(live, chosen), (tiny_run.TAP,))
    live.split.dialogues[5].input_ids[3] = 299  # a token that no dialogue has
    with torch.no_grad():
        live.target.body.embed_tokens.weight[299] = float("nan")
    live.fill(tmp_path / "run" / "cache", 2 * shard_gb)
    assert "non_finite" in read_manifest(tmp_path / "run" / "cache").dropped
    batch = live.complete(collate(live, chosen), (tiny_run.TAP,))
    for span in batch.spans:
        for there, expected in ((batch.features, sound.features), (batch.taps[2], sound.taps[2])):
            if span.dialogue == 5:
                assert not span.of(there).any() and not span.of(batch.loss_mask).any()
            else:
                torch.testing.assert_close(span.of(there), span.of(expected), rtol=1e-4, atol=1e-4)
                assert torch.equal(span.of(batch.loss_mask), span.of(sound.loss_mask))
    cached = [span.dialogue for span in batch.spans if live.cache.read(span.dialogue, span.of(batch.input_ids), {})]
    assert sorted(cached) == [index for index in range(12) if index != 5]
    assert "warning: cache: left out, NaN or infinite: dialogue" in capsys.readouterr().err


def test_only_the_same_tokens_are_read(target: Path, data: dict[str, Any], store: Path) -> None:
    """Catches the states of the original answer for one that on_policy replaced."""
    values = {**settings(target, Path("unused")), "data": data}
    live: Any = open_inputs(tiny_run.read("kangaroo", values)).train
    cache = Cache(FeatureStore.open(store / "train"), live.split)
    tokens = torch.from_numpy(live.split.dialogues[7].input_ids)
    states = {None: torch.zeros(len(tokens), live.manifest.hidden_size)}
    other = tokens.clone()
    other[-1] += 1
    assert not cache.read(7, other, states) and not cache.read(7, tokens[:-1], states) and not states[None].any()
    assert not cache.read(-1, tokens, states) and not cache.read(COUNT, tokens, states)
    assert cache.read(7, tokens, states)
    assert torch.equal(states[None], cache.store[7].features)


def test_a_budget_is_checked_before_the_target_is_loaded(
    target: Path, data: dict[str, Any], shard_gb: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a disk that is full after an hour of filling, and a budget too small for anything."""
    values = settings(target, tmp_path / "run")
    small = {**values, "data": {**data, "disk_gb": 0.5 * shard_gb}}
    with pytest.raises(ValueError, match=r"data\.disk_gb is 0\.0\d+, and the first shard of the cache takes .*B; give"):
        open_inputs(tiny_run.read("kangaroo", small))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: usage(10**6, 10**6 - 5_000, 5_000))
    with pytest.raises(ValueError, match=r"data\.disk_gb: the cache .*run/cache needs .*B, and 5\.00 kB are free"):
        open_inputs(tiny_run.read("kangaroo", {**values, "data": {**data, "disk_gb": 2 * shard_gb}}))
