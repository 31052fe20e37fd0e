"""Every method on a real GPU: are its tokens the CPU's, are forwards captured, is the memory constant?

    python tests/gpu_exact.py --out exact.json

Also DFlash's attention of a training step, by flex_attention and by matrix products: outputs, gradients, time, memory;
and captured forwards of models that run on their own forward.

Tiny random models in float32. Greedy tokens are compared with the CPU's, sampled ones (whose random numbers no CPU
draws) with those of the same layers without graphs.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from conformance import prompt
from cuda_runs import GREEDY_ONLY, METHODS, PROMPTS, Decoded, Models, decode
from families import DECODED, build, captured, stock_tokens
from transformers import AutoConfig, AutoModelForCausalLM

from drafters import TargetModel, generate, make_drafter
from train.core.attention import Blocks, block_attention, flex_block_attention

OWN = ("glm4", "gemma3_text", "cohere2", "granite", "gpt2", "youtu")  # dense, with every kind of mask
GLM = {"hidden_size": 4096, "intermediate_size": 13696, "num_attention_heads": 32, "num_key_value_heads": 2}
GLM |= {"head_dim": 128, "vocab_size": 151_552, "num_hidden_layers": 8}  # of GLM-4-9B's 40 layers


def compare(new_tokens: int) -> list[dict[str, Any]]:
    """A row for each method and temperature."""
    rows = []
    once = partial(decode, prompts=[[ids] for ids in PROMPTS], new_tokens=new_tokens)
    plain, fused, graphs = Models("cpu", "fused"), Models("cuda", "fused"), Models("cuda", "graphs")
    for method in METHODS:
        for temperature in (0.0,) if method in GREEDY_ONLY else (0.0, 1.0):
            row: dict[str, Any] = {"method": method, "temperature": temperature}
            try:
                expected = once(method, fused if temperature else plain, temperature)
                found = once(method, graphs, temperature)
                row |= {"same": found.tokens == expected.tokens, "accepted": sum(found.accepted)}
            except Exception as error:  # the others are to be seen, too
                row |= {"same": False, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            rows.append(row)
    return rows


def steady(new_tokens: int) -> dict[str, Any]:
    """What was captured for an EAGLE tree; the allocator's segments before and after a prompt in the steady state."""
    models = Models("cuda", "graphs")
    target, once = models.target("eagle static"), partial(decode, "eagle static", models, 0.0, new_tokens=new_tokens)

    def segments() -> int:
        return int(torch.cuda.memory_stats()["segment.all.allocated"])

    for _ in range(2):
        once(prompts=[PROMPTS[:1]])
    before = segments()
    again: Decoded = once(prompts=[PROMPTS[:1]])
    return {
        "captured": sum(len(part.captured) for part in target._parts.values()),
        "uncaptured": [part.uncaptured for part in target._parts.values()],
        "segments_before": before,
        "segments_after": segments(),
        "tokens": len(again.tokens[0]),
    }


def blocks(
    heads: int = 32, kv_heads: int = 8, width: int = 128, lengths: Sequence[int] = (1024, 700, 300)
) -> dict[str, Any]:
    """The attention of DFlash's blocks (Qwen3-8B's heads, bf16): how far flex_attention is from products in float32, of
    the largest value; seconds of a forward and backward pass, and peak memory in GB."""
    size = 16
    anchors = [list(range(9, length, 4)) for length in lengths]
    tokens, rows = sum(lengths), size * sum(map(len, anchors))
    shapes = [(1, heads, rows, width), *[(1, kv_heads, tokens + rows, width)] * 2]
    torch.manual_seed(0)
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    weight = torch.randn(1, rows, heads, width, device="cuda")
    module: Any = SimpleNamespace(training=True)

    def step(attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        output = attend(module, *given, Blocks([*lengths], anchors, size), scaling=width**-0.5)
        return [output.detach(), *torch.autograd.grad((output * weight).sum(), given)]

    def cost(attend: Callable[..., torch.Tensor]) -> dict[str, float]:
        step(attend)
        torch.cuda.reset_peak_memory_stats()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            step(attend)
        end.record()
        torch.cuda.synchronize()
        return {"seconds": begin.elapsed_time(end) / 5000, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}

    pairs = zip(step(flex_block_attention), step(block_attention), strict=True)
    apart = [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]
    return {"apart": apart, "flex": cost(flex_block_attention), "products": cost(block_attention)}


def own_forwards(new_tokens: int, sizes: dict[str, int] = GLM) -> dict[str, Any]:
    """Captured forwards of models that are not rewritten.

    Returns:
        What is wrong with ``OWN``, by family; tokens/s of plain decoding with ``sizes``, by engine.
    """
    texts, wrong, speeds = [prompt(12)], dict[str, str](), dict[str, float]()
    for family in OWN:
        try:
            expected = stock_tokens(build(family, DECODED[family]), texts, new_tokens)
            if not captured(family, texts, new_tokens, expected):
                wrong[family] = "not captured"
        except Exception as error:  # the others are to be seen, too
            wrong[family] = f"{type(error).__name__}: {str(error)[:200]}"
    with torch.device("cuda"):
        config = AutoConfig.for_model("glm4", **sizes, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    engines: list[Any] = ["stock", "graphs"]
    for engine in engines:
        target, seconds = TargetModel(model, engine=engine, name="glm4"), []
        for _ in range(4):  # the first one captures
            began = time.perf_counter()
            generate(target, make_drafter("autoregressive", target), texts, max_new_tokens=new_tokens, eos_token_id=[])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        speeds[engine] = new_tokens / statistics.median(seconds[1:])
    return {"wrong": wrong, "tokens_per_second": speeds}


def main(argv: list[str] | None = None) -> None:
    """Compare, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--new-tokens", type=int, default=24)
    given = parser.parse_args(argv)
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": compare(given.new_tokens)}
    found["steady"], found["blocks"] = steady(given.new_tokens), blocks()
    found["own"] = own_forwards(given.new_tokens)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    wrong = [f"{row['method']} at {row['temperature']:g}" for row in found["rows"] if not row["same"]]
    parts = "; ".join(str(found[part]) for part in ("steady", "blocks", "own"))
    print(f"{len(found['rows'])} runs; other tokens: {', '.join(wrong) or 'none'}; {parts}")


if __name__ == "__main__":
    main()
