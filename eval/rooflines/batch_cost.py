"""Measure what one forward costs, in time and energy, by the number of inputs in it."""

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from data_prep.common.progress import Bar
from drafters import TargetModel
from drafters.common.energy import EnergyMeter
from drafters.common.machine import environment, peak_memory_bytes
from drafters.common.provenance import load_average
from drafters.common.threads import set_threads
from drafters.model.cache import KVCache
from eval.configs import BatchCostConfig
from eval.measure.models import load_models
from eval.report.tables import (
    about_energy,
    machine_line,
    number,
    run_again,
    say,
    software_line,
    table,
    target_line,
    write_page,
)


@dataclass(frozen=True)
class Block:
    """``runs`` forwards of one batch size; joules are None if they are not available."""

    batch: int
    seconds: float
    joules: float | None
    host_joules: float | None


def measure_and_write(config: BatchCostConfig, argv: list[str], console: Console) -> dict[str, Any]:
    """Measure and write both files; return the JSON."""
    set_threads(config.threads)
    target = load_models(config.target).target
    if config.context + 1 > target.max_context:
        raise ValueError(
            f"context is {config.context} and one token follows, but {target.name} has {target.max_context} positions: "
            f"give at most {target.max_context - 1}"
        )
    facts = environment(target) | {"config": config.model_dump(mode="json"), "argv": argv}
    meter = EnergyMeter(target.device)
    blocks = measure(target, config, meter)
    facts |= {"load_average_after": load_average(), "peak_memory_bytes": peak_memory_bytes(target.device)}
    facts["energy"] = meter.describe()
    rows = [row_of(batch, [block for block in blocks if block.batch == batch], config.runs) for batch in config.batches]
    found = {"format_version": 1, "environment": facts, "rows": rows}
    say(console, "\n".join(_table(found)))
    write_page(found, markdown(found), config.out, "batch_cost", console)
    return found


@torch.inference_mode()
def measure(target: TargetModel, config: BatchCostConfig, meter: EnergyMeter) -> list[Block]:
    """Return ``config.blocks`` blocks of every batch size, in an order that changes."""
    generator = torch.Generator().manual_seed(config.seed)
    ready: dict[int, tuple[torch.Tensor, KVCache]] = {}
    for batch in config.batches:
        ids = torch.randint(target.vocab_size, (batch, config.context + 1), generator=generator).to(target.device)
        cache = target.new_cache(batch, config.context + 1)
        for row in range(batch):  # one at a time: a prefill of all inputs could need far more memory
            alone = target.new_cache(1, cache.capacity)
            target.run(ids[row : row + 1, :-1], alone)
            alone.commit_first([config.context])
            cache.copy_row(row, alone)
        ready[batch] = ids[:, -1:], cache
        _forwards(target, *ready[batch], config.warmup)
    shuffle = random.Random(config.seed)
    found = []
    with Bar(total=config.blocks * len(config.batches), unit=" blocks", leave=False) as bar:
        for _ in range(config.blocks):
            for batch in shuffle.sample(config.batches, len(config.batches)):
                bar.set_description(f"batch {batch}", refresh=False)
                with meter.measure() as joules:
                    start = time.perf_counter()
                    _forwards(target, *ready[batch], config.runs)
                    seconds = time.perf_counter() - start
                found.append(Block(batch, seconds, joules.device, joules.host))
                bar.update()
    return found


def _forwards(target: TargetModel, tokens: torch.Tensor, cache: KVCache, count: int) -> None:
    """Run the same forward ``count`` times: nothing is committed, so the next one overwrites its rows."""
    for _ in range(count):
        target.lm_head(target.run(tokens, cache).features)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def row_of(batch: int, blocks: list[Block], runs: int) -> dict[str, Any]:
    """Return one batch size's medians over its blocks, per forward and per input."""
    row: dict[str, Any] = {"batch": batch, "runs": runs, "blocks": len(blocks)}
    for name in ("seconds", "joules", "host_joules"):
        values = [getattr(block, name) for block in blocks]
        median = None if None in values else statistics.median(values) / runs
        row |= {f"{name}_per_run": median, f"{name}_per_input": None if median is None else median / batch}
        row[f"{name}_of_blocks"] = values
    return row


def markdown(found: dict[str, Any]) -> str:
    """Return ``batch_cost.md``."""
    facts = found["environment"]
    config = facts["config"]
    lines = ["# Cost of a forward by batch size", "", target_line(facts), machine_line(facts)]
    lines.append(
        f"- a run is one forward: one new token for each input after a context of {config['context']}; "
        f"{config['runs']} runs per block, medians of {config['blocks']} blocks, batch sizes alternating"
    )
    lines += [software_line(facts), *(f"- {line}" for line in about_energy(facts["energy"])), "", *_table(found), ""]
    return "\n".join([*lines, *run_again(facts["argv"])])


def _table(found: dict[str, Any]) -> list[str]:
    head = ["batch size", "ms/run", "ms/input", "time over the first", "J/run", "J/input"]
    first, lines = found["rows"][0]["seconds_per_run"], []
    for row in found["rows"]:
        seconds, one = row["seconds_per_run"], row["seconds_per_input"]
        times = [number(1e3 * seconds, 3), number(1e3 * one, 3), number(seconds / first, 2, "x")]
        joules = [number(row["joules_per_run"], 3), number(row["joules_per_input"], 3)]
        lines.append([str(row["batch"]), *times, *joules])
    return table(head, lines, texts=0)
