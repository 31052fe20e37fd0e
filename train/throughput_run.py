"""What train.throughput does with its arguments."""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from data_prep.progress import Bar
from drafters.files import replace_text
from drafters.provenance import measured_on
from drafters.wording import size_text
from train.bench.sides import Side, from_config, from_shape
from train.config import TrainConfig


def run(config: TrainConfig, shape: dict[str, int] | None, arguments: argparse.Namespace) -> None:
    """Measure on the run's store, or on random features of a shape; print, and write the JSON."""
    with tempfile.TemporaryDirectory() as folder:
        given = config, arguments
        bench, what = from_config(*given, Path(folder)) if shape is None else from_shape(*given, shape)
        with Bar(total=2 * (arguments.rounds + 1), unit="round") as progress:
            sides = bench.run(arguments.rounds, progress)
    result = report(sides, what, bench.device)
    print(describe(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(arguments.out, json.dumps(result, indent=2) + "\n")


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
    first, second = sides.values()
    pairs = list(zip(first.tokens_per_second, second.tokens_per_second, strict=False))
    figures["ratio"] = _median([one / other for one, other in pairs])
    if first.peak_bytes and second.peak_bytes:
        figures["peak_ratio"] = max(first.peak_bytes) / max(second.peak_bytes)
    return {"sides": list(sides), **figures, **what, "environment": measured_on(device)}


def describe(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    lines = []
    for name in result["sides"]:
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
        line = f"ratio  {result['ratio']:.2f} times the tokens/s (median of {len(side['rounds'])} rounds)"
        lines.append(line + (f", {result['peak_ratio']:.2f} of the peak memory" if "peak_ratio" in result else ""))
    return "\n".join(lines)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
