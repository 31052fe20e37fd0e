"""The steps of train.throughput: measure both sides, compare, print, write the JSON."""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from data_prep.common.progress import Bar
from drafters.common.files import replace_json
from drafters.common.machine import measured_on
from drafters.common.wording import size_text
from train.bench.sides import Side, from_config, from_shape
from train.core.config import TrainConfig
from train.watch.flops import peak_tflops


def measure(config: TrainConfig, shape: dict[str, int] | None, arguments: argparse.Namespace) -> None:
    """Measure on the run's store, or on random features of a shape; print and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        given = config, arguments
        bench, what = from_config(*given, Path(folder)) if shape is None else from_shape(*given, shape)
        with Bar(total=2 * (arguments.rounds + 1), unit="round") as progress:
            sides = bench.run(arguments.rounds, progress)
    result = {"sides": list(sides), **compared(sides, arguments.peak_tflops or peak_tflops(bench.device)), **what}
    result |= {"config": config.model_dump(mode="json"), "environment": measured_on(bench.device)}
    print(describe(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        replace_json(arguments.out, result)


def compared(sides: dict[str, Side], peak: float | None) -> dict[str, Any]:
    """Medians and rounds of each side, and the ratios of both; ``peak`` in 1e12 FLOP/s."""
    figures: dict[str, Any] = {}
    for name, side in sides.items():
        rounds = side.rounds
        figures[name] = {
            "tokens_per_second": _median([each.tokens_per_second for each in rounds]),
            "mfu": _median([each.flops / each.seconds / (peak * 1e12) for each in rounds]) if peak else None,
            "peak_bytes": max((each.peak_bytes for each in rounds if each.peak_bytes), default=None),
            "padding": 1 - sum(r.tokens for r in rounds) / sum(r.positions for r in rounds) if rounds else None,
            "data_wait": sum(r.waited for r in rounds) / sum(r.seconds for r in rounds) if rounds else None,
            "failed": side.failed,
            "rounds": [round(each.tokens_per_second, 1) for each in rounds],
        }
    first, second = sides
    pairs = zip(*(side.rounds for side in sides.values()), strict=False)
    figures["ratio"] = _median([one.tokens_per_second / other.tokens_per_second for one, other in pairs])
    if figures[first]["peak_bytes"] and figures[second]["peak_bytes"]:
        figures["peak_ratio"] = figures[first]["peak_bytes"] / figures[second]["peak_bytes"]
    return figures


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
