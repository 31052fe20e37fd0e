"""What eval.batch_cost does with its config."""

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
from eval.batch_cost import BatchCostConfig
from eval.report.files import write_page
from eval.report.page import machine_line, number, run_again, software_line, table, target_line
from eval.report.rows import about_energy
from eval.speed_run import load_models


@dataclass(frozen=True)
class Block:
    """``runs`` forwards of one batch size; joules are None where they are not available."""

    batch: int
    seconds: float
    joules: float | None
    host_joules: float | None


def run(config: BatchCostConfig, argv: list[str], console: Console) -> dict[str, Any]:
    """Measure and write both files; returns what is in the JSON.

    Raises:
        ValueError: the target is not there, or its context is too short.
        OSError: a file could not be written.
    """
    set_threads(config.threads)
    target = load_models(config.target).target
    if config.context + 1 > target.max_context:
        raise ValueError(
            f"context is {config.context} and one token follows, but {target.name} was made for {target.max_context} "
            f"positions: give at most {target.max_context - 1}"
        )
    facts = environment(target) | {"config": config.model_dump(mode="json"), "argv": argv}
    meter = EnergyMeter(target.device)
    blocks = measure(target, config, meter, console)
    facts |= {"load_average_after": load_average(), "peak_memory_bytes": peak_memory_bytes(target.device)}
    facts["energy"] = meter.describe()
    rows = [row_of(batch, [block for block in blocks if block.batch == batch], config.runs) for batch in config.batches]
    found = {"format_version": 1, "environment": facts, "rows": rows}
    console.print("\n".join(_table(found)), markup=False, highlight=False)
    write_page(found, markdown(found), config.out, "batch_cost", console)
    return found


@torch.inference_mode()
def measure(target: TargetModel, config: BatchCostConfig, meter: EnergyMeter, console: Console) -> list[Block]:
    """``config.blocks`` blocks of every batch size, reshuffled each time round."""
    generator = torch.Generator().manual_seed(config.seed)
    ready: dict[int, tuple[torch.Tensor, KVCache]] = {}
    for batch in config.batches:
        ids = torch.randint(target.vocab_size, (batch, config.context + 1), generator=generator).to(target.device)
        cache = target.new_cache(batch, config.context + 1)
        for row in range(batch):  # one at a time: a prefill of all inputs at once could take far more memory
            _prefill(target, cache, row, ids)
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


def _prefill(target: TargetModel, cache: KVCache, row: int, ids: torch.Tensor) -> None:
    """Prefill one row's context into the cache of all rows."""
    alone = target.new_cache(1, cache.capacity)
    target.run(ids[row : row + 1, :-1], alone)
    alone.commit_first([ids.shape[1] - 1])
    cache.copy_row(row, alone)


def _forwards(target: TargetModel, tokens: torch.Tensor, cache: KVCache, count: int) -> None:
    """The same forward ``count`` times: uncommitted, its rows are overwritten by the next."""
    for _ in range(count):
        target.lm_head(target.run(tokens, cache).features)
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def row_of(batch: int, blocks: list[Block], runs: int) -> dict[str, Any]:
    """One batch size's medians over its blocks, per forward and per input."""
    row: dict[str, Any] = {"batch": batch, "runs": runs, "blocks": len(blocks)}
    for name in ("seconds", "joules", "host_joules"):
        values = [getattr(block, name) for block in blocks]
        median = None if None in values else statistics.median(values) / runs
        row |= {f"{name}_per_run": median, f"{name}_per_input": None if median is None else median / batch}
        row[f"{name}_of_blocks"] = values
    return row


def markdown(found: dict[str, Any]) -> str:
    """``batch_cost.md``."""
    facts = found["environment"]
    config = facts["config"]
    lines = ["# Cost of a forward by batch size", "", target_line(facts), machine_line(facts)]
    lines.append(
        f"- a run is one forward: one new token for each input after a context of {config['context']}; "
        f"{config['runs']} runs a block, medians of {config['blocks']} blocks, batch sizes alternating"
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
