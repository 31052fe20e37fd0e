"""Measure a dump beside the bare target or vLLM's dump, for data_prep.throughput."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from data_prep.common.ranks import Rank
from data_prep.common.target import load_target
from data_prep.configs import FeaturesConfig
from data_prep.dialogues.encoding import load_tokenizer
from data_prep.extraction.dump import Tokens, forward, make_batches, without_states
from data_prep.extraction.headers import make_headers
from data_prep.extraction.process import VLLM
from data_prep.extraction.stores import Work, check_size, encode, start_vllm, target_dtype, write_store
from data_prep.store.manifest import plan_shards
from drafters.common.files import existing_folder, replace_json
from drafters.common.machine import environment, peak_memory_bytes
from drafters.common.provenance import load_average
from drafters.model.target import TargetModel

NAMES = {"bare": "bare target", "dump": "dump", "vllm": "dump by vLLM"}


def run(config: FeaturesConfig, split: str, rounds: int, out: Path | None) -> None:
    """Measure, print, and write the result to ``out``."""
    chat = load_tokenizer(config.target, config.revision, config.chat_template)
    headers = make_headers(config, chat, target_dtype(config), config.store_dtype)
    work = encode(config, chat, split, headers[split])
    temporary = Path(tempfile.mkdtemp(prefix=".throughput-", dir=existing_folder(Path(config.out))))
    try:
        work.path = temporary / "store"
        check_size(config, [work])
        target = load_target(config.target, config, Rank(), capture_only=True)

        def dump(served: VLLM | None = None) -> Tokens:
            return write_store(lambda: target, work, config, Rank(), None if served is None else lambda: served)[1]

        if config.engine == "vllm":
            with start_vllm(config, [work], Rank()) as served:
                for side in (None, served):  # warm-up: one whole pass of each
                    dump(side)
                    shutil.rmtree(work.path)
                result = measure(target, work, rounds, {"dump": dump, "vllm": lambda: dump(served)})
        else:
            bare_pass(target, work, config, most=2)  # warm-up: kernels are chosen, memory pools grow
            result = measure(target, work, rounds, {"bare": lambda: bare_pass(target, work, config), "dump": dump})
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    result = {"config": config.model_dump(mode="json", by_alias=True), "split": split, **result}
    sides = [name for name in NAMES if f"{name}_seconds" in result]
    told = ", ".join(f"{NAMES[name]} {result[f'{name}_tokens_per_second']:,.0f}" for name in sides)
    print(
        f"{told} tokens/s: {result['ratio']:.1%} (median of {rounds} rounds, {min(result['ratios']):.1%} to "
        f"{max(result['ratios']):.1%}); {result['padding']:.1%} of the tokens on which the target ran were padding"
    )
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_json(out, result)
        print(f"written to {out}")


def measure(target: TargetModel, work: Work, rounds: int, runs: dict[str, Callable[[], Tokens]]) -> dict[str, Any]:
    """Seconds of ``rounds`` passes over the split with each of two ``runs``, in turns.

    Every second round begins with the second run, so that a machine that slows down favours neither. Tokens/s count
    real tokens without padding; ``ratio``, of the second over the first, is the median over the rounds.
    """
    before = load_average()
    first, second = runs
    counted = {name: Tokens() for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
            synchronize(target)
            start = time.perf_counter()
            counted[name] = runs[name]()
            synchronize(target)
            seconds[name].append(time.perf_counter() - start)
            shutil.rmtree(work.path, ignore_errors=True)
    speeds = {name: [counted[name].real / each for each in times] for name, times in seconds.items()}
    ratios = [other / one for one, other in zip(speeds[first], speeds[second], strict=True)]
    return {
        "tokens": counted[first].real,
        "dialogues": len(work.encoded.ids),
        "padding": counted[first].padding,
        "token_bytes": work.header.token_bytes,
        "rounds": rounds,
        **{f"{name}_seconds": times for name, times in seconds.items()},
        "ratios": ratios,
        **{f"{name}_tokens_per_second": statistics.median(found) for name, found in speeds.items()},
        "ratio": statistics.median(ratios),
        "load_average_before": before,
        "peak_memory_bytes": peak_memory_bytes(target.device),
        "environment": environment(target),
    }


@torch.inference_mode()
def bare_pass(target: TargetModel, work: Work, config: FeaturesConfig, most: int | None = None) -> Tokens:
    """Only the forwards of a dump, for at most ``most`` batches."""
    tokens, done = Tokens(), 0
    for span in plan_shards(work.encoded.lengths, config.shard_tokens):
        shard = without_states(work.encoded, *span)
        for rows, ids in make_batches(shard, config.batch_tokens, target.device.type == "cuda"):
            if most is not None and done == most:
                return tokens
            forward(target, work.header, ids, [shard.lengths[row] for row in rows], config.batch_tokens)
            tokens.real += sum(shard.lengths[row] for row in rows)
            tokens.padded += ids.numel()
            done += 1
    return tokens


def synchronize(target: TargetModel) -> None:
    """Wait until every GPU is idle."""
    if target.device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
