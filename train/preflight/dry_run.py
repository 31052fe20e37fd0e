"""--dry-run: check all that a run needs, and estimate memory, disk and time, in seconds and without DeepSpeed.

It reads configurations, manifests and file headers, no weights and no features. It names missing files; then the
estimates use --tokens or --data and --target-config.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from transformers import PretrainedConfig

from data_prep.common.disk import check_room
from data_prep.common.ranks import find_rank
from data_prep.dialogues.encoding import encode_split, load_tokenizer
from data_prep.dialogues.reader import check_source
from data_prep.extraction.headers import make_headers
from data_prep.store.manifest import ANSWERS, token_bytes
from data_prep.store.reader import FeatureStore
from drafters.common.wording import size_text
from drafters.heads.keys import READERS
from drafters.layouts.export import served_by
from drafters.methods import method_names
from drafters.model.cache import head_sizes
from drafters.model.files import free_memory, load_config_only, resolve_device
from drafters.model.loading import BASE, config_and_adapter
from drafters.model.weights import open_weights, weight_files
from train.core.config import TrainConfig
from train.core.task import Task, task_class
from train.core.weights import init_from
from train.data.online import OnlineFeatures, as_feature_keys
from train.data.packing import Source
from train.preflight import estimate, memory
from train.preflight.workload import SAMPLE, Workload, estimate_workload, store_workload
from train.run.files import (
    CACHE,
    LIBRARIES,
    check_installed,
    check_run_disk,
    check_run_folder,
    run_folder_bytes,
    trained_parameters,
)
from train.run.inputs import check_taps, open_inputs
from train.watch.flops import peak_tflops, training_cost
from train.watch.tau import tau_prompts

Found = TypeVar("Found")


@dataclass
class Report:
    """The lines of a dry run. ``problems`` would keep the run from starting; ``short``: the parts of the last line.

    ``names``: the target's name in messages, by its folder in the Hub's cache. ``memory``: bytes of a rank by part.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    short: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, text: str, short: str | None = None) -> None:
        """Add one line of the table, and perhaps a part of the last line."""
        self.lines.append(f"{name:<24} {text}")
        self.short += [] if short is None else [short]

    def check(
        self, name: str, what: Callable[[], Found], done: str | Callable[[Found], str], short: str | None = None
    ) -> Found | None:
        """Call ``what`` and return its value; its error is a problem. ``done``: text, or a function of the value."""
        try:
            value = what()
        except (ValueError, OSError, EntryNotFoundError) as error:  # the last: an index names missing files
            text = str(error)
            for folder, known_as in self.names.items():
                text = text.replace(folder, known_as)
            self.problems.append(f"{name}: {text}")
            self.add(name, f"PROBLEM: {text}", short)
            return None
        self.add(name, done if isinstance(done, str) else done(value), short)
        return value

    def text(self) -> str:
        """The whole report."""
        verdict = f"{len(self.problems)} problem(s): the run cannot start like this" if self.problems else "can start"
        short = [f"In short: {'; '.join(self.short)}"] if self.short else []
        return "\n".join([*self.lines, *short, f"Result: {verdict}"])


def print_report(config: TrainConfig, arguments: Namespace) -> int:
    """--dry-run: print the report; return 1 if the run could not start."""
    report = dry_run(config, arguments)
    if find_rank(None, None).index == 0:
        print(report.text())
    return 1 if report.problems else 0


def dry_run(config: TrainConfig, options: Namespace) -> Report:
    """Check a run and estimate what it takes; nothing is written, and no process group is started.

    ``options``: the command line (``train.preflight.command.parse_arguments``), with assumptions on what is missing.
    """
    report = Report()
    if options.device is not None:
        config = _of_a_gpu(config)
    check_folder = partial(check_run_folder, config, options.resume)
    config = report.check("run folder", check_folder, f"{config.out} can be used") or config
    report.check("libraries", lambda: check_installed(config), ", ".join(LIBRARIES))

    # The target, and the models beside it.
    local, missing = find_target(config)
    report.names = {} if local is None else {local.target: config.target}
    where = "a folder" if local is config else "in the Hub's cache"
    target = report.check("target", lambda: target_config(config, local), f"{config.target}, {where}")
    if instead := options.target_config:
        read = partial(load_config_only, instead, may_be_file=True)
        target = report.check("target's shape", read, f"from {instead}")
    if target is not None:
        config = config.settled(lambda: target.num_hidden_layers)
        local = local and local.settled(lambda: target.num_hidden_layers)
    if local is not None and "weights" not in missing and config.starts_in_target:
        report.check("first weights", partial(task_class(config.drafter).check_start, local), str)
    others = [report.check(key, partial(check_model, name), name) for key, name in config.other_models.items()]

    # The data, and whether it fits the target, as far as that is here.
    train, heldout, compared = _check_data(report, config, local, missing)
    if missing:
        report.add("not checked", f"what needs the target's files: {missing} not here")
    if target is None:
        report.add("estimates", "none without the target's configuration; give --target-config config.json")
        return report
    if None in others:
        return report
    if not compared and config.taps:
        report.check("exit layer", lambda: check_taps(config, config.target, target.num_hidden_layers), "ok")
    if config.tau_every and heldout is not None:
        report.check("prompts for tau", lambda: tau_prompts(config, target, heldout), "found")
    workload = None
    if train is not None:
        workload = report.check("data", partial(store_workload, config, train), Workload.describe)
    elif options.tokens is not None or options.data or config.data is not None:
        workload = report.check("data", partial(estimate_workload, local or config, options), Workload.describe)
    else:
        report.add("data", "unknown: give --tokens N or --data FILE for an estimate without features")
    add_estimates(report, config, target, train, workload, options)
    return report


def _of_a_gpu(config: TrainConfig) -> TrainConfig:
    """``config`` with bf16, which all GPUs whose peak is known multiply fast, wherever the machine is to choose."""
    changed: dict[str, Any] = {"precision": "bf16"} if config.precision == "auto" else {}
    if config.data is not None and config.data.target_dtype == "auto":
        changed["data"] = config.data.model_copy(update={"target_dtype": "bfloat16"})
    return config.model_copy(update=changed)


def _check_data(
    report: Report, config: TrainConfig, local: TrainConfig | None, missing: str
) -> "tuple[FeatureStore | None, Source | None, bool]":
    """The training store, the held-out text, and whether they were compared with the target in ``local``."""
    if config.data is not None:
        before = len(report.problems)
        for split, source in (("train", config.data.train), ("heldout", config.data.heldout)):
            report.check(split, partial(check_source, source), f"{source}, features computed while it trains")
        if local is None or missing or len(report.problems) > before:
            return None, None, False
        done = f"tokenizer, context and layers suffice (tried on up to {SAMPLE} dialogues of each split)"
        return None, report.check("target and dialogues", partial(read_dialogues, local), done), True
    train, heldout = (
        report.check(split, partial(FeatureStore.open, Path(config.features) / split), describe_store)
        for split in ("train", "heldout")
    )
    compared = local is not None and "weights" not in missing and train is not None and heldout is not None
    if local is not None and compared:
        done = f"target{'' if missing else ', tokenizer'} and exit layer are those of the features"
        report.check("target and features", partial(open_inputs, local, device="meta"), done)
    return train, heldout, compared


def find_target(config: TrainConfig) -> tuple[TrainConfig | None, str]:
    """``config`` with the target's folder, perhaps in the Hub's cache, or None; and the files that a run would have to
    fetch from the Hub, or "". It uses no network."""
    if Path(config.target).is_dir():  # missing files are an error
        return config, ""
    file = None
    with suppress(HFValidationError):  # a path
        file = try_to_load_from_cache(config.target, "config.json", revision=config.revision)
    if not isinstance(file, str):
        return None, "target"
    folder = Path(file).parent
    missing = [] if all((folder / name).is_file() for name in weight_files(str(folder))) else ["weights"]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        missing.append("tokenizer")
    return config.model_copy(update={"target": str(folder), "revision": None}), " and ".join(missing)


def target_config(config: TrainConfig, local: TrainConfig | None) -> PretrainedConfig:
    """The target's configuration; ``local``: the config that ``find_target`` returns."""
    if local is None:
        raise ValueError(f"{config.target!r} is neither a folder nor a repository in the Hub's cache; put it there")
    return load_config_only(local.target, local.revision)


def check_model(name: str) -> PretrainedConfig:
    """The configuration of a model that a run loads beside its target; for an adapter, of its base model.

    Raises:
        ValueError: it cannot be used, or the tensors in its folder do not fit its configuration.
    """
    config, adapter = config_and_adapter(name)
    base = name if adapter is None else adapter[BASE]
    if Path(base).is_dir():
        open_weights(base, None, config)
    return config


def describe_store(store: FeatureStore) -> str:
    """One line on a store."""
    manifest = store.manifest
    return (
        f"{manifest.dialogues:,} dialogues, {manifest.tokens:,} tokens, {size_text(manifest.size)} in "
        f"{manifest.dtype}, of {manifest.target_name} ({manifest.target_fingerprint}); answers: "
        f"{ANSWERS[manifest.answers]}"
    )


def read_dialogues(config: TrainConfig) -> OnlineFeatures:
    """The held-out dialogues of an online run, without features: all that tau chooses among, or ``SAMPLE``. Also reads
    ``SAMPLE`` dialogues to train on. Raises ValueError as the run would."""
    data = config.data
    assert data is not None
    chat = load_tokenizer(config.target, config.revision, data.chat_template)
    headers = make_headers(as_feature_keys(config, data), chat, heads=[config.drafter])
    first = min(SAMPLE, data.limit or SAMPLE)
    encode_split(data.train, chat, data.max_length, first)
    heldout = encode_split(data.heldout, chat, data.max_length, data.limit if config.tau_every else first)
    return OnlineFeatures(heldout, headers["heldout"], data.target_batch_tokens)


def drafter_text(task: Task) -> str:
    """The class of what is trained, and its parameters."""
    whole, count = estimate.parameters(task.module), trained_parameters(task.module)
    frozen = f", {count:,} of them trained" if count < whole else ""
    return f"{type(task.module).__name__}, {whole:,} parameters{frozen}"


def add_estimates(
    report: Report, config: TrainConfig, target: PretrainedConfig, store: FeatureStore | None,
    workload: Workload | None, options: Namespace,
) -> None:  # fmt: skip
    """Add memory, disk and time of the run."""
    task = report.check("drafter", partial(estimate.meta_task, config, target), drafter_text)
    if task is None:
        return
    report.short.append(f"drafter {estimate.parameters(task.module) / 1e6:,.0f}M parameters")
    longest = workload.longest if workload else options.max_length
    share = -(-config.batch_tokens // (options.ranks * config.gradient_accumulation))  # tokens
    lengths = [longest] * -(-share // longest)  # of the largest micro-batch
    if config.drafter in method_names():  # a draft model is served by any engine
        report.add("served by", served_text(config.drafter, task.head.stored(), target))
    if (start := config.init_from) is not None:
        report.check("init_from", lambda: init_from(task, start), f"{start}, whose weights fit")
    if store is not None:
        report.check("trained on", lambda: task.describe(store) or "all answers", str)
    if workload:
        report.add("steps", workload.describe_steps(config))
    size = f"at most {len(lengths)} dialogues of {longest:,} tokens"
    report.add("micro-batch", f"{config.gradient_accumulation} a step on each of {options.ranks} rank(s): {size}")
    add_memory(report, config, task, lengths, options)
    run_disk = size_text(run_folder_bytes(config, task.module))
    report.check("disk: run folder", lambda: check_run_disk(config, task.module), run_disk, f"run folder {run_disk}")
    if workload:
        add_features_disk(report, config, target, store, workload)
        add_time(report, config, task, lengths, store, workload, options)


def add_memory(report: Report, config: TrainConfig, task: Task, lengths: list[int], options: Namespace) -> None:
    """Add the memory of a rank by part, and its sum by ZeRO stage."""
    on_gpu = options.device is not None or torch.cuda.is_available()
    parts, passes = memory.rank_memory(config, task, lengths, options.ranks, on_gpu)
    less = memory.pass_memory(config, task, lengths, checkpointing=True, on_gpu=on_gpu)["pass"]

    def check() -> None:
        if options.device is None:
            memory.check_weights(config, task, options.ranks)
            memory.check_memory(sum(parts.values()))
            size = f"{sum(lengths):,} tokens"
            print(f"running one micro-batch of {size}; --device NAME estimates it instead", file=sys.stderr)
            parts["forward and backward"] = memory.measured_pass(config, task, lengths)

    def text(done: None) -> str:
        return f"{size_text(sum(parts.values()))}, and the CUDA context (about half a GB)"

    report.check("memory of a rank", check, text)
    report.memory = parts
    report.short.append(f"memory {size_text(sum(parts.values()))} a rank")
    how = "estimated" if parts["forward and backward"] == passes["pass"] else "measured here"
    details = f" ({how}; estimated: loss's rows of logits {size_text(passes['loss'])}, batch "
    details += f"{size_text(passes['batch'])}, all with activation checkpointing {size_text(less)})"
    for name, size in parts.items():
        report.add(f"  {name}", size_text(size) + (details if name == "forward and backward" else ""))
    stages = []
    for stage in (0, 1, 2, 3):
        changed = config.model_copy(update={"zero_stage": stage, "offload": "none"})
        whole = sum((parts | memory.memory_parts(changed, task, options.ranks)).values())
        stages.append(f"{stage}: {size_text(whole)}")
    report.add("  by ZeRO stage", ", ".join(stages))


def add_features_disk(
    report: Report, config: TrainConfig, target: PretrainedConfig, store: FeatureStore | None, workload: Workload
) -> None:
    """Add the size of the features on disk, existing or estimated."""
    name, features = "disk: features", config.features
    if store is not None:
        text = size_text(store.manifest.size)
        report.add(name, f"{text}, already there", f"features {text}")
    elif config.data is not None and config.data.disk_gb is not None:
        whole, cached = cache_bytes(config, target, workload)
        text = f"cache of {size_text(cached)}, {cached / whole:.0%} of the dialogues (data.disk_gb)"
        room = partial(check_room, config.out / CACHE, cached, "the cache", "lower data.disk_gb, or set it to null")
        report.check(name, room, text, f"cache {size_text(cached)}")
    elif isinstance(features, str):
        report.add(name, "none: features: online", "no features on disk")
    else:
        kinds = ("bfloat16", "int8")
        bf16, int8 = (workload.tokens * token_bytes(target.hidden_size, len(config.taps), kind) for kind in kinds)
        text = f"{size_text(bf16)} in bf16, {size_text(int8)} in int8"
        fix = "give `features` a folder on another disk"
        room = partial(check_room, features, int8, "the folder of features in int8", fix)
        report.check(name, room, text, f"features {text}")


def cache_bytes(config: TrainConfig, target: PretrainedConfig, workload: Workload) -> tuple[float, float]:
    """Bytes of all dialogues' states in an online run, and of those that ``data.disk_gb`` keeps."""
    assert config.data is not None
    dtype = "bfloat16" if config.data.target_dtype == "auto" else config.data.target_dtype
    whole = workload.tokens * token_bytes(target.hidden_size, len(config.taps), dtype)
    return whole, min(whole, 1e9 * (config.data.disk_gb or 0.0))


def add_time(
    report: Report, config: TrainConfig, task: Task, lengths: list[int], store: FeatureStore | None,
    workload: Workload, options: Namespace,
) -> None:  # fmt: skip
    """Add the hours of training and, without a store, of the target's pass over the data."""
    target, share = task.ends.config, workload.trained / workload.tokens
    every = workload.lengths or lengths[:1]
    rows = task.most_rows([round(share * length) for length in every])[1]
    whole, first = (training_cost(task, passes).of(every, rows) / sum(every) for passes in (None, 1))
    flops = config.one_pass_until * first + (1 - config.one_pass_until) * whole
    device: Any = options.device or resolve_device()
    peak = config.peak_tflops or peak_tflops(device)
    assumed = (peak or 0.0) * 1e12 * options.mfu * options.ranks  # FLOP/s
    if options.tokens_per_second:
        rate, how = options.tokens_per_second, "as given"
    elif options.measure and sum(report.memory.values()) <= free_memory(resolve_device()):
        rate = estimate.measured_rate(config, target, lengths, share) * options.ranks * whole / flops
        how = "measured here without DeepSpeed"
    elif peak:
        rate = assumed / flops
        how = f"assuming an MFU of {options.mfu:.0%} of {peak:g} TFLOP/s on {options.ranks} device(s)"
    else:
        why = "too little memory to measure it here" if options.measure else f"unknown on {device}"
        report.add("time", f"{why}: give --tokens-per-second, --measure, or --device (as H200)")
        return
    steps = workload.total_steps(config)
    tokens = round(steps / workload.steps * workload.tokens) if steps else None
    hours = [tokens / rate / 3600] if tokens else []
    hours += [config.minutes / 60] if config.minutes else []
    text = f"{_hours(min(hours))} of training at {rate:,.0f} tokens/s"
    report.add("time", f"{text} ({how}; {flops / 1e9:.2f} GFLOP a token)", f"{text} ({how})")
    if store is None and peak:
        width = target.num_attention_heads * head_sizes(target)[1]
        forward = 2 * estimate.target_parameters(target)[1] + 2 * width * lengths[0] * target.num_hidden_layers
        count, passes = workload.tokens, "one pass of the target over the data"
        if config.data is not None and tokens:  # again in every epoch, unless cached
            whole, cached = cache_bytes(config, target, workload)
            count = round(tokens - cached / whole * max(0, tokens - workload.tokens))
            passes = f"the target's pass over each of {count:,} tokens"
        text = _hours(count * forward / assumed / 3600)
        report.add("time: features", f"{text} of {passes}, at the same share of the peak", f"{text} for the features")


def served_text(method: str, options: dict[str, Any], target: PretrainedConfig) -> str:
    """The engines that can serve the trained drafter, and the reasons why others cannot."""
    reasons = served_by(method, options, target)
    able = [READERS[to] for to, reason in reasons.items() if reason is None]
    refused: dict[str, list[str]] = {}
    for to, reason in reasons.items():
        if reason is not None:
            refused.setdefault(reason, []).append(READERS[to])
    others = [f"not by {', '.join(readers)}: {reason}" for reason, readers in refused.items()]
    layer = f" (layer: {options['layer']})" if "layer" in options else ""
    return "; ".join([", ".join(["this toolkit", *able]) + layer, *others])


def _hours(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{60 * hours:,.1f} minutes"
