"""The steps of train.tools.throughput: our training step and the plain one in turns."""

import argparse
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import LlamaConfig

from data_prep.common.progress import Bar
from data_prep.store.reader import FeatureStore
from drafters.common.files import replace_json
from drafters.common.machine import measured_on
from drafters.common.wording import first_line, size_text
from drafters.model.files import resolve_device
from train.bench.reference import pad, plain_batches, plain_loss_sum, write_samples
from train.core.config import TrainConfig
from train.core.engine import Engine, start
from train.core.optimizer import MasterAdamW, exact_buffers
from train.core.runtime import dtype_of
from train.core.task import Task, make_task
from train.data.packing import Batch, Position, TrainData, collate, epoch_batches, split_evenly
from train.preflight.estimate import RandomStore, meta_ends
from train.run.inputs import open_inputs
from train.watch.flops import TrainingCost, peak_tflops, training_cost

# Log-normal, cut at 2,048. Its mean fits the known size of EAGLE's ShareGPT features: 0.7 TB, 8 KB per token, 68,000
# dialogues.
REALISTIC = {"mu": 7.2, "sigma": 1.0, "shortest": 16, "longest": 2048}
SIDES = ("ours", "plain")  # "plain" is trained by the plain formulation
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
class Bench:
    """Task, engine and batches of both sides."""

    task: Task
    engine: Any
    device: torch.device
    # Side and number of a round -> its optimiser steps, each a list of micro-batches.
    batches: Callable[[str, int], Generator[list[Batch], None, None]]
    sides: tuple[str, ...]
    what: dict[str, Any]  # facts for the report

    def run(self, rounds: int, progress: Any) -> tuple[dict[str, list[Round]], dict[str, str]]:
        """Alternate between the sides, after a round of warm-up; return their rounds, and who had too little memory."""
        done: dict[str, list[Round]] = {name: [] for name in self.sides}
        failed: dict[str, str] = {}
        cost = training_cost(self.task)
        for number in range(rounds + 1):
            for name in self.sides if number % 2 else reversed(self.sides):
                if name in failed:
                    continue
                try:
                    done[name].append(self._round(name, number, cost))
                except torch.OutOfMemoryError as error:
                    failed[name] = first_line(error)
                    self.engine.module.zero_grad(set_to_none=True)
                progress.update(1)
        return {name: each[1:] for name, each in done.items()}, failed

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
        batches = [self.task.choose(batch, seed=0) for batch in micro_batches]
        trained = sum(len(batch.rows) for batch in batches)
        for batch in batches:
            batch = batch.to(self.device, dtype_of(self.task.config))
            if name == "plain":
                loss = plain_loss_sum(self.task, self.engine, batch, seed=0)
            else:
                loss = self.task.losses(self.task.pairs(self.engine, batch, seed=0))["loss"]
            self.engine.backward(loss * (len(batches) / max(1, trained)))
            self.engine.step()
        return trained


def from_config(config: TrainConfig, arguments: argparse.Namespace, folder: Path) -> Bench:
    """With a run's own store and optimizer; writes the plain side's files into ``folder``.

    Raises:
        ValueError: those of the training program, or too few batches.
    """
    inputs = open_inputs(config)
    config = config.settled(lambda: inputs.ends.config.num_hidden_layers)
    store = inputs.train
    if not isinstance(store, FeatureStore):
        raise ValueError("the throughput of features: online is the target's; give a config with a store")
    start(config)
    task = make_task(config, inputs.ends)
    sides = sides_of(task)
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
    if "plain" in sides:
        write_samples(store, sorted({index for batch in plan for index in batch}), folder)

    def batches(name: str, number: int) -> Generator[list[Batch], None, None]:
        if name == "plain":
            part = plan[number * steps : (number + 1) * steps]
            yield from plain_batches(part, data, folder, arguments.workers)
            return
        with closing(data.steps(Position(0, number * steps))) as stream:
            for _ in range(steps):
                yield next(stream).batches

    what = {"steps_a_round": steps, "optimizer": "DeepSpeed's", "store_bytes": store.manifest.size}
    return Bench(task, engine, engine.device, batches, sides, what)


def from_shape(config: TrainConfig, arguments: argparse.Namespace, shape: dict[str, int]) -> Bench:
    """With a head of a given shape on random features, without files.

    Raises:
        ValueError: no store to take lengths from, or too few dialogues for ``gradient_accumulation``.
    """
    device, target = resolve_device(), config_of_shape(shape)
    config = config.settled(lambda: target.num_hidden_layers)
    torch.manual_seed(config.seed)
    lengths = draw_lengths(arguments.dialogue_lengths, config.seed)
    plan = _plan(config, lengths, arguments.steps)
    with torch.device(device):
        task = make_task(config, meta_ends(target, str(device), dtype_of(config)))
    sides = sides_of(task)
    with exact_buffers(task.module):
        task.module.to(device, dtype_of(config))
    store: Any = RandomStore(config, target, lengths, ANSWERS)
    ready: dict[str, list[list[Batch]]] = {name: [] for name in sides}
    for batch in plan:
        shares = split_evenly(batch, lengths, config.gradient_accumulation)
        ready["ours"].append([collate(store, share, config.taps) for share in shares])
        if "plain" in sides:
            ready["plain"].append([pad([(i, store[i]) for i in share]) for share in shares])
    if device.type == "cuda":
        ready = {name: [[each.pin_memory() for each in step] for step in steps] for name, steps in ready.items()}
    what = {
        "shape": shape,
        "batch_tokens": config.batch_tokens,
        "dialogue_lengths": REALISTIC if arguments.dialogue_lengths == "realistic" else arguments.dialogue_lengths,
        "mean_length": round(mean(lengths[i] for batch in plan for i in batch), 1),
        "answers": ANSWERS,
        "features": "random",
        "steps_a_round": len(plan),
        "optimizer": "AdamW, float32 masters",
    }
    stored = lambda name, _: (step for step in ready[name])  # noqa: E731
    return Bench(task, MasterAdamW(task.module, config), device, stored, sides, what)


def _plan(config: TrainConfig, lengths: list[int], most: int | None = None) -> list[list[int]]:
    """The first epoch's global batches, at most ``most``; raises ValueError if one leaves a micro-batch empty."""
    plan = epoch_batches(lengths, config.batch_tokens, config.seed, 0)[:most]
    if min(map(len, plan)) < config.gradient_accumulation:
        raise ValueError(f"gradient_accumulation: {config.gradient_accumulation} is more than some batch has dialogues")
    return plan


def config_of_shape(shape: dict[str, int]) -> LlamaConfig:
    """The configuration of a Llama of this ``shape``."""
    return LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=32,  # a head reads equally many states of any depth
        max_position_embeddings=REALISTIC["longest"],
    )


def draw_lengths(source: str, seed: int) -> list[int]:
    """Lengths of dialogues: drawn from ``REALISTIC``, or those of the store in the folder ``source``."""
    if source != "realistic":
        return FeatureStore.open(source).lengths.tolist()
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(4096, generator=generator) * REALISTIC["sigma"] + REALISTIC["mu"]).exp()
    return drawn.long().clamp(int(REALISTIC["shortest"]), int(REALISTIC["longest"])).tolist()


def measure(config: TrainConfig, shape: dict[str, int] | None, arguments: argparse.Namespace) -> None:
    """Measure on the run's store, or on random features of a shape; print and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        bench = from_config(config, arguments, Path(folder)) if shape is None else from_shape(config, arguments, shape)
        with Bar(total=len(bench.sides) * (arguments.rounds + 1), unit="round") as progress:
            done, failed = bench.run(arguments.rounds, progress)
    peak = arguments.peak_tflops or peak_tflops(bench.device)
    result: dict[str, Any] = {"sides": list(bench.sides)}
    result |= {name: figures(rounds, failed.get(name), peak) for name, rounds in done.items()}
    result |= ratios(result, done)
    result |= {**bench.what, "config": config.model_dump(mode="json"), "environment": measured_on(bench.device)}
    print(describe(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        replace_json(arguments.out, result)


def sides_of(task: Task) -> tuple[str, ...]:
    """Return both sides, or ours of a task without a plain formulation.

    Raises:
        ValueError: the plain formulation lacks the config's loss.
    """
    if type(task).predict is Task.predict:
        return SIDES[:1]
    plain = {"classification_loss": "cross_entropy", "top_k_weight": 0.0, "unroll": 1, "labels": "target"}
    settings = {key: getattr(task.config, key, value) for key, value in plain.items()}
    if others := {key: value for key, value in settings.items() if value != plain[key]}:
        fixed = " ".join(f"{key}={plain[key]}" for key in others)
        raise ValueError(f"the plain formulation has a loss without {', '.join(others)}; set {fixed}")
    return SIDES


def ratios(result: dict[str, Any], done: dict[str, list[Round]]) -> dict[str, float | None]:
    """Our tokens/s over the plain side's, the median of rounds; with a GPU, our peak memory over its."""
    if len(done) == 1:
        return {"ratio": None}
    ours, plain = done.values()
    speeds = [one.tokens_per_second / other.tokens_per_second for one, other in zip(ours, plain, strict=False)]
    found = {"ratio": median(speeds) if speeds else None}
    peaks = [result[name]["peak_bytes"] for name in done]
    return found | ({"peak_ratio": peaks[0] / peaks[1]} if all(peaks) else {})


def figures(rounds: list[Round], failed: str | None, peak: float | None) -> dict[str, Any]:
    """Medians and rounds of a side; ``failed``: why there are no more; ``peak`` in 1e12 FLOP/s."""
    speeds = [each.tokens_per_second for each in rounds]
    return {
        "tokens_per_second": median(speeds) if rounds else None,
        "mfu": median(each.flops / each.seconds / (peak * 1e12) for each in rounds) if peak and rounds else None,
        "peak_bytes": max((each.peak_bytes for each in rounds if each.peak_bytes), default=None),
        "padding": 1 - sum(r.tokens for r in rounds) / sum(r.positions for r in rounds) if rounds else None,
        "data_wait": sum(r.waited for r in rounds) / sum(r.seconds for r in rounds) if rounds else None,
        "failed": failed,
        "rounds": [round(speed, 1) for speed in speeds],
    }


def describe(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    lines = []
    for name in result["sides"]:
        side = result[name]
        parts = [side["failed"] or f"{side['tokens_per_second']:,.0f} tokens/s"]
        parts += [f"MFU {side['mfu']:.1%}"] if side["mfu"] else []
        parts += [f"{side['padding']:.0%} padding"] if side["padding"] is not None else []
        parts += [f"peak {size_text(side['peak_bytes'])}"] if side["peak_bytes"] else []
        lines.append(f"{name:5}  {', '.join(parts)}")
    if result["ratio"]:
        line = f"ratio  {result['ratio']:.2f} times the tokens/s (median of {len(side['rounds'])} rounds)"
        lines.append(line + (f", {result['peak_ratio']:.2f} of the peak memory" if "peak_ratio" in result else ""))
    return "\n".join(lines)
