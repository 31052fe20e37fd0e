"""The plain formulation of training a drafter: the reference that train/throughput.py and the tests hold the loop to.

What public trainers of EAGLE heads do, in its fair form: one file a dialogue, read by a DataLoader; a batch padded to
its longest dialogue; the logits of target and drafter over the full vocabulary at every position, with autograd through
the LM head. Nothing of it is used in training.
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
from train.core.task import Task
from train.data.packing import Batch, Span, split_evenly


def write_samples(store: FeatureStore, dialogues: list[int], folder: Path) -> None:
    """One safetensors file for each of ``dialogues`` (indices into the store) in ``folder``, by index."""
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
    """Dialogues by index, each from its own file; only those written can be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> tuple[int, StoredDialogue]:
        tensors = load_file(sample_file(self.folder, index))
        taps = {int(name[4:]): tensors.pop(name) for name in list(tensors) if name.startswith("tap_")}
        return index, StoredDialogue(**tensors, taps=taps)


def plain_batches(
    plan: list[list[int]], lengths: list[int], micro_batches: int, folder: Path, workers: int, pinned: bool
) -> Generator[list[Batch], None, None]:
    """The global batches of ``plan`` as padded micro-batches, which a DataLoader reads from ``folder``."""
    shares = [share for batch in plan for share in split_evenly(batch, lengths, micro_batches)]
    files = SampleFiles(folder)
    loader = DataLoader(files, batch_sampler=shares, collate_fn=pad, num_workers=workers, pin_memory=pinned)
    loaded = iter(loader)
    for _ in plan:
        yield [next(loaded) for _ in range(micro_batches)]


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


def plain_loss_sum(task: Task, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None = None) -> Tensor:
    """The task's "loss" of ``Task.loss_sums``, differentiable, by full ``[B, T, V]`` logits and a mask.

    Args:
        task: whose predictions, targets and losses these are, all but its cross-entropy.
        module: what is trained.
        batch: padded, on the module's device.
        rows: flat indices int64 ``[n]`` into ``[B * T]`` of the trained positions.
    """
    trained = torch.zeros(batch.segments.numel(), device=batch.segments.device)
    trained[rows] = 1.0
    inputs = batch if noise_seed is None else task.with_noise(batch, noise_seed)
    target = task.targets(batch).flatten(0, 1)
    predicted = task.predict(module, replace(inputs, spans=[])).flatten(0, 1)  # without spans: plain causal attention
    # Where nothing is trained the prediction is the target, of which no loss has anything to say but a cross-entropy.
    ideal = task.ideal(target)
    predicted = torch.where(trained.bool().view(-1, *[1] * (ideal.dim() - 1)), predicted, ideal)

    def classification(predicted: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            p = F.softmax(task.ends.lm_head(target), dim=-1, dtype=torch.float32)

        def of_one(predicted: Tensor, lm_head: Any) -> Tensor:
            log_q = F.log_softmax(lm_head(predicted), dim=-1, dtype=torch.float32)
            return -((p * log_q).sum(-1) * trained).sum()

        if predicted.dim() == 2:
            return of_one(predicted, task.draft_lm_head)
        each = predicted.unbind(0)
        lm_heads = task.own or [task.ends.lm_head] * len(each)
        return torch.stack([of_one(*pair) for pair in zip(each, lm_heads, strict=True)])

    plain = copy(task)
    plain.classification = classification  # type: ignore[method-assign]
    return plain.losses(predicted, target)["loss"]
