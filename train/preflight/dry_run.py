"""--dry-run: check all that a run needs, and say what it will take, in seconds and without starting DeepSpeed.

It reads configurations, manifests and file headers, no weights and no features. What is not there yet is named; the
estimates then come from --tokens or --data and --target-config.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from data_prep.disk import check_room
from data_prep.store.quantise import token_bytes
from data_prep.store.reader import FeatureStore
from drafters.model.files import free_memory, resolve_device, resolve_dtype
from drafters.model.kv_cache import head_sizes
from drafters.wording import size_text
from train.config import TrainConfig
from train.data.packing import Source
from train.inputs import check_taps
from train.preflight.checks import (
    LIBRARIES,
    Report,
    check_dialogues,
    check_libraries,
    check_sources,
    check_store,
    check_stores_target,
    check_target,
    here,
    not_here,
)
from train.preflight.estimate import (
    MicroBatch,
    memory_parts,
    meta_ends,
    meta_task,
    parameters,
    pass_memory,
    target_parameters,
)
from train.preflight.microbench import measured_rate
from train.preflight.workload import Workload, estimate_workload, store_workload
from train.run.files import check_run_disk, check_run_folder, run_folder_bytes
from train.task import Task
from train.watch.flops import peak_tflops, training_cost
from train.watch.tau import held_out_prompts, prompt_room


@dataclass
class Assumptions:
    """What the command line says of things that are not here.

    Attributes:
        tokens, data: size of the training data, or the file to estimate it from.
        target_config: a Hugging Face config file, in place of the target's.
        ranks: processes, each with a device of its own.
        device: a device's name, for its peak; default: the one that is here.
        tokens_per_second, measure: the speed of training, given or measured here; else ``mfu`` of the peak is assumed.
        max_length: tokens of the longest dialogue, where there is no store to tell.
    """

    tokens: int | None = None
    data: str | None = None
    target_config: str | None = None
    ranks: int = 1
    device: str | None = None
    tokens_per_second: float | None = None
    measure: bool = False
    mfu: float = 0.4
    max_length: int = 2048


def dry_run(config: TrainConfig, resume: bool, given: Assumptions) -> Report:
    """Check a run and estimate what it takes; nothing is written, and no process group is started."""
    report = Report()
    report.check("run folder", lambda: check_run_folder(config, resume), f"{config.out} can be used")
    report.check("libraries", check_libraries, ", ".join(LIBRARIES))
    target, local = check_target(report, config, given.target_config), here(config)
    missing = not_here(config, local)
    compared, train = False, None
    heldout: Source | None = None
    if config.data is not None:
        if check_sources(report, config.data) and local is not None and not missing:
            compared, heldout = True, check_dialogues(report, config, local)
    else:
        train, heldout = (check_store(report, Path(config.features) / split, split) for split in ("train", "heldout"))
        compared = local is not None and "weights" not in missing and None not in (train, heldout)
        if compared:
            check_stores_target(report, config, local, missing)
    if missing:
        report.add("not checked", f"what needs the target's files: {missing} not here")
    if not compared and config.taps and target is not None:
        report.check("exit layer", lambda: check_taps(config, config.target, target.num_hidden_layers))
    if config.tau_every and heldout is not None and target is not None:
        context = getattr(target, "max_position_embeddings", None)
        report.check(
            "prompts for tau",
            lambda: held_out_prompts(heldout, config.tau_prompts, prompt_room(config, context)),
            "there are",
        )
    if target is None:
        report.add("estimates", "none without the target's configuration; give --target-config config.json")
        return report
    workload = _workload(report, local or config, train, given)
    _estimate(report, config, target, workload, train, given)
    return report


# ------------------------------------------------------------------------------------------- what it will take


def _workload(report: Report, config: TrainConfig, store: FeatureStore | None, given: Assumptions) -> Workload | None:
    if store is not None:
        counted = store_workload(config, store)
        report.add("data", counted.describe())
        return counted
    data = given.data or (config.data.train if config.data is not None else None)
    if given.tokens is None and data is None:
        report.add("data", "unknown: give --tokens N or --data FILE for an estimate without features")
        return None
    longest = config.data.max_length if config.data is not None else given.max_length
    estimated: Workload | None = report.check(
        "data", lambda: estimate_workload(config, given.tokens, data, longest), Workload.describe
    )
    return estimated


def _estimate(
    report: Report,
    config: TrainConfig,
    target: PretrainedConfig,
    workload: Workload | None,
    store: FeatureStore | None,
    given: Assumptions,
) -> None:
    task = meta_task(config, meta_ends(target))
    count = parameters(task.module)
    report.add("drafter", f"{type(task.module).__name__}, {count:,} parameters")
    longest = workload.longest if workload else given.max_length
    share = -(-config.batch_tokens // (given.ranks * config.gradient_accumulation))
    micro = MicroBatch(dialogues=max(1, -(-share // longest)), length=longest)
    if workload:
        report.add("steps", workload.describe_steps(config))
    report.add(
        "micro-batch",
        f"{config.gradient_accumulation} a step on each of {given.ranks} rank(s): at most {micro.dialogues} dialogues "
        f"of {micro.length:,} tokens",
    )
    memory = _memory(report, config, target, micro, given)
    run_disk = size_text(run_folder_bytes(count))
    report.check("disk: run folder", lambda: check_run_disk(config.out, task.module), run_disk)
    parts = [f"drafter {count / 1e6:,.0f}M parameters", f"memory {size_text(memory)} a rank"]
    parts.append(f"run folder {run_disk}")
    if workload:
        parts += _data_disk(report, config, target, workload, store)
        parts += _time(report, task, config, target, workload, store, micro, given)
    report.short = "; ".join(parts)


def _memory(
    report: Report,
    config: TrainConfig,
    target: PretrainedConfig,
    micro: MicroBatch,
    given: Assumptions,
) -> int:
    """The table of memory by part; returns the whole of it, bytes a rank."""
    parts = memory_parts(config, target, given.ranks)
    on_gpu = given.device is not None or torch.cuda.is_available()
    passes = pass_memory(config, target, micro, config.activation_checkpointing, on_gpu)
    less = pass_memory(config, target, micro, checkpointing=True, on_gpu=on_gpu)["pass"]
    parts["forward and backward"] = passes["pass"]
    if config.data is not None:
        width = resolve_dtype(config.data.target_dtype).itemsize
        parts["target, for features"] = target_parameters(target)[0] * width
    elif config.tau_every and config.tau_device is None:
        parts["target, for tau"] = target_parameters(target)[0] * config.dtype.itemsize
    total = sum(parts.values())
    report.memory = parts
    report.add("memory of a rank", f"{size_text(total)}, and the CUDA context (about half a GB)")
    for name, size in parts.items():
        report.add(f"  {name}", size_text(size))
    report.lines[len(report.lines) - len(parts) + list(parts).index("forward and backward")] += (
        f" (of it the loss's rows of logits {size_text(passes['loss'])}, the batch {size_text(passes['batch'])}; with "
        f"activation checkpointing {size_text(less)})"
    )
    stages = []
    for stage in (0, 1, 2, 3):
        changed = config.model_copy(update={"zero_stage": stage, "offload": "none"})
        other = memory_parts(changed, target, given.ranks)
        stages.append(f"{stage}: {size_text(total + sum(other.values()) - sum(parts[name] for name in other))}")
    report.add("  by ZeRO stage", ", ".join(stages))
    device = resolve_device()
    if given.device is None and total > free_memory(device):
        report.problems.append(f"memory: {size_text(total)} needed, {size_text(free_memory(device))} free on {device}")
        report.add(
            "  PROBLEM", f"{size_text(free_memory(device))} free on {device}; lower batch_tokens or loss_chunk_rows"
        )
    return total


def _data_disk(
    report: Report,
    config: TrainConfig,
    target: PretrainedConfig,
    workload: Workload,
    store: FeatureStore | None,
) -> list[str]:
    if store is not None:
        size = sum(shard.bytes for shard in store.manifest.shards)
        report.add("disk: features", f"{size_text(size)}, there already")
        return [f"features {size_text(size)}"]
    if isinstance(config.features, str):
        report.add("disk: features", "none: features: online")
        return ["no features on disk"]
    sizes = [workload.tokens * token_bytes(target.hidden_size, len(config.taps), kind) for kind in ("bfloat16", "int8")]
    text = f"{size_text(sizes[0])} in bf16, {size_text(sizes[1])} in int8"
    folder = config.features
    fix = "give `features` a folder on another disk"
    report.check("disk: features", lambda: check_room(folder, sizes[1], "the folder of features in int8", fix), text)
    return [f"features {text}"]


def _time(
    report: Report,
    task: Task,
    config: TrainConfig,
    target: PretrainedConfig,
    workload: Workload,
    store: FeatureStore | None,
    micro: MicroBatch,
    given: Assumptions,
) -> list[str]:
    """Hours of training and, where there are no features yet, of the target's pass over the data; online, of all."""
    cost = training_cost(task)
    lengths = workload.lengths or [micro.length]
    flops = cost.of(lengths, 0) / sum(lengths) + cost.row * (workload.trained / workload.tokens)
    device: Any = given.device or resolve_device()
    peak = config.peak_tflops or peak_tflops(device)
    if given.tokens_per_second:
        rate, how = given.tokens_per_second, "as given"
    elif given.measure:
        rate, how = measured_rate(config, target, micro) * given.ranks, "measured here without DeepSpeed"
    elif peak:
        rate = peak * 1e12 * given.mfu * given.ranks / flops
        how = f"assuming an MFU of {given.mfu:.0%} of {peak:g} TFLOP/s on {given.ranks} device(s)"
    else:
        report.add("time", f"unknown on {device}: give --tokens-per-second, --measure, or --device (as H200)")
        return []
    tokens = workload.total(config)
    hours = [tokens / rate / 3600] if tokens else []
    hours += [config.minutes / 60] if config.minutes else []
    text = f"{_hours(min(hours))} of training at {rate:,.0f} tokens/s"
    report.add("time", f"{text} ({how}; {flops / 1e9:.2f} GFLOP a token)")
    found = [f"{text} ({how})"]
    if store is None and peak:
        active = target_parameters(target)[1]
        width = target.num_attention_heads * head_sizes(target)[1]
        forward = 2 * active + 2 * width * micro.length * target.num_hidden_layers
        passes, share = "one pass of the target over the data", "at the same share of the peak"
        count = workload.tokens
        if config.data is not None and tokens:  # every epoch anew
            count, passes = tokens, f"the target's pass over each of {tokens:,} tokens"
        text = _hours(count * forward / (peak * 1e12 * given.mfu * given.ranks) / 3600)
        report.add("time: features", f"{text} of {passes}, {share}")
        found.append(f"{text} for the features")
    return found


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
