"""A job of vLLM's process: a folder with the store's header, and tokens and masks of the shards to write."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from data_prep.dialogues.encoding import EncodedSplit
from data_prep.extraction.dump import without_states
from data_prep.store.manifest import StoreManifest, shard_file
from data_prep.store.writer import Shard
from drafters.common.files import save_tensors

JOB, FAILED = "job.json", "failed"


@dataclass(frozen=True)
class Job:
    """Shards of one split by their numbers, without states. The dump holds the lock of the folder ``store``."""

    folder: Path
    store: Path
    header: StoreManifest  # without counts
    shards: dict[int, Shard]

    @classmethod
    def write(
        cls, folder: Path, store: Path, header: StoreManifest, spans: list[tuple[int, int, int]], split: EncodedSplit
    ) -> None:
        """Make the folder for the shards ``(number, first, last)`` of dialogues ``first..last``."""
        folder.mkdir(parents=True, exist_ok=True)
        shards = []
        for number, first, last in spans:
            shard = without_states(split, first, last)
            save_tensors({"input_ids": shard.input_ids, "loss_mask": shard.loss_mask}, folder / shard_file(number))
            shards.append({"number": number, "ids": shard.ids, "lengths": shard.lengths})
        facts = {"store": str(store.absolute()), "header": header.model_dump(), "shards": shards}
        (folder / JOB).write_text(json.dumps(facts))

    @classmethod
    def read(cls, folder: str) -> "Job":
        """Read a folder that ``write`` made."""
        facts: dict[str, Any] = json.loads((Path(folder) / JOB).read_text())
        shards = {}
        for one in facts["shards"]:
            tensors = load_file(Path(folder) / shard_file(one["number"]))
            shards[one["number"]] = Shard(one["ids"], one["lengths"], tensors["input_ids"], tensors["loss_mask"], {})
        return cls(Path(folder), Path(facts["store"]), StoreManifest(**facts["header"]), shards)
