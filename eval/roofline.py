"""How near decoding comes to what the machine's memory allows, for a model shape with random weights.

    python -m eval.roofline --shape llama-7b [key=value ...]

Plain decoding reads every weight once a token: no decoding of one row can be faster than those bytes at the measured
bandwidth. Beside that floor stand plain decoding here, stock ``generate``, the cost of verifying several rows, and the
steps of EAGLE and Kangaroo. Untrained heads are never accepted, so acceptance is REPLAYED from a profile
(drafters/replay.py), and every figure that hangs on it says so. Methods alternate within the run; medians count.

Writes docs/results/<machine>/roofline-<shape>.json and .md.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from rich.console import Console
from rich.progress import Progress

from drafters import TargetModel
from drafters.config import Config, from_overrides
from drafters.decoding.target import Engine, Quantization
from drafters.environment import environment, load_average
from drafters.provenance import peak_memory_bytes, replace_text
from drafters.replay import Rate
from eval import roofline_parts as parts
from eval.output import check_folder
from eval.page import machine_line, number, software_line, target_line
from eval.shapes import random_target
from eval.speed import make_console

# EAGLE, Table 1 (Vicuna-7B, MT-bench, greedy): n-alpha of a chain. Its tree has tau 3.94 there.
PAPER_ALPHA = [0.79, 0.74, 0.72, 0.73, 0.67]


class RooflineConfig(Config):
    """What ``key=value`` may set."""

    dtype: str = "bfloat16"
    device: str | None = Field(None, description="None: a GPU where there is one, else the CPU")
    engine: Engine | None = None
    quantize: Quantization | None = None
    context: int = Field(1024, ge=2, description="tokens before those that are decoded")
    new_tokens: int = Field(128, ge=2)
    rows: list[int] = Field([1, 2, 4, 8, 16, 26, 32, 60, 64], min_length=1, description="rows of a verification")
    batches: list[int] = Field([1, 4], min_length=1, description="prompts at once, for plain decoding and EAGLE")
    rounds: int = Field(3, ge=1, description="odd; the median counts")
    eagle_profile: list[Rate] = Field(PAPER_ALPHA, min_length=1)
    eagle_tau: float = Field(3.94, ge=1.0, description="the profile's rates are raised to one power to give it")
    kangaroo_profile: list[Rate] = Field([0.6], min_length=1)
    kangaroo_tau: float = Field(2.0, ge=1.0)
    exit_layer: int = Field(2, ge=1, description="Kangaroo's")
    stock: bool = Field(True, description="stock generate, too")
    compiled: bool | None = Field(None, description="stock generate on a compiled static cache; None: on a GPU only")
    threads: int | None = Field(None, ge=1, description="CPU threads; None leaves it to PyTorch")
    seed: int = 0
    out: Path | None = Field(None, description="folder; None: docs/results/<machine>")


@torch.inference_mode()
def run(shape: str, config: RooflineConfig, argv: list[str], console: Console) -> dict[str, Any]:
    """Measure, write both files and print the page; returns what is in the JSON.

    Raises:
        ValueError: no such shape, too little memory, or a profile that cannot give its tau.
        OSError: a file could not be written.
    """
    if config.rounds % 2 == 0:
        raise ValueError(f"rounds is {config.rounds}, and of an even number none is the median: add or take one")
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    out = config.out or Path("docs/results") / machine()
    check_folder(out)
    positions = config.context + config.new_tokens + max(config.rows) + 128
    how = config.dtype, config.device, config.engine, config.quantize, config.seed
    target = random_target(shape, positions, *how, cache_tokens=(max(config.batches), positions))
    facts = environment(target) | {"shape": shape, "config": config.model_dump(mode="json"), "argv": argv}
    found: dict[str, Any] = {"format_version": 1, "label": "replay: random weights, acceptance from a profile"}
    with Progress(console=console) as progress:
        task = progress.add_task("", total=None)

        def about(what: str) -> None:
            progress.update(task, description=what)

        found |= measure(target, config, about)
    facts |= {"load_average_after": load_average(), "peak_memory_bytes": peak_memory_bytes(target.device)}
    found["environment"] = facts
    out.mkdir(parents=True, exist_ok=True)
    stem = f"roofline-{shape}{'-' + config.quantize if config.quantize else ''}"
    files = out / f"{stem}.md", out / f"{stem}.json"
    replace_text(files[1], json.dumps(found, indent=2, allow_nan=False) + "\n")
    replace_text(files[0], markdown(found))
    console.print(markdown(found), markup=False, highlight=False)
    console.print(f"{files[0]}, {files[1]}", markup=False, highlight=False)
    return found


def measure(target: TargetModel, config: RooflineConfig, about: Callable[[str], None]) -> dict[str, Any]:
    """All figures, in seconds and bytes."""
    about("copy bandwidth")
    bandwidth = parts.copy_bandwidth(target.device)
    size = parts.bytes_per_step(target, config.context)
    about("verification by rows")
    by_rows = parts.verification_seconds(target, config.context, config.rows, config.rounds, config.seed)
    methods = parts.methods(target, config)
    about("warm-up")
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for once in methods.values():
        once()
    for index in range(config.rounds):
        for name, once in methods.items():
            about(f"round {index + 1} of {config.rounds}: {name}")
            samples[name].append(once())
    rows = [{"method": name, **median_of(taken)} for name, taken in samples.items()]
    return {
        "bandwidth_bytes_per_second": bandwidth,
        "bytes_per_step": size,
        "floor_seconds": sum(size.values()) / bandwidth,
        "verification_seconds": by_rows,
        "rows": parts.add_ratios(rows, sum(size.values()) / bandwidth),
    }


def median_of(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Of dictionaries with the same keys, each number's median (None where it is not known)."""
    failed = next((one for one in taken if "missing" in one), None)
    if failed is not None:
        return failed
    merged: dict[str, Any] = {}
    for key, value in taken[0].items():
        values = [one[key] for one in taken]
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        merged[key] = statistics.median(values) if known else value
    return merged


def machine() -> str:
    """A folder's name for this machine: its GPU, or how many CPU cores it has."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores}-core-cpu"


def markdown(found: dict[str, Any]) -> str:
    """The page."""
    facts, size = found["environment"], found["bytes_per_step"]
    total, bandwidth = sum(size.values()), found["bandwidth_bytes_per_second"]
    lines = [
        f"# Roofline of {facts['shape']}: REPLAY",
        "",
        "Random weights; how deep drafts are accepted is drawn from a profile, every forward is really run.",
        "",
        target_line(facts),
        machine_line(facts),
        f"- context {facts['config']['context']}, {facts['config']['new_tokens']} new tokens, greedy, median of "
        f"{facts['config']['rounds']} rounds",
        software_line(facts),
        f"- `{' '.join(facts['argv'])}`",
        "",
        f"Copy bandwidth {bandwidth / 1e9:.1f} GB/s; a step reads {size['weights'] / 1e9:.3f} GB of weights and "
        f"{size['cache'] / 1e9:.3f} GB of cache: {1e3 * total / bandwidth:.3f} ms a token at best.",
        "",
        "| rows verified | ms | against one row |",
        "| --- | --- | --- |",
    ]
    one = found["verification_seconds"][0]["seconds"]
    for row in found["verification_seconds"]:
        lines.append(f"| {row['rows']} | {1e3 * row['seconds']:.3f} | {row['seconds'] / one:.2f} |")
    lines += [
        "",
        "| method | batch | tau (replayed) | tokens/s | of the roofline | speedup | draft ms | verify ms | commit ms "
        "| overhead | of the formula's limit |",
        "| --- " * 11 + "|",
    ]
    for row in found["rows"]:
        step = [number(1e3 * row[key], 2) if row.get(key) is not None else "" for key in STEP]
        shares = [f"{row[key]:.1%}" if row.get(key) is not None else "" for key in ("roofline_share", "limit_share")]
        over = f"{row['overhead']:.1%}" if row.get("overhead") is not None else ""
        speedup = f"{row['speedup']:.2f}x" if row.get("speedup") is not None else ""
        reason = row.get("missing")
        speed = f"not measured: {reason}" if reason else f"{row['tokens_per_second']:.1f}"
        tau = f"{row['tau']:.2f}" if row.get("tau") is not None else ""
        cells = [row["method"], str(row["batch"]), tau, speed, shares[0], speedup, *step, over, shares[1]]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Of the roofline: the share of the floor in the time of a token, for plain decoding of one row. Speedup: over "
        "plain decoding here, of the same batch. Overhead: time outside forward passes. The formula's limit: (tau * "
        "target's forward) / (drafter's forwards + verifying forward).",
        "",
    ]
    return "\n".join(lines)


STEP = ("draft_seconds", "verify_seconds", "other_seconds")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m eval.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", required=True, help="for example llama-7b; a wrong name lists all")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="see RooflineConfig")
    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser.parse_args(given)
    try:
        config = from_overrides(RooflineConfig, parsed.overrides)
        run(parsed.shape, config, ["python", "-m", "eval.roofline", *given], make_console())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
