"""The plain formulation of training a drafter, a reference for train/tools/throughput.py and the tests.

It follows public trainers of EAGLE heads, without their mistakes: one file per dialogue, read by a DataLoader; batches
padded to the longest dialogue; logits of target and drafter over the full vocabulary at every position, with autograd
through the LM head. Training does not use it.
"""

from collections.abc import Generator
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data_prep.store.reader import FeatureStore, StoredDialogue
from train.core.lm_heads import LMHeads
from train.core.losses import Pairs, TextTokens, TopK
from train.core.task import Task, target_states
from train.data.packing import Batch, Span, TrainData, split_evenly


def write_samples(store: FeatureStore, dialogues: list[int], folder: Path) -> None:
    """Write one safetensors file for each of ``dialogues`` (indices into the store) into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in dialogues:
        item = store[index]
        tensors = {"input_ids": item.input_ids, "loss_mask": item.loss_mask, "features": item.features}
        tensors |= {f"tap_{layer}": tap for layer, tap in item.taps.items()}
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, sample_file(folder, index))


def sample_file(folder: Path, index: int) -> Path:
    """The file of dialogue ``index``."""
    return folder / f"{index:08d}.safetensors"


class SampleFiles(Dataset[tuple[int, StoredDialogue]]):
    """Dialogues by index, each from its own file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> tuple[int, StoredDialogue]:
        tensors = load_file(sample_file(self.folder, index))
        taps = {int(name[4:]): tensors.pop(name) for name in list(tensors) if name.startswith("tap_")}
        return index, StoredDialogue(**tensors, taps=taps)


def plain_batches(
    plan: list[list[int]], data: TrainData, folder: Path, workers: int
) -> Generator[list[Batch], None, None]:
    """The global batches of ``plan`` as padded micro-batches, read from ``folder`` by a DataLoader."""
    count = data.config.gradient_accumulation
    shares = [share for batch in plan for share in split_evenly(batch, data.lengths, count)]
    files = SampleFiles(folder)
    loaded = iter(DataLoader(files, batch_sampler=shares, collate_fn=pad, num_workers=workers, pin_memory=data.pin))
    for _ in plan:
        yield [next(loaded) for _ in range(count)]


def pad(samples: list[tuple[int, StoredDialogue]]) -> Batch:
    """One dialogue a row, padded on the right to the longest of them: ``[B, T]``."""
    items = [item for _, item in samples]
    padded = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    lengths = torch.tensor([len(item.input_ids) for item in items])
    positions = torch.arange(int(lengths.max())).expand(len(items), -1)
    return Batch(
        input_ids=padded([item.input_ids for item in items]),
        loss_mask=padded([item.loss_mask for item in items]),
        features=padded([item.features for item in items]),
        taps={layer: padded([item.taps[layer] for item in items]) for layer in items[0].taps},
        position_ids=positions,
        segments=torch.where(positions < lengths[:, None], 0, -1),
        spans=[Span(row, 0, len(item.input_ids), index) for row, (index, item) in enumerate(samples)],
    )


def plain_loss_sum(task: Task, module: Any, batch: Batch, seed: int | None = None) -> Tensor:
    """The task's "loss", differentiable, by full ``[B, T, V]`` logits and a mask.

    ``task`` gives all but the cross-entropy. ``batch``: padded; ``rows`` are its trained positions. ``seed``: as for
    ``Task.pairs``.
    """
    inputs = batch if seed is None else task.with_noise(batch, seed)
    predicted = task.predict(module, replace(inputs, spans=[]))  # without spans: plain causal attention
    predictions = (predicted if predicted.dim() == 4 else predicted[None]).flatten(1, 2)
    trained = torch.zeros(batch.segments.numel(), device=batch.segments.device)
    trained[batch.rows] = 1.0
    targets = target_states(batch, task.ahead).flatten(0, 1)
    plain = copy(task)
    plain.heads = PlainHeads(task.config, task.ends.lm_head)
    plain.heads.drafter_heads = task.heads.drafter_heads
    return plain.losses(Pairs(predictions, targets, trained.expand(len(predictions), -1)))["loss"]


class PlainHeads(LMHeads):
    """The cross-entropy by autograd, through logits of all positions."""

    def divergence(
        self, pairs: Pairs, name: str, term: TopK | TextTokens | None = None, overlap: Tensor | None = None
    ) -> Tensor:
        assert pairs.weights is not None
        with torch.no_grad():
            p = F.softmax(self.target(pairs.targets), dim=-1, dtype=torch.float32)
        sums = []
        for number, (predicted, weights) in enumerate(zip(pairs.predictions, pairs.weights, strict=True)):
            head = self.drafter_heads[number] if self.drafter_heads else self.target
            log_q = F.log_softmax(head(predicted), dim=-1, dtype=torch.float32)
            sums.append(-((p * log_q).sum(-1) * weights).sum())
        return torch.stack(sums)
