"""Several processes, one store: the same files as from one process, also after kills and with other numbers."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import refused
from test_store import HIDDEN, header

from data_prep.common.ranks import Rank
from data_prep.store.manifest import ShardPlan, StoreManifest, read_manifest
from data_prep.store.reader import FeatureStore
from data_prep.store.writer import Shard, StoreWriter

LENGTHS = [7, 3, 9, 2, 5, 4, 8, 1, 6, 10, 3]
PLANNED = ShardPlan.of(LENGTHS, 8)  # six shards


def planned(**changes: Any) -> StoreManifest:
    return header(taps=[], plan=PLANNED, **changes)


def shard_of(first: int, last: int) -> Shard:
    """The dialogues first..last; the content of each depends on its index alone."""
    lengths = LENGTHS[first:last]
    tokens = [torch.full((length,), index) for index, length in enumerate(lengths, start=first)]
    ids = torch.cat(tokens)
    return Shard(
        ids=[f"d{index}" for index in range(first, last)],
        lengths=lengths,
        input_ids=ids,
        loss_mask=ids % 2 == 0,
        states={"features": ids[:, None].expand(-1, HIDDEN).bfloat16()},
    )


def work(path: Path, rank: Rank, most: int = 99, **changes: Any) -> StoreManifest:
    """What one process does: at most ``most`` of its missing shards; it finishes if that is all of them."""
    with StoreWriter(path, planned(**changes), rank) as writer:
        missing = writer.missing(LENGTHS)
        for number, first, last in missing[:most]:
            writer.write(shard_of(first, last), number)
        return writer.finish({"broken_json": 1}, {}) if len(missing) <= most else writer.manifest


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if not file.name.startswith(".lock")}


@pytest.fixture
def alone(tmp_path):
    """The files of a store that one process wrote."""
    assert work(tmp_path / "alone", Rank()).complete
    store = FeatureStore.open(tmp_path / "alone")
    assert [int(dialogue.input_ids[0]) for dialogue in store] == list(range(len(LENGTHS)))
    assert len(store.manifest.shards) == 6
    return contents(tmp_path / "alone")


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_four_ranks_write_what_one_writes(tmp_path, alone, order):
    """Catches shards merged in the order of ranks, a store called complete too early, and counts that miss a rank."""
    path = tmp_path / "store"
    done = [work(path, Rank(index, 4)).complete for index in order]
    assert done == [False, False, False, True]
    assert contents(path) == alone
    FeatureStore.open(path).verify()


def test_one_rank_merges(tmp_path, alone, monkeypatch):
    """Catches ranks that merge at the same time, with one temporary name for two manifests."""
    path = tmp_path / "store"
    for index in range(2):
        work(path, Rank(index, 3))
    with StoreWriter(path, planned(), Rank(2, 3)) as writer:
        for number, first, last in writer.missing(LENGTHS):
            writer.write(shard_of(first, last), number)
    exact, merged = StoreWriter._save_header, []

    def slow(self, manifest):
        merged.append(manifest.complete)
        time.sleep(0.2)
        exact(self, manifest)

    monkeypatch.setattr(StoreWriter, "_save_header", slow)
    threads = [threading.Thread(target=work, args=(path, Rank(index, 3))) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert merged == [True]
    assert contents(path) == alone


@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (3, 2), (2, 5)])
def test_another_number_of_ranks_goes_on(tmp_path, alone, counts):
    """Catches a half-written store that only as many processes as began it can finish, or shards written again."""
    path, (before, after) = tmp_path / "store", counts
    for index in range(before):
        work(path, Rank(index, before), most=1)
    times = {file.name: file.stat().st_mtime_ns for file in path.glob("*.safetensors")}
    assert times and not read_manifest(path).complete
    with refused(rf"is half written \(.* in {len(times)} shards so far\)"):
        FeatureStore.open(path)
    assert [work(path, Rank(index, after)).complete for index in range(after)][-1]
    assert contents(path) == alone
    assert times.items() <= {file.name: file.stat().st_mtime_ns for file in path.glob("*.safetensors")}.items()


def test_the_same_rank_twice_and_two_numbers_of_ranks(tmp_path):
    """Catches two processes writing the same shard, above all those of two runs that were started by mistake."""
    with StoreWriter(tmp_path, planned(), Rank(1, 4)):
        with (
            refused(rf"is being written by process {os.getpid()} on .*, rank 1 of 4; wait for"),
            StoreWriter(tmp_path, planned(), Rank(1, 4)),
        ):
            pass
        for other in (Rank(), Rank(0, 2), Rank(5, 8)):
            with (
                refused(rf"rank 1 of 4, so by 4 processes, and this is one of {other.count};"),
                StoreWriter(tmp_path, planned(), other),
            ):
                pass
        with StoreWriter(tmp_path, planned(), Rank(2, 4)) as writer:
            assert writer.missing(LENGTHS)
        with refused("max_length 64 there, 32 here"):  # though no shard is there yet
            work(tmp_path, Rank(3, 4), max_length=32)
    assert not work(tmp_path, Rank(0, 2)).complete  # all are gone: another number may go on


@pytest.mark.parametrize("when", ["before the manifest", "after the manifest"])
def test_a_kill_in_the_middle_of_the_merge(tmp_path, alone, monkeypatch, when):
    """Catches a store that stays half written, or is counted twice, when the merging process dies."""
    path = tmp_path / "store"
    work(path, Rank(0, 2))

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StoreWriter, "_save_header" if when.startswith("before") else "_remove_records", killed)
        work(path, Rank(1, 2))
    assert len(list(path.glob("shard-*.json"))) == 6
    assert read_manifest(path).complete == when.startswith("after")
    assert read_manifest(path).dialogues == len(LENGTHS)
    assert work(path, Rank(0, 3)).complete
    assert contents(path) == alone


def test_a_finished_shard_that_was_cut_is_written_again(tmp_path, alone):
    """Catches a truncated or missing shard that a resumed run takes for finished, to be refused days later."""
    path = tmp_path / "store"
    work(path, Rank(0, 2))
    cut, gone = path / "shard-00002.safetensors", path / "shard-00004.safetensors"
    cut.write_bytes(cut.read_bytes()[:100])
    gone.unlink()
    with StoreWriter(path, planned(), Rank(1, 2)) as writer:
        assert len(writer.damaged) == 2 and "shard-00002.safetensors has 100 bytes, the manifest" in writer.damaged[0]
    assert not work(path, Rank(1, 2)).complete
    assert work(path, Rank(0, 2)).complete
    assert contents(path) == alone


def test_other_tokens_from_the_same_data(tmp_path):
    """Catches two machines whose library versions tokenize differently, laying different dialogues into one store."""
    work(tmp_path, Rank(0, 2), most=1)
    other = ShardPlan.of([*LENGTHS[:-1], 4], 8)
    with refused(r"begun for 11 dialogues of 58 tokens; here the same data gives 11 of 59"):
        work(tmp_path, Rank(1, 2), plan=other) if False else StoreWriter(
            tmp_path, header(taps=[], plan=other), Rank(1, 2)
        ).__enter__()


def test_other_shard_tokens_go_on_with_the_first(tmp_path, alone):
    """Catches shards that overlap, because a rank or a resumed run cuts the corpus at other places."""
    path = tmp_path / "store"
    work(path, Rank(0, 2), most=1)
    with StoreWriter(path, header(taps=[], plan=ShardPlan.of(LENGTHS, 20)), Rank(1, 2)) as writer:
        assert [number for number, _, _ in writer.missing(LENGTHS)] == [1, 3, 5]
    for index in range(2):
        work(path, Rank(index, 2))
    assert contents(path) == alone


def test_overflows_are_counted_over_all_ranks(tmp_path):
    """Catches a target that is broken on 5% of each rank's share, which no rank alone would call too many."""
    lengths = [1] * 120
    plan = ShardPlan.of(lengths, 30)
    settings = header(taps=[], plan=plan)

    def rank(index):
        with StoreWriter(tmp_path, settings, Rank(index, 4)) as writer:
            for number, first, last in writer.missing(lengths):
                features = torch.zeros(last - first, HIDDEN)
                features[:6] = float("inf")
                ids = torch.arange(first, last)
                names = [str(i) for i in ids]
                writer.write(Shard(names, [1] * len(ids), ids, ids >= 0, {"features": features}), number)
        with StoreWriter(tmp_path, settings, Rank(index, 4)) as writer:
            return writer.finish({}, {})

    assert not rank(0).complete and not rank(1).complete and not rank(2).complete
    with refused("24 of the first 120 dialogues have NaN or infinite features"):
        rank(3)
