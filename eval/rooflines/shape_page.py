"""Measure a shape against its roofline, and write the page."""

import shlex
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafters import TargetModel
from drafters.common.files import check_folder
from drafters.common.machine import environment, peak_memory_bytes
from drafters.common.provenance import load_average
from drafters.common.threads import cpu_cores, set_threads
from drafters.common.wording import size_text
from eval.configs import RooflineConfig
from eval.report.tables import machine_line, say, software_line, table, target_line, write_page
from eval.rooflines import parts

METHODS = (
    "method", "batch", "tau (replayed)", "tokens/s", "of the roofline", "speedup", "draft ms", "verify ms", "commit ms",
    "overhead", "of the formula's limit",
)  # fmt: skip
FIGURES = (
    ("tau", "{:.2f}"), ("roofline_share", "{:.1%}"), ("speedup", "{:.2f}x"), ("overhead", "{:.1%}"),
    ("limit_share", "{:.1%}"),
)  # fmt: skip
STEP = ("draft_seconds", "verify_seconds", "other_seconds")
ABOUT = """\
Of the roofline: the floor over the time of a token, for plain decoding of one row. Speedup: over plain decoding of the
same batch. Overhead: time outside forward passes. The formula's limit: (tau * target's forward) / (drafter's
forwards + verifying forward).
"""


@torch.inference_mode()
def measure_and_write(shape: str, config: RooflineConfig, argv: list[str], console: Console) -> dict[str, Any]:
    """Measure, write both files and print the page; return the JSON."""
    set_threads(config.threads)
    out = config.out or Path("docs/results") / machine_folder()
    check_folder(out)
    positions = config.context + config.new_tokens + max(config.rows) + 128
    how = config.dtype, config.device, config.engine, config.quantize, config.seed
    target = parts.random_target(shape, positions, *how, cache_tokens=(max(config.batches), positions))
    facts = environment(target) | {"shape": shape, "config": config.model_dump(mode="json"), "argv": argv}
    report: dict[str, Any] = {"format_version": 1, "label": "replay: random weights, acceptance from a profile"}
    with console.status("") as status:
        report |= measure(target, config, status.update)
    facts |= {"load_average_after": load_average(), "peak_memory_bytes": peak_memory_bytes(target.device)}
    report["environment"] = facts
    stem = f"roofline-{shape}{'-' + config.quantize if config.quantize else ''}"
    say(console, markdown(report))
    write_page(report, markdown(report), out, stem, console)
    return report


def measure(target: TargetModel, config: RooflineConfig, about: Callable[[str], None]) -> dict[str, Any]:
    """Return all figures, in seconds and bytes."""
    methods = parts.methods(target, config)  # first, because it finds a profile that cannot give its tau
    about("bandwidth")
    bandwidths = {"copy": parts.copy_bandwidth(target.device), "read": parts.read_bandwidth(target.device)}
    bandwidth = max(bandwidths.values())
    size = parts.bytes_per_step(target, config.context)
    about("verification by rows")
    by_rows = parts.verification_seconds(target, config.context, config.rows, config.rounds, config.seed)
    about("warm-up")
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for once in methods.values():
        once()
    for index in range(config.rounds):
        for name, once in methods.items():
            about(f"round {index + 1} of {config.rounds}: {name}")
            samples[name].append(once())
    rows = [{"method": name, **median_of(taken)} for name, taken in samples.items()]
    floor = sum(size.values()) / bandwidth
    return {
        "bandwidth_bytes_per_second": bandwidth,
        "bandwidths": bandwidths,
        "bytes_per_step": size,
        "floor_seconds": floor,
        "verification_seconds": by_rows,
        "rows": parts.add_ratios(rows, floor),
    }


def median_of(taken: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each number over dictionaries with the same keys (None if unknown)."""
    failed = next((one for one in taken if "missing" in one), None)
    return failed or {
        key: value if value is None else statistics.median([one[key] for one in taken])
        for key, value in taken[0].items()
    }


def machine_folder() -> str:
    """Return a folder's name for this machine: its GPU, or its number of CPU cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace(" ", "-")
    return f"{cpu_cores()}-core-cpu"


def markdown(report: dict[str, Any]) -> str:
    """Return the page."""
    facts, size = report["environment"], report["bytes_per_step"]
    total, bandwidth = sum(size.values()), report["bandwidth_bytes_per_second"]
    kinds = ", ".join(f"{name} {size_text(value)}/s" for name, value in report["bandwidths"].items())
    lines = [
        f"# Roofline of {facts['shape']}: REPLAY",
        "",
        "Random weights; the accepted depth of drafts is drawn from a profile, every forward is real.",
        "",
        target_line(facts),
        machine_line(facts),
        f"- context {facts['config']['context']}, {facts['config']['new_tokens']} new tokens, greedy, median of "
        f"{facts['config']['rounds']} rounds",
        software_line(facts),
        f"- `{shlex.join(facts['argv'])}`",
        "",
        f"Bandwidth {size_text(bandwidth)}/s ({kinds}); a step reads {size_text(size['weights'])} of weights and "
        f"{size_text(size['cache'])} of cache: {1e3 * total / bandwidth:.3f} ms per token at least.",
        "",
    ]
    one = report["verification_seconds"][0]["seconds"]
    costs = [(row["rows"], row["seconds"]) for row in report["verification_seconds"]]
    cells = [[str(rows), f"{1e3 * seconds:.3f}", f"{seconds / one:.2f}"] for rows, seconds in costs]
    lines += [*table(["rows verified", "ms", "against one row"], cells), ""]
    cells = []
    for row in report["rows"]:
        shown = [form.format(row[key]) if row.get(key) is not None else "" for key, form in FIGURES]
        speed = f"not measured: {row['missing']}" if "missing" in row else f"{row['tokens_per_second']:.1f}"
        ms = [f"{1e3 * row[key]:.2f}" if row.get(key) is not None else "" for key in STEP]
        cells.append([row["method"], str(row["batch"]), shown[0], speed, *shown[1:3], *ms, *shown[3:]])
    return "\n".join([*lines, *table(METHODS, cells), "", ABOUT])
