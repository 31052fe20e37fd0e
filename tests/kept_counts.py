"""What acceptance counts of earlier prompts would be worth to ``auto``, if they were kept from call to call.

    python tests/kept_counts.py --out docs/results/2-core-cpu/kept-counts.json

It decodes held-out prompts of ``runs/stdlib`` with the drafters that ship here: once as they are, and once with
policies that keep their counts and have learned from five tuning prompts before. Speeds are tokens over the step times
that the policy expects, on a machine where rows cost little: a loaded clock plays no role.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rigged import goes_by
from transformers import AutoTokenizer

from drafters import Drafter, TargetModel, generate, load_drafter, make_drafter
from drafters.common.machine import machine
from drafters.policy.costs import Curve
from drafters.policy.shape import Costs
from eval.prompts.prompt_files import detect_format, read_prompts
from eval.prompts.prompts import render

TARGET, TEXTS, NEW, SEEDS = Path("checkpoints/stdlib-target"), Path("runs/stdlib"), 128, 3
REST = Curve((1, 2), (1.0, 1.01))  # a row costs a hundredth of a plain step
HEAD, BLOCK = Costs(REST, 0.1, 0.07, 0.002), Costs(REST, 0.12, 0.005, 0.01)


def made(name: str, target: TargetModel, keeps: bool) -> tuple[Drafter, Any]:
    """A drafter and the policy that counts its steps; ``keeps``: its policies go on from call to call."""
    checkpoints = {"eagle": "stdlib-eagle", "dspark": "stdlib-dspark", "hybrid": "stdlib-eagle"}
    head = load_drafter(str(TARGET.with_name(checkpoints[name])), target) if name in checkpoints else None
    if name == "prompt_lookup":
        drafter = goes_by(make_drafter(name, target, gamma="auto"), HEAD)
    else:
        drafter = goes_by(head, BLOCK if name == "dspark" else HEAD)
    if name == "hybrid":
        drafter = goes_by(make_drafter(name, target, head=drafter), HEAD)
    for one in (drafter, *drafter.parts):
        if keeps and one.policy is not None:
            one.policy.begin = lambda: None
    return drafter, drafter.policy


def speed(name: str, target: TargetModel, keeps: bool, temperature: float, seed: int) -> float:
    """Tokens per plain step over the held-out prompts."""
    drafter, policy = made(name, target, keeps)
    prompts = [*(_prompts("tune")[:5] if keeps else []), *_prompts("heldout")[:20]]
    tokens = before = 0.0
    for number, ids in enumerate(prompts):
        if number == len(prompts) - 20:
            tokens, before = 0.0, 0.0 if policy.expected() is None else policy.expected().plain_steps
        options: dict[str, Any] = {"temperature": temperature, "seed": 100 * seed + number, "eos_token_id": []}
        tokens += generate(target, drafter, [ids], max_new_tokens=NEW, **options).trace.decoded_tokens
    return tokens / (policy.expected().plain_steps - before)


def _prompts(part: str) -> list[list[int]]:
    file, tokenizer = TEXTS / f"{part}.jsonl", AutoTokenizer.from_pretrained(TARGET)
    return [render(tokenizer, one.messages) for one in read_prompts(file, detect_format(file), Counter())]


def main() -> None:
    """Measure what is not in the JSON yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="goes on where it stopped")
    out = parser.parse_args().out
    found: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    target = TargetModel.from_pretrained(str(TARGET), dtype="float32", device="cpu")
    for name in ("eagle", "dspark", "prompt_lookup", "hybrid"):
        for temperature in (0.0, 0.8):
            if (key := f"{name}, temperature {temperature:g}") in found:
                continue
            seeds = range(SEEDS if temperature else 1)
            pairs = [[speed(name, target, keeps, temperature, seed) for keeps in (False, True)] for seed in seeds]
            gains = [kept / anew - 1 for anew, kept in pairs]
            error = stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else None
            found[key] = {"anew, kept": pairs, "gain of keeping": mean(gains), "standard error": error}
            found["environment"] = machine(torch.device("cpu"))
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{key}: {found[key]}", flush=True)


if __name__ == "__main__":
    main()
