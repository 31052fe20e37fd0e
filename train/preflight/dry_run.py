"""--dry-run: check all that a run needs, and estimate memory, disk and time, in seconds and without DeepSpeed.

It reads configurations, manifests and file headers, no weights and no features. It names missing files; then the
estimates use --tokens or --data and --target-config.
"""

import functools
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from data_prep.common.disk import check_room
from data_prep.common.ranks import find_rank
from data_prep.store.manifest import token_bytes
from data_prep.store.reader import FeatureStore
from drafters.common.wording import size_text
from drafters.hub.declared import READERS
from drafters.layouts.export import served_by
from drafters.methods import method_names
from drafters.model.cache import head_sizes
from drafters.model.files import free_memory, resolve_device, resolve_dtype
from train.core.config import TrainConfig
from train.core.runtime import dtype_of, rank_device
from train.core.weights import init_from
from train.data.packing import Source
from train.preflight import checks, estimate
from train.preflight.checks import Report
from train.preflight.workload import Workload, estimate_workload, store_workload
from train.run.files import check_run_disk, check_run_folder, run_folder_bytes, trained_parameters
from train.run.inputs import check_taps
from train.watch.flops import peak_tflops, training_cost
from train.watch.tau import tau_prompts


def print_report(config: TrainConfig, arguments: Namespace) -> int:
    """--dry-run: print the report; return 1 if the run could not start."""
    report = dry_run(config, arguments)
    if find_rank(None, None).index == 0:
        print(report.text())
    return 1 if report.problems else 0


def dry_run(config: TrainConfig, given: Namespace) -> Report:
    """Check a run and estimate what it takes; nothing is written, and no process group is started.

    ``given``: the command line (``train.preflight.command.parse_arguments``), with assumptions on what is missing.
    """
    report = Report()
    if given.device is not None and config.precision == "auto":
        config = config.model_copy(update={"precision": "bf16"})  # of all GPUs whose peak is known
    check_folder = functools.partial(check_run_folder, config, given.resume)
    config = report.check("run folder", check_folder, f"{config.out} can be used") or config
    report.check("libraries", checks.check_libraries, ", ".join(checks.LIBRARIES))
    target, local = checks.check_target(report, config, given.target_config), checks.here(config)
    missing = checks.not_here(config, local)
    others = [report.check(key, functools.partial(checks.check_model, n), n) for key, n in config.other_models.items()]
    compared, train = False, None
    heldout: Source | None = None
    if config.data is not None:
        if checks.check_sources(report, config.data) and local is not None and not missing:
            compared, heldout = True, checks.check_dialogues(report, config, local)
    else:
        features = Path(config.features)
        train, heldout = (checks.check_store(report, features / split, split) for split in ("train", "heldout"))
        if local is not None and "weights" not in missing and None not in (train, heldout):
            compared = True
            checks.check_stores_target(report, config, local, missing)
    if missing:
        report.add("not checked", f"what needs the target's files: {missing} not here")
    if target is None:
        report.add("estimates", "none without the target's configuration; give --target-config config.json")
        return report
    if None in others:
        return report
    if not compared and config.taps:
        report.check("exit layer", lambda: check_taps(config, config.target, target.num_hidden_layers))
    if config.tau_every and heldout is not None:
        report.check("prompts for tau", lambda: tau_prompts(config, target, heldout), "found")
    Estimates(report, config, target, train, _workload(report, local or config, train, given), given).make()
    return report


def _workload(report: Report, config: TrainConfig, store: FeatureStore | None, given: Namespace) -> Workload | None:
    data = given.data or (config.data.train if config.data is not None else None)
    if store is None and given.tokens is None and data is None:
        report.add("data", "unknown: give --tokens N or --data FILE for an estimate without features")
        return None
    longest = config.data.max_length if config.data is not None else given.max_length

    def counted() -> Workload:
        if store is not None:
            return store_workload(config, store)
        return estimate_workload(config, given.tokens, data, longest)

    return report.check("data", counted, Workload.describe)


@dataclass
class Estimates:
    """Memory, disk and time of the run, as lines of ``report``."""

    report: Report
    config: TrainConfig
    target: PretrainedConfig
    store: FeatureStore | None
    workload: Workload | None
    given: Namespace

    def __post_init__(self) -> None:
        self.task = estimate.meta_task(self.config, self.target)
        longest = self.workload.longest if self.workload else self.given.max_length
        share = -(-self.config.batch_tokens // (self.given.ranks * self.config.gradient_accumulation))
        self.micro = estimate.MicroBatch(dialogues=max(1, -(-share // longest)), length=longest)

    def make(self) -> None:
        """Add all estimates, and their summary."""
        report, config, micro, ranks = self.report, self.config, self.micro, self.given.ranks
        whole, count = estimate.parameters(self.task.module), trained_parameters(self.task.module)
        frozen = f", {count:,} of them trained" if count < whole else ""
        report.add("drafter", f"{type(self.task.module).__name__}, {whole:,} parameters{frozen}")
        if config.drafter in method_names():  # a draft model is served by any engine
            report.add("served by", served_text(config.drafter, self.task.drafter_config(), self.target))
        if (start := config.init_from) is not None:
            report.check("init_from", lambda: init_from(self.task, start), f"{start}, whose weights fit")
        if self.workload:
            report.add("steps", self.workload.describe_steps(config))
        size = f"at most {micro.dialogues} dialogues of {micro.length:,} tokens"
        report.add("micro-batch", f"{config.gradient_accumulation} a step on each of {ranks} rank(s): {size}")
        averaged, export = config.weight_average is not None, getattr(self.task.module, "export_bytes", None)
        memory, run_disk = self.memory(), size_text(run_folder_bytes(count, averaged, export))
        report.check("disk: run folder", lambda: check_run_disk(config, self.task.module), run_disk)
        parts = [f"drafter {whole / 1e6:,.0f}M parameters", f"memory {size_text(memory)} a rank"]
        parts.append(f"run folder {run_disk}")
        if self.workload:
            parts += [self.features_disk(self.workload), *self.time(self.workload)]
        report.short = "; ".join(parts)

    def memory(self) -> int:
        """Add the table of memory by part; return the sum in bytes per rank."""
        report, config, target, given = self.report, self.config, self.target, self.given
        on_gpu = given.device is not None or torch.cuda.is_available()
        passes = estimate.pass_memory(config, target, self.micro, config.activation_checkpointing, on_gpu)
        less = estimate.pass_memory(config, target, self.micro, checkpointing=True, on_gpu=on_gpu)["pass"]
        parts = estimate.memory_parts(config, self.task, given.ranks) | {"forward and backward": passes["pass"]}
        if config.data is not None:
            width = resolve_dtype(config.data.target_dtype, rank_device()).itemsize
            parts["target, for features"] = estimate.target_parameters(target)[0] * width
        elif config.tau_every and config.tau_device is None:
            parts["target, for tau"] = estimate.target_parameters(target)[0] * dtype_of(config).itemsize
        total, report.memory = sum(parts.values()), parts
        report.add("memory of a rank", f"{size_text(total)}, and the CUDA context (about half a GB)")
        for name, size in parts.items():
            text = size_text(size)
            if name == "forward and backward":
                text += f" (including the loss's rows of logits {size_text(passes['loss'])}, "
                text += f"the batch {size_text(passes['batch'])}; with activation checkpointing {size_text(less)})"
            report.add(f"  {name}", text)
        stages = []
        for stage in (0, 1, 2, 3):
            changed = config.model_copy(update={"zero_stage": stage, "offload": "none"})
            whole = sum((parts | estimate.memory_parts(changed, self.task, given.ranks)).values())
            stages.append(f"{stage}: {size_text(whole)}")
        report.add("  by ZeRO stage", ", ".join(stages))
        device = resolve_device()
        free = free_memory(device)
        if given.device is None and total > free:
            report.problems.append(f"memory: {size_text(total)} needed, {size_text(free)} free on {device}")
            report.add("  PROBLEM", f"{size_text(free)} free on {device}; lower batch_tokens or loss_chunk_rows")
        return total

    def features_disk(self, workload: Workload) -> str:
        """Add the size of the features on disk, existing or estimated; return it in words."""
        report, config = self.report, self.config
        if self.store is not None:
            text = size_text(self.store.manifest.size)
            report.add("disk: features", f"{text}, already there")
            return f"features {text}"
        if isinstance(config.features, str):
            report.add("disk: features", "none: features: online")
            return "no features on disk"
        hidden, taps, folder = self.target.hidden_size, len(config.taps), config.features
        bf16, int8 = (workload.tokens * token_bytes(hidden, taps, kind) for kind in ("bfloat16", "int8"))
        text = f"{size_text(bf16)} in bf16, {size_text(int8)} in int8"
        fix = "give `features` a folder on another disk"
        report.check("disk: features", lambda: check_room(folder, int8, "the folder of features in int8", fix), text)
        return f"features {text}"

    def time(self, workload: Workload) -> list[str]:
        """Hours of training and, without a store, of the target's pass over the data."""
        report, config, target, given = self.report, self.config, self.target, self.given
        cost = training_cost(self.task)
        lengths = workload.lengths or [self.micro.length]
        flops = cost.of(lengths, 0) / sum(lengths) + cost.row * (workload.trained / workload.tokens)
        device: Any = given.device or resolve_device()
        peak = config.peak_tflops or peak_tflops(device)
        assumed = (peak or 0.0) * 1e12 * given.mfu * given.ranks  # FLOP/s
        if given.tokens_per_second:
            rate, how = given.tokens_per_second, "as given"
        elif given.measure:
            share = workload.trained / workload.tokens
            rate = estimate.measured_rate(config, target, self.micro, share) * given.ranks
            how = "measured here without DeepSpeed"
        elif peak:
            rate = assumed / flops
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
        if self.store is None and peak:
            width = target.num_attention_heads * head_sizes(target)[1]
            forward = 2 * estimate.target_parameters(target)[1]
            forward += 2 * width * self.micro.length * target.num_hidden_layers
            count, passes = workload.tokens, "one pass of the target over the data"
            if config.data is not None and tokens:  # again in every epoch
                count, passes = tokens, f"the target's pass over each of {tokens:,} tokens"
            text = _hours(count * forward / assumed / 3600)
            report.add("time: features", f"{text} of {passes}, at the same share of the peak")
            found.append(f"{text} for the features")
        return found


def served_text(method: str, options: dict[str, Any], target: PretrainedConfig) -> str:
    """The engines that can serve the trained drafter, and the reasons why others cannot."""
    reasons = served_by(method, options, target)
    able = [READERS[to] for to, reason in reasons.items() if reason is None]
    others = [f"not by {READERS[to]}: {reason}" for to, reason in reasons.items() if reason is not None]
    layer = f" (layer: {options['layer']})" if "layer" in options else ""
    return "; ".join([", ".join(["this toolkit", *able]) + layer, *others])


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
