"""Verify the checksum of each shard that a run reads, once, in parallel to the training.

Opening a store compares only sizes and headers, because hashing the content takes minutes. A thread hashes a shard
(without Python's lock) once a dialogue of it is read. Every checkpoint waits for the shards that it was trained on.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from data_prep.store.reader import FeatureStore, is_whole
from train.core.runtime import Ranks, local_ranks

QUIET = 5.0  # seconds of waiting without a message
BETWEEN = 60.0  # seconds between two collectives while ranks wait
Shard = tuple[str, int]  # a store's path, and the shard's place in its manifest


class ShardCheck:
    """The shards of ``stores``, as far as they are feature stores.

    Every rank gets the same dialogues, so the ranks of a machine share the shards.
    """

    def __init__(self, stores: Sequence[object], ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._stores = {str(store.path): store for store in stores if isinstance(store, FeatureStore)}
        self._shards = [(path, n) for path, store in self._stores.items() for n in range(len(store.manifest.shards))]
        self._parts = local_ranks(1)
        # LOCAL_RANK is 0 for all processes if each sees one GPU, so it cannot share the shards out.
        self._part = ranks.rank % self._parts
        self._asked: set[Shard] = set()
        self._broken: set[Shard] = set()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "checksums")
        self._running: list[Future[None]] = []

    def first_read(self, store: object, dialogues: Iterable[int]) -> None:
        """Begin to check the shards of ``dialogues``, which are about to be read, once for each shard."""
        if not isinstance(store, FeatureStore) or str(store.path) not in self._stores:
            return
        with self._lock:
            new = sorted({(str(store.path), number) for number in store.shards_of(dialogues)} - self._asked)
            self._asked |= {*new}
            mine = [shard for shard in new if shard[1] % self._parts == self._part]
            self._running += [self._thread.submit(self._check, shard) for shard in mine]

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
        flags = torch.tensor([shard in self._broken for shard in self._shards], dtype=torch.int64, device=self._device)
        files: dict[str, list[str]] = defaultdict(list)
        for (path, number), flag in zip(self._shards, self._ranks.total(flags).tolist(), strict=True):
            if flag:
                files[path].append(self._stores[path].manifest.shards[number].file)
        return "; ".join(
            f"the content of {', '.join(names)} in {path} is not what was written (SHA-256 differs, or it cannot "
            f"be read): copy it again, or delete {path} and make the features again"
            for path, names in files.items()
        )

    def close(self) -> None:
        """Begin no further checks."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check(self, shard: Shard) -> None:
        store, sound = self._stores[shard[0]], False
        try:
            sound = is_whole(store.path, store.manifest.shards[shard[1]])
        finally:  # this thread's exceptions are not read, and an unreadable shard is not sound
            if not sound:
                self._broken.add(shard)
