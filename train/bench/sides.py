"""The two sides of train/throughput.py: our training step and the plain one, or ours with and without checksums."""

import argparse
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from data_prep.store.reader import FeatureStore, StoredDialogue
from drafters.model.files import resolve_device
from train.bench.reference import pad, plain_batches, plain_loss_sum, write_samples
from train.core.config import TrainConfig
from train.core.engine import Engine, start
from train.core.optimizer import MasterAdamW, exact_buffers
from train.core.runtime import ALONE, dtype_of
from train.core.task import Task, make_task
from train.data.packing import Batch, Position, TrainData, collate, epoch_batches, split_evenly
from train.data.shard_check import ShardCheck
from train.preflight.estimate import meta_ends
from train.run.inputs import open_inputs
from train.watch.flops import TrainingCost, training_cost

# Log-normal, cut at 2,048. Its mean fits the known size of EAGLE's ShareGPT features: 0.7 TB, 8 KB per token, 68,000
# dialogues.
REALISTIC = {"mu": 7.2, "sigma": 1.0, "shortest": 16, "longest": 2048}
ANSWERS = 0.75  # share of a random dialogue's tokens that belong to answers, its last ones


@dataclass
class Round:
    """Figures of one round of one side; times in seconds."""

    tokens: int = 0
    positions: int = 0  # tokens and padding
    flops: float = 0.0
    waited: float = 0.0  # for the next step's data
    seconds: float = 0.0
    peak_bytes: int | None = None  # of a GPU's memory

    @property
    def tokens_per_second(self) -> float:
        """Without padding."""
        return self.tokens / self.seconds


@dataclass
class Side:
    """A side's rounds and, if it failed, the reason."""

    rounds: list[Round] = field(default_factory=list)
    failed: str | None = None


@dataclass
class Bench:
    """Task, engine and batches of both sides.

    Attributes:
        batches: ``batches(side, round)`` gives the round's optimiser steps, each a list of micro-batches.
        sides: their names; "plain" is trained by the plain formulation.
    """

    task: Task
    engine: Any
    device: torch.device
    batches: Callable[[str, int], Generator[list[Batch], None, None]]
    sides: tuple[str, str] = ("ours", "plain")

    def run(self, rounds: int, progress: Any) -> dict[str, Side]:
        """Alternate between the sides; the first round is warm-up and does not count."""
        sides = {name: Side() for name in self.sides}
        cost = training_cost(self.task)
        for number in range(rounds + 1):
            for name in self.sides if number % 2 else reversed(self.sides):
                side = sides[name]
                if side.failed:
                    continue
                try:
                    done = self._round(name, number, cost)
                    side.rounds += [done] if number else []
                except torch.OutOfMemoryError as error:
                    side.failed = str(error).splitlines()[0]
                    self.engine.module.zero_grad(set_to_none=True)
                progress.update(1)
        return sides

    def _round(self, name: str, number: int, cost: TrainingCost) -> Round:
        on_gpu, done = self.device.type == "cuda", Round()
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        began = asked = time.perf_counter()
        with closing(self.batches(name, number)) as steps:
            for micro_batches in steps:
                done.waited += time.perf_counter() - asked
                trained = self._step(name, micro_batches)
                done.tokens += sum(batch.tokens for batch in micro_batches)
                done.positions += sum(batch.segments.numel() for batch in micro_batches)
                done.flops += cost.of([span.length for batch in micro_batches for span in batch.spans], trained)
                asked = time.perf_counter()
        if on_gpu:
            torch.cuda.synchronize(self.device)
            done.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        done.seconds = time.perf_counter() - began
        return done

    def _step(self, name: str, micro_batches: list[Batch]) -> int:
        batches = [replace(batch, rows=self.task.rows(batch)) for batch in micro_batches]
        trained = sum(len(batch.rows) for batch in batches)
        scale = len(micro_batches) / max(1, trained)
        for batch in batches:
            batch = batch.to(self.device, dtype_of(self.task.config))
            if name != "plain":
                loss = self.task.losses(self.task.pairs(self.engine, batch, seed=0))["loss"]
            else:
                loss = plain_loss_sum(self.task, self.engine, batch, seed=0)
            self.engine.backward(loss * scale)
            self.engine.step()
        return trained


def from_config(config: TrainConfig, arguments: argparse.Namespace, folder: Path) -> tuple[Bench, dict[str, Any]]:
    """With a run's own store and optimizer; writes the plain side's files into ``folder``.

    Raises:
        ValueError: those of the training program, or too few batches.
    """
    inputs = open_inputs(config)
    store = inputs.train
    if not isinstance(store, FeatureStore):
        raise ValueError("the throughput of features: online is the target's; give a config with a store")
    start(config)
    task = make_task(config, inputs.ends)
    engine = Engine(task.module, config)
    task.ends.to(engine.device)
    data = TrainData(store, config, pin=engine.device.type == "cuda")
    plan = _plan(config, data.lengths)
    steps = min(arguments.steps, len(plan) // (arguments.rounds + 1))
    if not steps:
        raise ValueError(
            f"an epoch of {config.features} has {len(plan)} batches of {config.batch_tokens} tokens, fewer than "
            f"{arguments.rounds + 1} rounds; lower --rounds or batch_tokens"
        )
    if not arguments.verify:
        write_samples(store, sorted({index for batch in plan for index in batch}), folder)

    def trained(name: str, number: int) -> Generator[list[Batch], None, None]:
        data.check = check = ShardCheck([store] if name == "verified" else [], ALONE, engine.device)
        with closing(check), closing(data.steps(Position(0, number * steps))) as stream:
            for _ in range(steps):
                yield next(stream).batches
            check.wait(print)  # as a run does before a checkpoint

    def batches(name: str, number: int) -> Generator[list[Batch], None, None]:
        if name != "plain":
            return trained(name, number)
        part, pinned = plan[number * steps : (number + 1) * steps], data.pin
        return plain_batches(part, data.lengths, config.gradient_accumulation, folder, arguments.workers, pinned)

    what = {"steps_a_round": steps, "optimizer": "DeepSpeed's", "store_bytes": store.manifest.size}
    compared = ("verified", "unverified") if arguments.verify else ("ours", "plain")
    return Bench(task, engine, engine.device, batches, compared), what


def from_shape(
    config: TrainConfig, arguments: argparse.Namespace, shape: dict[str, int]
) -> tuple[Bench, dict[str, Any]]:
    """With a head of a given shape on random features, without files.

    Raises:
        ValueError: no store to take lengths from, or too few dialogues for ``gradient_accumulation``.
    """
    device = resolve_device()
    torch.manual_seed(config.seed)
    lengths = draw_lengths(arguments.dialogue_lengths, config.seed)
    plan = _plan(config, lengths, arguments.steps)
    with torch.device(device):
        task = make_task(config, meta_ends(config_of_shape(shape), str(device), dtype_of(config)))
    with exact_buffers(task.module):
        task.module.to(device, dtype_of(config))
    store: Any = RandomStore(lengths, shape, dtype_of(config), config.taps)
    ready: dict[str, list[list[Batch]]] = {"ours": [], "plain": []}
    for batch in plan:
        shares = split_evenly(batch, lengths, config.gradient_accumulation)
        ready["ours"].append([_pinned(collate(store, share, config.taps), device) for share in shares])
        ready["plain"].append([_pinned(pad([(i, store[i]) for i in share]), device) for share in shares])
    what = {
        "shape": shape,
        "batch_tokens": config.batch_tokens,
        "dialogue_lengths": REALISTIC if arguments.dialogue_lengths == "realistic" else arguments.dialogue_lengths,
        "mean_length": round(statistics.mean(lengths[i] for batch in plan for i in batch), 1),
        "answers": ANSWERS,
        "features": "random",
        "steps_a_round": len(plan),
        "optimizer": "AdamW, float32 masters",
    }
    return Bench(task, MasterAdamW(task.module, config), device, lambda name, _: (step for step in ready[name])), what


def _plan(config: TrainConfig, lengths: list[int], most: int | None = None) -> list[list[int]]:
    """The first epoch's global batches, at most ``most``; raises ValueError if one leaves a micro-batch empty."""
    plan = epoch_batches(lengths, config.batch_tokens, config.seed, 0)[:most]
    if min(map(len, plan)) < config.gradient_accumulation:
        raise ValueError(f"gradient_accumulation: {config.gradient_accumulation} is more than some batch has dialogues")
    return plan


class RandomStore:
    """Random tokens and features of given lengths, made by each read, always the same."""

    def __init__(self, lengths: list[int], shape: dict[str, int], dtype: torch.dtype, taps: tuple[int, ...]) -> None:
        self.lengths, self.dtype, self.taps = lengths, dtype, taps
        self.hidden, self.vocab = shape["hidden"], shape["vocab"]

    def __getitem__(self, index: int) -> StoredDialogue:
        generator = torch.Generator().manual_seed(index)
        length = self.lengths[index]

        def states() -> torch.Tensor:
            return torch.randn(length, self.hidden, generator=generator).to(self.dtype)

        return StoredDialogue(
            input_ids=torch.randint(0, self.vocab, (length,), generator=generator),
            loss_mask=torch.arange(length) >= (1 - ANSWERS) * length,
            features=states(),
            taps={layer: states() for layer in self.taps},
        )


def config_of_shape(shape: dict[str, int]) -> LlamaConfig:
    """The configuration of a Llama of this ``shape``."""
    return LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=32,
        max_position_embeddings=REALISTIC["longest"],
    )


def draw_lengths(source: str, seed: int) -> list[int]:
    """Lengths of dialogues: drawn from ``REALISTIC``, or those of the store in the folder ``source``."""
    if source != "realistic":
        return FeatureStore.open(source).lengths.tolist()
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(4096, generator=generator) * REALISTIC["sigma"] + REALISTIC["mu"]).exp()
    return drawn.long().clamp(int(REALISTIC["shortest"]), int(REALISTIC["longest"])).tolist()


def _pinned(batch: Batch, device: torch.device) -> Batch:
    return batch.pin_memory() if device.type == "cuda" else batch
