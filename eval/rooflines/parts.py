"""Targets with random weights, and the measurements of eval.roofline, one function each."""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig, LlamaConfig, PretrainedConfig

from drafters import Drafter, TargetModel, generate, make_drafter
from drafters.common.wording import first_line
from drafters.config import Engine, Quantization
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.methods.eagle import EagleDrafter, EagleHead, EagleOptions
from drafters.methods.kangaroo import KangarooDrafter, KangarooOptions
from drafters.methods.replay import ReplayDrafter
from drafters.model.backend import most_likely
from drafters.model.cache import cache_bytes
from drafters.model.files import load_config_only, resolve_device, resolve_dtype
from drafters.model.loading import check_memory
from eval.configs import RooflineConfig
from eval.rooflines.shapes import FOLDER, LLAMAS, PUBLISHED, SIZES, check_shape

COPIED = {"cuda": 2 << 30, "cpu": 256 << 20}  # bytes; larger than every cache
NO_EOS: list[int] = []
# EAGLE, Table 1 (Vicuna-7B, MT-bench, greedy): n-alpha of a chain, and tau of its tree.
EAGLE_PROFILE, EAGLE_TAU = [0.79, 0.74, 0.72, 0.73, 0.67], 3.94
KANGAROO_PROFILE, KANGAROO_TAU = [0.6], 2.0


def shape_config(shape: str, max_positions: int) -> PretrainedConfig:
    """Return the configuration of a named shape; ValueError with the known ones if there is none."""
    check_shape(shape)
    if shape in PUBLISHED:
        config = load_config_only(str(FOLDER / f"{PUBLISHED[shape]}.json"), may_be_file=True)
        config.max_position_embeddings = max_positions
        return config
    sizes = dict(zip(SIZES, LLAMAS[shape], strict=True))
    return LlamaConfig(**sizes, max_position_embeddings=max_positions, tie_word_embeddings=False)


def random_target(
    shape: str,
    max_positions: int,
    dtype: str,
    device: str | None = None,
    engine: Engine | None = None,
    quantize: Quantization | None = None,
    seed: int = 0,
    cache_tokens: tuple[int, int] = (0, 0),
) -> TargetModel:
    """Return a target of a named shape, made on the device; ``cache_tokens`` as in ``TargetModel.from_pretrained``."""
    where = resolve_device(device)
    config, kind = shape_config(shape, max_positions), resolve_dtype(dtype, where)
    check_memory(shape, config, kind, [where], *cache_tokens)
    torch.manual_seed(seed)
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(
            config, dtype=kind, attn_implementation="sdpa", trust_remote_code=False
        )
    return TargetModel(model, name=f"{shape} (random weights)", engine=engine, quantize=quantize)


def copy_bandwidth(device: torch.device, tries: int = 9) -> float:
    """Return the bytes per second that a large copy reads and writes, median of ``tries``."""
    source = torch.ones(COPIED.get(device.type, COPIED["cpu"]) // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device, tries)


def read_bandwidth(device: torch.device, tries: int = 9) -> float:
    """Return the bytes per second that a large sum reads with all threads, median of ``tries``."""
    source = torch.ones(COPIED.get(device.type, COPIED["cpu"]) // 4, device=device)
    return source.nbytes / _median_seconds(source.sum, device, tries)


def _median_seconds(run: Callable[[], object], device: torch.device, tries: int) -> float:
    taken = []
    for index in range(tries + 2):
        start = time.perf_counter()
        run()
        wait(device)
        if index >= 2:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def bytes_per_step(target: TargetModel, context: int) -> dict[str, int]:
    """Return the bytes of weights and cache that decoding one token must read."""
    return {"weights": target.bytes_read(), "cache": cache_bytes(target.runner.shapes(), 1, context, target.dtype)}


def verification_seconds(
    target: TargetModel, context: int, rows: list[int], rounds: int, seed: int
) -> list[dict[str, Any]]:
    """Return the seconds of a forward over each number of rows, with LM head and argmax; sizes alternate."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(target.vocab_size, (1, context + max(rows)), generator=generator).to(target.device)
    cache = target.new_cache(1, context + max(rows))
    target.run(ids[:, :context], cache)
    cache.commit_first([context])

    def forwards(count: int, size: int) -> float:
        wait(target.device)
        start = time.perf_counter()
        for _ in range(count):
            most_likely(target.lm_head(target.run(ids[:, context : context + size], cache).features))
        wait(target.device)
        return (time.perf_counter() - start) / count

    taken: dict[int, list[float]] = {}
    count = {size: max(3, min(50, int(0.5 / forwards(2, size)))) for size in rows}
    shuffle = random.Random(seed)
    for _ in range(max(rounds, 3)):
        for size in shuffle.sample(rows, len(rows)):
            taken.setdefault(size, []).append(forwards(count[size], size))
    return [{"rows": size, "seconds": statistics.median(taken[size])} for size in rows]


def scaled(profile: list[float], depth: int, tau: float) -> list[float]:
    """Return ``profile`` with all rates raised to one power, so that drafts of ``depth`` have this tau."""

    def tau_of(power: float) -> float:
        total, reach = 1.0, 1.0
        for level in range(depth):
            reach *= profile[min(level, len(profile) - 1)] ** power
            total += reach
        return total

    low, high = 1e-6, 64.0
    if not tau_of(high) <= tau <= tau_of(low):
        raise ValueError(
            f"no power of the profile {profile} gives tau {tau} at draft depth {depth}: give a tau between "
            f"{tau_of(high):.2f} and {tau_of(low):.2f}, or rates above 0"
        )
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tau_of(middle) > tau else (low, middle)
    return [rate**low for rate in profile]


def methods(target: TargetModel, config: RooflineConfig) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the timed methods by name; each call decodes once and returns its figures."""
    generator = torch.Generator().manual_seed(config.seed)
    longest, new = max(config.batches), config.new_tokens
    prompts = torch.randint(target.vocab_size, (longest, config.context), generator=generator).tolist()
    torch.manual_seed(config.seed)
    head = EagleHead(target.config)
    chain = EagleDrafter(target, head, EagleOptions(tree="chain"))
    static = EagleDrafter(target, head, EagleOptions(tree="static"))
    profile = scaled(EAGLE_PROFILE, 5, EAGLE_TAU)
    ours = {  # no dynamic tree: its shape depends on confidences, and those of an untrained head are all equal
        "plain decoding": make_drafter("autoregressive", target),
        "EAGLE chain, replay": ReplayDrafter.from_options(target, inner=chain, profile=EAGLE_PROFILE),
        "EAGLE static tree, replay": ReplayDrafter.from_options(target, inner=static, profile=profile),
    }
    timed: dict[str, Callable[[], dict[str, Any]]] = {}
    for batch in config.batches:
        label = f", batch {batch}" if batch > 1 else ""
        for name, drafter in ours.items():
            timed[f"{name}{label}"] = partial(_ours, target, drafter, prompts[:batch], new)
    if config.exit_layer < target.num_layers:
        module = KangarooAdapter(target.config, KangarooShape(exit_layer=config.exit_layer))
        adapter = KangarooDrafter(target, module, KangarooOptions(eta=0.0, max_draft_tokens=4))
        rates = scaled(KANGAROO_PROFILE, 4, KANGAROO_TAU)
        replayed = ReplayDrafter.from_options(target, inner=adapter, profile=rates)
        timed[f"Kangaroo, exit {config.exit_layer}, replay"] = partial(_ours, target, replayed, prompts[:1], new)
    if config.stock and config.quantize is None:  # quantising replaces the stock layers' weights
        timed["stock generate"] = partial(_stock, target, prompts[0], new, False)
        if config.compiled or (config.compiled is None and target.device.type == "cuda"):
            timed["stock generate, compiled static cache"] = partial(_stock, target, prompts[0], new, True)
    return timed


def _ours(target: TargetModel, drafter: Drafter, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    trace = generate(target, drafter, prompts, max_new_tokens=new_tokens, eos_token_id=NO_EOS).trace
    steps = len(trace.verify_seconds)
    return {
        "batch": len(prompts),
        "tau": trace.tau,
        "tokens_per_second": trace.decoded_tokens / trace.decode_seconds,
        "step_seconds": trace.decode_seconds / steps,
        "draft_seconds": sum(trace.draft_seconds) / steps,
        "verify_seconds": sum(trace.verify_seconds) / steps,
        "other_seconds": sum(trace.other_seconds) / steps,
        "forward_seconds": sum(trace.model_seconds) / steps,
        "overhead": trace.overhead,
        "prefill_seconds": trace.prefill_seconds,
    }


def _stock(target: TargetModel, ids: list[int], new_tokens: int, compiled: bool) -> dict[str, Any]:
    """Time transformers' own decoding of the same tokens, minus a run of one token for its prefill."""
    prompt = torch.tensor([ids], device=target.device)
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if compiled:
        compiling = CompileConfig()
        compiling._compile_all_devices = True  # else a CPU is left out
        settings |= {"cache_implementation": "static", "compile_config": compiling}

    def seconds(count: int) -> float:
        wait(target.device)
        start = time.perf_counter()
        # Both runs need the same cache size, else each is recompiled.
        options = GenerationConfig(max_new_tokens=count, min_new_tokens=count, **settings)
        target.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=options)
        wait(target.device)
        return time.perf_counter() - start

    try:
        both = seconds(1), seconds(new_tokens)
    except Exception as error:  # a missing or failing compiler must not lose the other figures
        return {"batch": 1, "missing": f"{type(error).__name__}: {first_line(error)[:100]}"}
    return {"batch": 1, "tokens_per_second": (new_tokens - 1) / (both[1] - both[0])}


def add_ratios(rows: list[dict[str, Any]], floor: float) -> list[dict[str, Any]]:
    """Add the speedup over plain decoding of the same batch, and the shares of roofline and formula's limit."""
    plain = {row["batch"]: row for row in rows if row["method"].startswith("plain decoding")}
    for row in rows:
        base = plain[row["batch"]]
        if "tokens_per_second" not in row:
            continue
        row["speedup"] = row["tokens_per_second"] / base["tokens_per_second"]
        if "forward_seconds" in row and row is not base:
            limit = row["tau"] * base["forward_seconds"] / row["forward_seconds"]
            row |= {"limit": limit, "limit_share": row["speedup"] / limit}
        if row["batch"] == 1 and "replay" not in row["method"]:
            row["roofline_share"] = floor * row["tokens_per_second"]
    return rows


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
