"""Quantised targets on a GPU: are they loaded and captured, and how fast and large are they beside bf16?

    python tests/gpu_quantised.py --out quantised.json [--folder runs/gpu] [hidden_size=64 ...]

Random weights in the shape of Llama-3.2-1B, in FP8 as Qwen3-FP8 is published, and in FP8 and W4A16 of llm-compressor.
Plain decoding of one sequence; logits are compared with those of transformers' forward over the same weights.
"""

import argparse
import gc
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import quantised_folders
import torch
from conformance import prompt
from gpu_target import write_target
from transformers import AutoConfig

from drafters import TargetModel, generate, make_drafter
from drafters.model.quantised import WITH_KERNELS, quantisation

SHAPE = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 2048,
}  # fmt: skip
KINDS: dict[str, Callable[[Path], None] | None] = {
    "bf16": None,
    "fp8": quantised_folders.fp8,
    "compressed fp8": quantised_folders.compressed_fp8,
    "compressed w4a16": quantised_folders.compressed_w4a16,
}
CONTEXT = 256  # tokens of the prompt


def measure(path: Path, new_tokens: int, rounds: int = 3) -> dict[str, Any]:
    """Load a target and decode with it; raises ValueError if its weights would not stay quantised."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = AutoConfig.from_pretrained(path)
    if device == "cuda" and quantisation(config) in WITH_KERNELS and find_spec("kernels") is None:
        raise ValueError("needs the package kernels, without which its weights become bf16")
    target = TargetModel.from_pretrained(str(path), "bfloat16", device)
    ids = torch.tensor([prompt(CONTEXT)], device=target.device)
    with torch.no_grad():
        stock = target.model(ids).logits[0].float()
        ours = target.lm_head(target.features(ids).features)[0].float()
    drafter, seconds = make_drafter("autoregressive", target), []
    for _ in range(rounds + 1):  # the first one captures graphs
        began = time.perf_counter()
        generate(target, drafter, ids, max_new_tokens=new_tokens, eos_token_id=[])
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return {
        "engine": target.engine,
        "captured": sum(len(part.captured) for part in target._parts.values()) if target.engine == "graphs" else 0,
        "tokens_per_second": new_tokens / statistics.median(seconds[1:]),
        "apart": float((ours - stock).abs().max() / stock.abs().max()),
        "memory_gb": torch.cuda.memory_allocated() / 1e9 if device == "cuda" else None,
    }


def main(argv: list[str] | None = None) -> None:
    """Measure every kind, and write the JSON; a kind that cannot be loaded has its error instead of figures.

    If all quantised kinds have errors, the program ends with status 1.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--folder", type=Path, default=Path("runs/gpu"), help="folder of the targets")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("changes", nargs="*", metavar="key=value", help="other sizes")
    given = parser.parse_args(argv)
    changes = {key: int(value) for key, _, value in (each.partition("=") for each in given.changes)}
    given.folder.mkdir(parents=True, exist_ok=True)
    shape = given.folder / "quantised-shape.json"
    shape.write_text(json.dumps(SHAPE))
    write_target(shape, given.folder / "bf16", changes)
    rows: dict[str, Any] = {}
    for name, quantise in KINDS.items():
        try:
            path = given.folder / name.replace(" ", "-")
            if quantise is not None:
                shutil.copytree(given.folder / "bf16", path, dirs_exist_ok=True)
                quantise(path)
            rows[name] = measure(path, given.new_tokens)
        except Exception as error:  # the others are to be seen, too
            rows[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
        gc.collect()
        torch.cuda.empty_cache()
        print(name, rows[name], flush=True)
    facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}
    given.out.write_text(json.dumps(facts | {"kinds": rows}, indent=1) + "\n", encoding="utf-8")
    errors = [f"{name}: {row['error']}" for name, row in rows.items() if "error" in row and name != "bf16"]
    if len(errors) == len(KINDS) - 1:
        sys.exit(f"error: no quantised target was measured: {'; '.join(errors)}")


if __name__ == "__main__":
    main()
