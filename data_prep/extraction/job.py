"""A job of vLLM's process: a folder with the store's header, the shards to write and their dialogues."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from data_prep.dialogues.encoding import EncodedSplit
from data_prep.store.manifest import StoreManifest
from data_prep.store.writer import Shard
from drafters.common.files import save_tensors

JOB, DIALOGUES, FAILED = "job.json", "dialogues.safetensors", "failed"


@dataclass(frozen=True)
class Job:
    """Shards of one split.

    Attributes:
        store: the store's folder; the dump holds its lock. header: the store's, without counts.
        spans: of each shard its number and the dialogues ``first..last`` of the split.
        dialogues: ``input_ids`` and ``loss_mask`` of all shards' dialogues end to end, and their ``offsets``.
    """

    folder: Path
    store: Path
    header: StoreManifest
    spans: list[tuple[int, int, int]]
    ids: list[str]
    dialogues: dict[str, torch.Tensor]

    @classmethod
    def write(
        cls, folder: Path, store: Path, header: StoreManifest, spans: list[tuple[int, int, int]], split: EncodedSplit
    ) -> None:
        """Make the folder of a job."""
        taken = [split.dialogues[row] for _, first, last in spans for row in range(first, last)]
        ids = [split.ids[row] for _, first, last in spans for row in range(first, last)]
        folder.mkdir(parents=True, exist_ok=True)
        offsets = torch.tensor([0, *(len(dialogue.input_ids) for dialogue in taken)]).cumsum(0)
        parts = {name: [torch.from_numpy(getattr(one, name)) for one in taken] for name in ("input_ids", "loss_mask")}
        tensors = {name: torch.cat(rows) for name, rows in parts.items()} | {"offsets": offsets}
        save_tensors({**tensors, "input_ids": tensors["input_ids"].int()}, folder / DIALOGUES)
        facts = {"store": str(store.absolute()), "header": header.model_dump(), "spans": spans, "ids": ids}
        (folder / JOB).write_text(json.dumps(facts))

    @classmethod
    def read(cls, folder: str) -> "Job":
        """Read a folder that ``write`` made."""
        facts: dict[str, Any] = json.loads((Path(folder) / JOB).read_text())
        spans = [(number, first, last) for number, first, last in facts["spans"]]
        header, dialogues = StoreManifest(**facts["header"]), load_file(Path(folder) / DIALOGUES)
        return cls(Path(folder), Path(facts["store"]), header, spans, facts["ids"], dialogues)

    def rows(self, place: int) -> range:
        """Indices of the job's dialogues in the shard at ``place`` among the ``spans``."""
        start = sum(last - first for _, first, last in self.spans[:place])
        _, first, last = self.spans[place]
        return range(start, start + last - first)

    def tokens(self, row: int) -> list[int]:
        """Token ids of one dialogue."""
        start, end = self.dialogues["offsets"][row : row + 2].tolist()
        tokens: list[int] = self.dialogues["input_ids"][start:end].tolist()
        return tokens

    def shard(self, place: int, states: dict[str, torch.Tensor], scales: dict[str, torch.Tensor]) -> Shard:
        """The shard at ``place`` with its hidden states."""
        rows, offsets = self.rows(place), self.dialogues["offsets"]
        start, end = int(offsets[rows.start]), int(offsets[rows.stop])
        return Shard(
            ids=self.ids[rows.start : rows.stop],
            lengths=offsets[rows.start : rows.stop + 1].diff().tolist(),
            input_ids=self.dialogues["input_ids"][start:end],
            loss_mask=self.dialogues["loss_mask"][start:end],
            states=states,
            scales=scales,
        )
