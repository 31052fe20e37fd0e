"""The cache of ``features: online``: a feature store of the training split's first dialogues, within ``data.disk_gb``.

Before the first step, the ranks write the shards that fit into the budget with the writer of data_prep.features. Every
epoch reads them, and the target computes the other dialogues again. A kill loses at most three shards. The cached
dialogues depend on the budget alone, and a shard's bytes on its dialogues alone, so a resumed run repeats bit for bit.
"""

import itertools
from pathlib import Path

import torch
from torch import Tensor

from data_prep.common.disk import check_room
from data_prep.common.progress import Bar
from data_prep.common.ranks import Rank
from data_prep.dialogues.encoding import EncodedSplit
from data_prep.extraction.dump import Tokens
from data_prep.extraction.stores import Work, run_here
from data_prep.store.manifest import MANIFEST, ShardPlan, StoreManifest, plan_shards, read_manifest
from data_prep.store.reader import FeatureStore
from data_prep.store.writer import StoreWriter
from drafters.common.wording import size_text
from drafters.model.target import TargetModel

SHARD_TOKENS = 8192  # tokens of a shard: the cache ends with a whole one


class Cache:
    """The cached dialogues of ``split``, by their index in it; ``store`` may lack some that were not finite."""

    def __init__(self, store: FeatureStore, split: EncodedSplit) -> None:
        self.store = store
        self._places: dict[int, int] = {}  # index in the split -> index in the store, which has the same order
        for index, dialogue in enumerate(split.dialogues[: store.manifest.consumed]):
            place = len(self._places)
            if place < len(store) and store[place].input_ids.tolist() == dialogue.input_ids.tolist():
                self._places[index] = place

    def __len__(self) -> int:
        return len(self._places)

    def read(self, dialogue: int, tokens: Tensor, states: dict[int | None, Tensor]) -> bool:
        """Copy a dialogue's features (key None) and taps into ``states`` ``[T, H]``; False if it is not cached.

        ``tokens`` ``[T]`` are compared, because ``on_policy`` replaces answers.
        """
        place = self._places.get(dialogue)
        if place is None:
            return False
        stored = self.store[place]
        if not torch.equal(stored.input_ids, tokens.cpu()):
            return False
        for key, values in states.items():
            values.copy_(stored.features if key is None else stored.taps[key])
        return True


def shards_within(split: EncodedSplit, header: StoreManifest, disk_gb: float) -> dict[tuple[int, int, int], int]:
    """Tokens of the first shards ``(number, first dialogue, last)`` of ``split`` that fit into ``disk_gb``."""
    plan = [(number, *span) for number, span in enumerate(plan_shards(split.lengths, SHARD_TOKENS))]
    tokens = [sum(split.lengths[first:last]) for _, first, last in plan]
    fitting = [header.token_bytes * total <= disk_gb * 1e9 for total in itertools.accumulate(tokens)]
    return {span: count for span, count, fits in zip(plan, tokens, fitting, strict=True) if fits}


def check_disk(folder: Path, split: EncodedSplit, header: StoreManifest, disk_gb: float) -> None:
    """Raise ValueError if no shard fits into ``disk_gb``, or the cache does not fit on the disk of ``folder``."""
    shards = shards_within(split, header, disk_gb)
    if not shards:
        most = next(last for _, last in plan_shards(split.lengths, SHARD_TOKENS))
        least = header.token_bytes * sum(split.lengths[:most])
        raise ValueError(
            f"data.disk_gb is {disk_gb:g}, and the first shard of the cache takes {size_text(least)}; give more, or "
            "null for no cache"
        )
    written = read_manifest(folder).size if (folder / MANIFEST).is_file() else 0
    needed = header.token_bytes * sum(shards.values()) - written
    check_room(folder, needed, f"data.disk_gb: the cache {folder}", "lower data.disk_gb, or set it to null")


def fill_cache(
    folder: Path, disk_gb: float, split: EncodedSplit, header: StoreManifest, target: TargetModel, batch_tokens: int,
    rank: Rank,
) -> Cache:  # fmt: skip
    """Write this rank's missing shards, wait for the other ranks, and open the cache.

    Args:
        folder: shared by all ranks; it is made if missing.
        header: the manifest of a store of ``split``, without counts.
        batch_tokens: tokens of one forward of the target, padding included.

    Raises:
        ValueError: the folder holds features with other settings, or another process writes there.
        OSError: the disk is full.
    """
    begun = header.model_copy(update={"plan": ShardPlan.of(split.lengths, SHARD_TOKENS)})
    shards = shards_within(split, header, disk_gb)
    with StoreWriter(folder, begun, rank) as writer:
        missing = {span: shards[span] for span in writer.missing(split.lengths) if span in shards}
        if missing:
            with Bar(desc="cache", total=sum(missing.values()), unit="tok", disable=rank.index > 0) as progress:
                run_here(target, Work("cache", folder, begun, split), writer, missing, batch_tokens, Tokens(), progress)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    manifest = read_manifest(folder)
    cache = Cache(FeatureStore(folder, manifest), split)
    if rank.index == 0:
        others = len(split.ids) - len(cache)
        print(
            f"cache: {len(cache):,} of {len(split.ids):,} training dialogues in {folder}, {size_text(manifest.size)}; "
            f"the target computes {others:,} in every epoch"
        )
    return cache
