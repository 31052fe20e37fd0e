"""The steps of train.throughput: measure both sides, compare, print, write the JSON."""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from data_prep.common.progress import Bar
from drafters.common.files import replace_json
from drafters.common.machine import measured_on
from drafters.common.wording import size_text
from train.bench.sides import Round, from_config, from_shape
from train.core.config import TrainConfig
from train.watch.flops import peak_tflops


def measure(config: TrainConfig, shape: dict[str, int] | None, arguments: argparse.Namespace) -> None:
    """Measure on the run's store, or on random features of a shape; print and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        bench = from_config(config, arguments, Path(folder)) if shape is None else from_shape(config, arguments, shape)
        with Bar(total=2 * (arguments.rounds + 1), unit="round") as progress:
            done, failed = bench.run(arguments.rounds, progress)
    peak = arguments.peak_tflops or peak_tflops(bench.device)
    result: dict[str, Any] = {"sides": list(done)}
    result |= {name: figures(rounds, failed.get(name), peak) for name, rounds in done.items()}
    first, second = done.values()
    ratios = [one.tokens_per_second / other.tokens_per_second for one, other in zip(first, second, strict=False)]
    result["ratio"] = median(ratios) if ratios else None
    if all(result[name]["peak_bytes"] for name in done):
        one, other = (result[name]["peak_bytes"] for name in done)
        result["peak_ratio"] = one / other
    result |= {**bench.what, "config": config.model_dump(mode="json"), "environment": measured_on(bench.device)}
    print(describe(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        replace_json(arguments.out, result)


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
