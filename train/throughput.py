"""Training throughput beside the plain formulation's (train/plain.py), in one run, in turns.

    python -m train.throughput --config configs/eagle/stdlib.yaml [key=value ...] [--out throughput.json]
    python -m train.throughput --shape hidden=4096,vocab=128256,heads=32,kv_heads=8,intermediate=14336 --tokens 8192

With ``--config``, a run's config: its store, read as in training against one file a dialogue, and DeepSpeed's
optimizer. With ``--shape``, no files: random features of dialogues as long as ``--dialogue-lengths`` says
(``realistic``, or the folder of a store whose lengths to take), batches ready in memory, AdamW on float32 masters. Both
sides share module, optimizer and dialogues. tokens/s counts real tokens, no padding.
"""

import argparse
import json
import platform
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from data_prep.progress import Bar
from drafters.environment import load_average
from drafters.program import run_program
from drafters.provenance import cpu_cores, git_commit, library_versions, replace_text
from drafters.wording import size_text
from train import runtime
from train.formulations import Side, from_config, from_shape


def report(sides: dict[str, Side], what: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The result as JSON: medians over the rounds, every round, ratios, and where it was measured."""
    figures: dict[str, Any] = {}
    for name, side in sides.items():
        figures[name] = {
            "tokens_per_second": _median(side.tokens_per_second),
            "mfu": _median(side.mfu),
            "peak_bytes": max(side.peak_bytes, default=None),
            "padding": 1 - side.tokens / side.positions if side.positions else None,
            "data_wait": side.waited / side.seconds if side.seconds else None,
            "failed": side.failed,
            "rounds": [round(value, 1) for value in side.tokens_per_second],
        }
    ours, plain = sides["ours"], sides["plain"]
    pairs = list(zip(ours.tokens_per_second, plain.tokens_per_second, strict=False))
    figures["ratio"] = _median([one / other for one, other in pairs])
    if ours.peak_bytes and plain.peak_bytes:
        figures["peak_ratio"] = max(ours.peak_bytes) / max(plain.peak_bytes)
    return {**figures, **what, "environment": environment(device)}


def environment(device: torch.device) -> dict[str, Any]:
    """Machine, libraries, commit and date; ``load_average`` tells whether other work disturbed the timing."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cpu_cores": cpu_cores(),
        "threads": torch.get_num_threads(),
        "load_average": load_average(),
        "platform": platform.platform(),
        "versions": library_versions("torch", "transformers"),
        "commit": git_commit(Path(__file__).resolve().parent),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    lines = []
    for name in ("ours", "plain"):
        side = result[name]
        line = f"{name:5}  " + (side["failed"] or f"{side['tokens_per_second']:,.0f} tokens/s")
        if side["mfu"]:
            line += f", MFU {side['mfu']:.1%}"
        if side["padding"] is not None:
            line += f", {side['padding']:.0%} padding"
        if side["peak_bytes"]:
            line += f", peak {size_text(side['peak_bytes'])}"
        lines.append(line)
    if result["ratio"]:
        line = f"ratio  {result['ratio']:.2f} times the tokens/s (median of {len(result['plain']['rounds'])} rounds)"
        lines.append(line + (f", {result['peak_ratio']:.2f} of the peak memory" if "peak_ratio" in result else ""))
    return "\n".join(lines)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--config", help="YAML of a training run with a feature store")
    group.add_argument("--shape", help="hidden=4096,vocab=128256,heads=32,kv_heads=8,intermediate=14336 (the defaults)")
    parser.add_argument("--method", choices=("eagle", "kangaroo"), default="eagle", help="with --shape")
    parser.add_argument("--tokens", type=_count, default=8192, help="with --shape: tokens of an optimiser step")
    parser.add_argument("--dialogue-lengths", default="realistic", help="with --shape: realistic, or a store's folder")
    parser.add_argument("--rounds", type=_count, default=5, help="rounds counted, after one of warm-up")
    parser.add_argument("--steps", type=_count, default=4, help="optimiser steps of a side in a round")
    parser.add_argument("--workers", type=_workers, default=0, help="the plain DataLoader's processes, with --config")
    parser.add_argument("--peak-tflops", type=float, help="the device's bf16 peak, for MFU; known for common GPUs")
    parser.add_argument("--out", type=Path, help="JSON with every round")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the run's config")
    return parser.parse_intermixed_args(argv)


def _count(text: str) -> int:
    value = _workers(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {value}")
    return value


def _workers(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, found {text!r}")
    return int(text)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write the JSON."""
    arguments = _parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        bench, what = from_config(arguments, Path(folder)) if arguments.config else from_shape(arguments)
        with Bar(total=2 * (arguments.rounds + 1), unit="round") as progress:
            sides = bench.run(arguments.rounds, progress)
    result = report(sides, what, bench.device)
    print(describe(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(arguments.out, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    run_program(main)
    runtime.leave(0)
