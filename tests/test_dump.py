"""Writing beside computing: bounded, in order, and its errors reach the one who computes."""

import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tiny_run
import torch
from chat_formats import dialogue
from safetensors import SafetensorError
from test_features import run, write_config

from data_prep.configs import FeaturesConfig
from data_prep.extraction import stores
from data_prep.extraction.dump import IN_FLIGHT, Background, plan_batches
from data_prep.store.manifest import plan_shards, read_manifest
from data_prep.store.reader import FeatureStore
from data_prep.store.writer import StoreWriter
from drafters.config import load_config


def test_jobs_run_in_order_and_at_most_two_wait() -> None:
    """Catches a host that fills up with shards when the disk is slower than the target, and shards that overtake."""
    done: list[int] = []
    gate = threading.Semaphore(0)

    def job(index: int) -> None:
        gate.acquire()
        done.append(index)

    submitted: list[int] = []

    def compute() -> None:
        with Background() as background:
            for index in range(6):
                background.submit(lambda index=index: job(index))
                submitted.append(index)

    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.2)
    assert len(submitted) == IN_FLIGHT and done == []
    for _ in range(6):
        gate.release()
    thread.join(timeout=10)
    assert done == submitted == list(range(6))


def test_an_error_reaches_the_caller_and_stops_the_rest() -> None:
    """Catches a full disk noticed only at the end of the corpus, and shards written after the one that failed."""
    done: list[str] = []
    started = threading.Event()

    def fails() -> None:
        started.wait()
        raise OSError(errno.ENOSPC, "the disk is full")

    with pytest.raises(OSError, match="the disk is full"), Background() as background:
        background.submit(fails)
        background.submit(lambda: done.append("after"))
        background.check()  # nothing yet, and no waiting
        started.set()
        while True:
            time.sleep(0.001)
            background.check()
    with pytest.raises(OSError, match="the disk is full"), Background() as background:
        background.submit(fails)  # the very last one
    with pytest.raises(KeyboardInterrupt), Background() as background:
        background.submit(lambda: (time.sleep(0.1), done.append("handed over before"))[0])
        raise KeyboardInterrupt
    assert done == ["handed over before"]


def disk_full_after(shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk holds so many shards and half of another one."""
    exact, written = safetensors.torch.save_file, []

    def save_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None) -> None:
        if len(written) == shards:
            Path(path).write_bytes(b"as much as fitted")
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        written.append(path)
        exact(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)


def test_a_disk_that_fills_up_in_the_middle_of_a_dump(
    tmp_path: Path,
    target_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches an error of the writing thread that is lost, comes hours late, or costs finished shards."""
    config = write_config(tmp_path, target_folder, count=40, shard_tokens=100)
    computed: list[Any] = []
    exact = stores.run_shard
    monkeypatch.setattr(stores, "run_shard", lambda *arguments: computed.append(arguments[3]) or exact(*arguments))
    with monkeypatch.context() as patch:
        disk_full_after(4, patch)
        with pytest.raises(OSError, match=r"disk is full; the \d+ shards before it .* are kept.*run the same command"):
            run(config)
    folders = [tmp_path / "out" / split for split in ("heldout", "train")]
    assert sum(len(read_manifest(store).shards) for store in folders if store.exists()) == 4
    assert len(computed) <= 4 + 1 + IN_FLIGHT + 1  # and not the whole corpus
    assert not [file for store in folders for file in store.glob("*.tmp")]
    run(config)
    run(config, f"out={tmp_path / 'whole'}")
    for split in ("train", "heldout"):
        store, whole = (FeatureStore.open(tmp_path / out / split) for out in ("out", "whole"))
        assert store.manifest.shards == whole.manifest.shards


def test_a_target_that_fails_leaves_what_was_handed_over(
    tmp_path: Path,
    target_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches shards that were computed and thrown away because a later one ran out of memory."""
    config = write_config(tmp_path, target_folder, count=40, shard_tokens=100)
    exact, slow = stores.run_shard, StoreWriter.write

    def out_of_memory(*arguments: Any) -> Any:
        if arguments[3][0] > 8:
            raise ValueError("out of memory in a forward of 8192 tokens")
        return exact(*arguments)

    def write(*arguments: Any) -> Any:
        time.sleep(0.05)  # so that shards are waiting when it happens
        return slow(*arguments)

    monkeypatch.setattr(stores, "run_shard", out_of_memory)
    monkeypatch.setattr(StoreWriter, "write", write)
    with pytest.raises(ValueError, match="out of memory"):
        run(config, f"splits={json.dumps({'train': str(tmp_path / 'train.jsonl')})}")
    assert read_manifest(tmp_path / "out" / "train").dialogues > 8


def test_a_corpus_of_one_dialogue(tmp_path: Path, target_folder: Path) -> None:  # noqa: F811
    """Catches a split of one dialogue that has no plan, no shard or no batch, or that training cannot hold out."""
    config = write_config(tmp_path, target_folder, count=1, store_dtype="int8")
    (tmp_path / "heldout.jsonl").write_text(json.dumps(dialogue(7)))
    run(config)
    assert [len(FeatureStore.open(tmp_path / "out" / split)) for split in ("train", "heldout")] == [1, 1]
    values = tiny_run.settings(str(target_folder), tmp_path / "out", tmp_path / "run", steps=2, batch_tokens=256)
    tiny_run.train_here("eagle", values)
    assert (tmp_path / "run" / "model.safetensors").is_file()


LIKE_SHAREGPT = [round(40 * 50 ** (((index * 7919) % 997) / 997)) for index in range(3000)]  # 40 to 2,000, log-uniform


@pytest.mark.parametrize("file", ["stdlib.yaml", "vicuna-7b-sharegpt.yaml"])
def test_padding_at_the_shipped_settings(file: str) -> None:
    """Catches batches that waste a tenth of the target's time, or that got so small that a GPU idles."""
    config = load_config(FeaturesConfig, Path(__file__).parents[1] / "configs" / "features" / file)
    padded = batches = 0
    for first, last in plan_shards(LIKE_SHAREGPT, config.shard_tokens):
        lengths = LIKE_SHAREGPT[first:last]
        for rows in plan_batches(lengths, config.batch_tokens):
            padded += len(rows) * max(lengths[row] for row in rows)
            batches += 1
    assert 1 - sum(LIKE_SHAREGPT) / padded < 0.06
    assert sum(LIKE_SHAREGPT) / batches > 2000
