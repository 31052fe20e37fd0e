"""Verify the checksum of each shard that a run reads, once, in parallel to the training.

Opening a store compares only sizes and headers, because hashing the content takes minutes. A thread hashes a shard
(without Python's lock) once a dialogue of it is read. Every checkpoint waits for the shards that it was trained on.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from data_prep.store.manifest import ShardEntry
from data_prep.store.reader import FeatureStore, is_whole
from train.core.runtime import Ranks, local_ranks

QUIET = 5.0  # seconds of waiting without a message
BETWEEN = 60.0  # seconds between two collectives while ranks wait


class ShardCheck:
    """The shards of ``stores``, as far as they are feature stores.

    Every rank gets the same dialogues, so the ranks of a machine share the shards.
    """

    def __init__(self, stores: Sequence[object], ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._shards: list[tuple[FeatureStore, ShardEntry]] = []
        self._begin: dict[str, int] = {}  # by store, the index of its first shard in that list
        for store in stores:
            if isinstance(store, FeatureStore) and str(store.path) not in self._begin:
                self._begin[str(store.path)] = len(self._shards)
                self._shards += [(store, entry) for entry in store.manifest.shards]
        self._parts = local_ranks(1)
        # LOCAL_RANK is 0 for all processes if each sees one GPU, so it cannot share the shards out.
        self._part = ranks.rank % self._parts
        self._asked: set[int] = set()
        self._broken: set[int] = set()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._running: list[Future[None]] = []

    def first_read(self, store: object, dialogues: Iterable[int]) -> None:
        """Begin to check the shards of ``dialogues``, which are about to be read, once for each shard."""
        if not isinstance(store, FeatureStore) or str(store.path) not in self._begin:
            return
        numbers = {self._begin[str(store.path)] + shard for shard in store.shards_of(dialogues)}
        with self._lock:
            new = sorted(numbers - self._asked)
            self._asked |= numbers
            mine = [number for number in new if number % self._parts == self._part]
            self._running += [self._thread.submit(self._check, number) for number in mine]

    @property
    def broken(self) -> int:
        """Number of shards that this rank has found broken so far."""
        return len(self._broken)

    def wait(self, say: Callable[[str], object]) -> None:
        """Wait until all ranks have checked all shards read so far; ``say`` prints if that takes long. A collective.

        It is repeated every minute, because hashing a large store may exceed the timeout of a collective.
        """
        with self._lock:  # the next call waits for the shards that readers begin meanwhile
            running, self._running = self._running, []
        _, left = wait(running, timeout=QUIET)
        if left:
            say(f"waiting for the checksums of {len(left)} shards, so that no checkpoint is made from a broken one")
        while self._shards and self._ranks.total(torch.tensor(len(left), device=self._device)):
            _, left = wait(left, timeout=BETWEEN)

    def problems(self) -> str:
        """An error message about broken shards of all ranks, the same on each; "" if all are sound. A collective."""
        if not self._shards:
            return ""
        flags = torch.zeros(len(self._shards), dtype=torch.int64, device=self._device)
        flags[list(self._broken)] = 1
        files: dict[FeatureStore, list[str]] = defaultdict(list)
        for number in self._ranks.total(flags).nonzero()[:, 0].tolist():
            store, entry = self._shards[number]
            files[store].append(entry.file)
        return "; ".join(
            f"the content of {', '.join(names)} in {store.path} is not what was written (SHA-256 differs, or it cannot "
            f"be read): copy it again, or delete {store.path} and make the features again"
            for store, names in files.items()
        )

    def close(self) -> None:
        """Begin no further checks."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, number: int) -> None:
        store, entry = self._shards[number]
        sound = False
        try:
            sound = is_whole(store.path, entry)
        finally:  # this thread's exceptions are not read, and an unreadable shard is not sound
            if not sound:
                self._broken.add(number)
