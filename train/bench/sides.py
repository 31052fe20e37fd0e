"""What train/throughput.py measures: our training step and the plain one, or ours with and without checksums."""

import argparse
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from data_prep.store.reader import FeatureStore, StoredDialogue
from drafters.model.files import resolve_device
from train.bench.reference import SampleFiles, pad, plain_loss_sum, write_samples
from train.config import TrainConfig
from train.data.packing import Batch, Position, TrainData, collate, epoch_batches, split_evenly
from train.optimizer import MasterAdamW, buffers_of, restore_buffers
from train.preflight.estimate import meta_ends
from train.task import Task, make_task
from train.watch.flops import peak_tflops, training_cost

# Log-normal, cut at 2,048; its mean is about what the known size of EAGLE's ShareGPT features comes to: 0.7 TB of 8 KB
# a token, 68 k dialogues.
REALISTIC = {"mu": 7.2, "sigma": 1.0, "shortest": 16, "longest": 2048}
ANSWERS = 0.75  # of a random dialogue's tokens, its last ones, belong to answers


@dataclass
class Side:
    """What one formulation did in each round."""

    tokens_per_second: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    mfu: list[float] = field(default_factory=list)
    tokens: int = 0
    positions: int = 0  # tokens and padding
    seconds: float = 0.0
    waited: float = 0.0  # seconds until the next step's data was there
    failed: str | None = None


@dataclass
class Bench:
    """What both sides share, and where their batches come from.

    Attributes:
        batches: ``batches(side, round)`` gives the round's optimiser steps, each a list of micro-batches.
        sides: what is compared; only "plain" is not trained by our formulation.
    """

    task: Task
    engine: Any
    device: torch.device
    config: TrainConfig
    batches: Callable[[str, int], Generator[list[Batch], None, None]]
    peak_tflops: float | None
    sides: tuple[str, str] = ("ours", "plain")

    def run(self, rounds: int, progress: Any) -> dict[str, Side]:
        """Both sides in turns; the first round warms up and is not counted."""
        sides = {name: Side() for name in self.sides}
        cost = training_cost(self.task)
        for number in range(rounds + 1):
            for name in self.sides if number % 2 else reversed(self.sides):
                side = sides[name]
                if side.failed:
                    continue
                try:
                    self._round(name, number, side if number else Side(), cost)
                except torch.OutOfMemoryError as error:
                    side.failed = str(error).splitlines()[0]
                    self.engine.module.zero_grad(set_to_none=True)
                progress.update(1)
        return sides

    def _round(self, name: str, number: int, side: Side, cost: Any) -> None:
        self._synchronize()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        tokens, flops = 0, 0.0
        began = asked = time.perf_counter()
        with closing(self.batches(name, number)) as steps:
            for micro_batches in steps:
                side.waited += time.perf_counter() - asked
                trained = self._step(name, micro_batches)
                tokens += sum(batch.tokens for batch in micro_batches)
                side.positions += sum(batch.segments.numel() for batch in micro_batches)
                flops += cost.of([span.length for batch in micro_batches for span in batch.spans], trained)
                asked = time.perf_counter()
        self._synchronize()
        seconds = time.perf_counter() - began
        side.tokens, side.seconds = side.tokens + tokens, side.seconds + seconds
        side.tokens_per_second.append(tokens / seconds)
        if self.device.type == "cuda":
            side.peak_bytes.append(torch.cuda.max_memory_allocated(self.device))
        if self.peak_tflops:
            side.mfu.append(flops / seconds / (self.peak_tflops * 1e12))

    def _step(self, name: str, micro_batches: list[Batch]) -> int:
        rows = [self.task.rows(batch) for batch in micro_batches]
        trained = sum(len(part) for part in rows)
        scale = len(micro_batches) / max(1, trained)
        for batch, part in zip(micro_batches, rows, strict=True):
            batch, part = batch.to(self.device, self.config.dtype), part.to(self.device)
            if name != "plain":
                loss = self.task.loss_sums(self.engine, batch, part, noise_seed=0)["loss"]
            else:
                loss = plain_loss_sum(self.task, self.engine, batch, part, noise_seed=0)
            self.engine.backward(loss * scale)
            self.engine.step()
        return trained

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def from_config(config: TrainConfig, arguments: argparse.Namespace, folder: Path) -> tuple[Bench, dict[str, Any]]:
    """A run's own store and optimizer; the plain side's files are written into ``folder``.

    Raises:
        ValueError: as train/eagle.py would.
    """
    from train.data.shard_check import ShardCheck
    from train.engine import Engine, start  # DeepSpeed
    from train.inputs import open_inputs
    from train.runtime import Ranks

    inputs = open_inputs(config)
    store = inputs.train
    if not isinstance(store, FeatureStore):
        raise ValueError("the throughput of features: online is the target's; give a config with a store")
    start(config)
    task = make_task(config, inputs.ends)
    engine = Engine(task.module, config)
    task.ends.to(engine.device)
    data = TrainData(store, config.taps, config.batch_tokens, config.gradient_accumulation, config.seed)
    data.pin = engine.device.type == "cuda"
    plan = epoch_batches(data.lengths, config.batch_tokens, config.seed, 0)
    steps = min(arguments.steps, len(plan) // (arguments.rounds + 1))
    if min(map(len, plan)) < config.gradient_accumulation:
        raise ValueError(f"gradient_accumulation: {config.gradient_accumulation} is more than some batch has dialogues")
    if not steps:
        raise ValueError(
            f"an epoch of {config.features} has {len(plan)} batches of {config.batch_tokens} tokens, fewer than "
            f"{arguments.rounds + 1} rounds; lower --rounds or batch_tokens"
        )
    if not arguments.verify:
        write_samples(store, sorted({index for batch in plan for index in batch}), folder)

    def batches(name: str, number: int) -> Generator[list[Batch], None, None]:
        part = plan[number * steps : (number + 1) * steps]
        if name != "plain":
            check = ShardCheck([store] if name == "verified" else [], Ranks(0, 1), engine.device)
            data.check = check
            with closing(check), closing(data.steps(Position(0, number * steps))) as stream:
                for _ in part:
                    yield next(stream).batches
                check.wait(print)  # as a run does before a checkpoint
            return
        shares = [share for batch in part for share in split_evenly(batch, data.lengths, config.gradient_accumulation)]
        loader = DataLoader(
            SampleFiles(folder),
            batch_sampler=shares,
            collate_fn=pad,
            num_workers=arguments.workers,
            pin_memory=data.pin,
        )
        loaded = iter(loader)
        for _ in part:
            yield [next(loaded) for _ in range(config.gradient_accumulation)]

    peak = arguments.peak_tflops or peak_tflops(engine.device)
    what = {"config": config.model_dump(mode="json"), "steps_a_round": steps, "optimizer": "DeepSpeed's"}
    compared = ("verified", "unverified") if arguments.verify else ("ours", "plain")
    what["store_bytes"] = store.manifest.size
    return Bench(task, engine, engine.device, config, batches, peak, compared), what


def from_shape(
    config: TrainConfig, arguments: argparse.Namespace, shape: dict[str, int]
) -> tuple[Bench, dict[str, Any]]:
    """A head of a given shape on random features, without any file.

    Raises:
        ValueError: a shape or lengths that cannot be read, or settings that the run's config refuses.
    """
    device = resolve_device()
    dtype = config.dtype
    torch.manual_seed(config.seed)
    lengths = draw_lengths(arguments.dialogue_lengths, config.seed)
    plan = epoch_batches(lengths, arguments.tokens, config.seed, 0)[: arguments.steps]
    with torch.device(device):
        task = make_task(config, meta_ends(random_target(shape), str(device), dtype))
    buffers = buffers_of(task.module)
    restore_buffers(task.module.to(device, dtype), buffers, device)
    store = RandomStore(lengths, shape, dtype, config.taps)
    accumulation = config.gradient_accumulation
    if min(map(len, plan)) < accumulation:
        raise ValueError(f"gradient_accumulation: {accumulation} is more than some batch has dialogues")
    shares = [split_evenly(batch, lengths, accumulation) for batch in plan]
    ready = {
        "ours": [
            [_pinned(collate(store, share, config.taps, one_row=True), device) for share in step]  # type: ignore[arg-type]
            for step in shares
        ],
        "plain": [[_pinned(pad([(i, store[i]) for i in share]), device) for share in step] for step in shares],
    }
    peak = arguments.peak_tflops or peak_tflops(device)
    mean = sum(lengths[i] for batch in plan for i in batch) / sum(len(batch) for batch in plan)
    what = {
        "shape": shape,
        "batch_tokens": arguments.tokens,
        "dialogue_lengths": REALISTIC if arguments.dialogue_lengths == "realistic" else arguments.dialogue_lengths,
        "mean_length": round(mean, 1),
        "answers": ANSWERS,
        "features": "random",
        "steps_a_round": len(plan),
        "optimizer": "AdamW, float32 masters",
        "config": config.model_dump(mode="json"),
    }
    engine = MasterAdamW(task.module, config)
    return Bench(task, engine, device, config, lambda name, number: (step for step in ready[name]), peak), what


class RandomStore:
    """Random tokens and features of given lengths, made anew (and alike) whenever they are read."""

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


def random_target(shape: dict[str, int]) -> LlamaConfig:
    """A Llama's configuration of ``shape``."""
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
