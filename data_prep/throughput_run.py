"""What data_prep.throughput measures."""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drafters.files import replace_json
from drafters.model.target import TargetModel
from drafters.provenance import environment, load_average, peak_memory_bytes

from .dialogues.encoding import load_tokenizer
from .disk import existing_folder
from .features import FeaturesConfig
from .features_run import Work, check_disk, encode, make_headers, write_store
from .ranks import Rank, load_target
from .store.dump import Tokens, forward, make_batches
from .store.manifest import plan_shards


def run(config: FeaturesConfig, split: str, rounds: int, out: Path | None) -> None:
    """Measure and print, and write the result to ``out``."""
    chat = load_tokenizer(config.target, config.revision, config.chat_template)
    work = encode(config, chat, split, make_headers(config, chat)[split])
    temporary = Path(tempfile.mkdtemp(prefix=".throughput-", dir=existing_folder(Path(config.out))))
    try:
        work.path = temporary / "store"
        check_disk(config, [work])
        target = load_target(config.target, config, Rank())
        result = measure(target, work, config, rounds)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    result = {"config": config.model_dump(), "split": split, **result}
    print(
        f"bare target {result['bare_tokens_per_second']:,.0f} tokens/s, dump {result['dump_tokens_per_second']:,.0f}: "
        f"{result['ratio']:.1%} (median of {rounds} rounds, {min(result['ratios']):.1%} to "
        f"{max(result['ratios']):.1%}); {result['padding']:.1%} of what the target ran on was padding"
    )
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_json(out, result)
        print(f"written to {out}")


def measure(target: TargetModel, work: Work, config: FeaturesConfig, rounds: int) -> dict[str, Any]:
    """Seconds of ``rounds`` passes over the split with the bare target, and of as many dumps, in turns.

    Every second round begins with the dump, so that a machine that slows down does not favour either. Tokens/s are of
    real tokens, padding not counted; ``ratio`` is the median of the rounds' own ratios.
    """
    before = load_average()
    bare_pass(target, work, config, most=2)  # warm-up: kernels are chosen, memory pools grow
    runs: dict[str, Callable[[], Tokens]] = {
        "bare": lambda: bare_pass(target, work, config),
        "dump": lambda: write_store(lambda: target, work, config, Rank())[1],
    }
    counted = Tokens()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in list(runs) if number % 2 == 0 else list(runs)[::-1]:
            synchronize(target)
            start = time.perf_counter()
            counted = runs[name]()
            synchronize(target)
            seconds[name].append(time.perf_counter() - start)
            shutil.rmtree(work.path, ignore_errors=True)
    speeds = {name: [counted.real / each for each in times] for name, times in seconds.items()}
    ratios = [dumped / bare for bare, dumped in zip(speeds["bare"], speeds["dump"], strict=True)]
    return {
        "tokens": counted.real,
        "dialogues": len(work.encoded.ids),
        "padding": counted.padding,
        "token_bytes": work.header.token_bytes,
        "rounds": rounds,
        "bare_seconds": seconds["bare"],
        "dump_seconds": seconds["dump"],
        "ratios": ratios,
        "bare_tokens_per_second": statistics.median(speeds["bare"]),
        "dump_tokens_per_second": statistics.median(speeds["dump"]),
        "ratio": statistics.median(ratios),
        "load_average_before": before,
        "peak_memory_bytes": peak_memory_bytes(target.device),
        "environment": environment(target),
    }


@torch.inference_mode()
def bare_pass(target: TargetModel, work: Work, config: FeaturesConfig, most: int | None = None) -> Tokens:
    """The forwards of a dump and nothing else, of at most ``most`` batches."""
    tokens = Tokens()
    done = 0
    for span in plan_shards(work.lengths, config.shard_tokens):
        lengths = work.lengths[slice(*span)]
        for rows, ids in make_batches(work.encoded, span, config.batch_tokens, target.device.type == "cuda"):
            if most is not None and done == most:
                return tokens
            forward(target, work.header, ids, [lengths[row] for row in rows], config.batch_tokens)
            tokens.real += sum(lengths[row] for row in rows)
            tokens.padded += ids.numel()
            done += 1
    return tokens


def synchronize(target: TargetModel) -> None:
    """Wait until every GPU has done what it was given."""
    if target.device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
