"""Does eval.compare find no change between two runs of the same thing, and a slowdown of 5% if there is one?

    python tests/compare_runs.py --out runs/compare-runs [--runs 21]

On the target that ships here, in real time: the same speed test again and again, each run compared with the one before,
and as many in which prompt lookup takes 5% longer for every step, each compared with the run beside it.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from drafters.common.files import replace_json
from drafters.common.machine import machine

DRAFTERS = [
    {"drafter": "autoregressive"},
    {"drafter": "prompt_lookup", "gamma": 4},
    {"drafter": "eagle", "checkpoint": "checkpoints/stdlib-eagle", "tree": "chain", "depth": 3},
]
CONFIG: dict[str, Any] = {
    "target": {"path": "checkpoints/stdlib-target"}, "drafters": DRAFTERS, "max_new_tokens": 64, "rounds": 3,
    "prompts": {"file": "runs/stdlib/heldout.jsonl", "count": 24, "seed": 3}, "temperatures": [0.0], "warmup": 2,
    "stock_generate": False,
}  # fmt: skip
SLOWER = """
import time
from drafters.methods.prompt_lookup import PromptLookupDrafter as One
last, begin, propose = [0.0], One.begin, One.propose

def slowed(self, state):
    now = time.perf_counter()
    while last[0] and time.perf_counter() < now + 0.05 * (now - last[0]):
        pass
    last[0] = time.perf_counter()
    return propose(self, state)

def begun(self, *given):
    last[0] = 0.0
    return begin(self, *given)

One.propose, One.begin = slowed, begun
"""
PROGRAM = "import sys; {0}; from eval.speed import main; main(sys.argv[1:])"


def measured(config: Path, out: Path, slower: bool) -> Path:
    """A speed test in a process of its own."""
    if not (out / "report.json").is_file():
        code = PROGRAM.format(f"exec({SLOWER!r})" if slower else "pass")
        line = [sys.executable, "-c", code, "--config", str(config), f"out={out}"]
        subprocess.run(line, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return out


Pair = tuple[dict[str, str], dict[str, float]]


def compared(a: Path, b: Path, out: Path) -> Pair:
    """The figures that differ significantly, with their ratios; and the ratios of all."""
    line = [sys.executable, "-m", "eval.compare", str(a), str(b), "--out", str(out)]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)
    rows = json.loads((out / "compare.json").read_text())["rows"]
    ratios = {f"{row['drafter']}, {row['figure']}": round(row["ratio"], 4) for row in rows}
    return {name: f"{ratios[name]:.3f}" for name, row in zip(ratios, rows, strict=True) if row["significant"]}, ratios


def spread(ratios: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure's ratios from run to run the standard deviation of the logarithm, by the median of how far it is
    off 0: in some pairs the machine changed its speed on the way."""
    names = ratios[0] if ratios else {}
    return {name: round(1.4826 * median(abs(math.log(each[name])) for each in ratios), 4) for name in names}


def main() -> None:
    """Measure and compare; goes on where it stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--runs", type=int, default=21, help="of the same thing; every second one is followed by a slowed one"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    config = given.out / "config.json"
    config.write_text(json.dumps(CONFIG))
    same: list[Pair] = []
    slowed: list[Pair] = []
    for number in range(given.runs):
        here = measured(config, given.out / f"same-{number}", slower=False)
        if number:
            same.append(compared(given.out / f"same-{number - 1}", here, given.out / f"pair-{number}"))
        if number % 2:
            other = measured(config, given.out / f"slower-{number}", slower=True)
            slowed.append(compared(here, other, given.out / f"slower-pair-{number}"))
        found = [pair for pair, _ in slowed if any(name.startswith("prompt_lookup, ") for name in pair)]
        result = {
            "pairs": len(same),
            "pairs without a difference": sum(not pair for pair, _ in same),
            "slowed": len(slowed),
            "slowed and found": len(found),
            "differences": [pair for pair, _ in same],
            "differences where slowed": [pair for pair, _ in slowed],
            "ratios": [ratios for _, ratios in same],
            "spread": spread([ratios for _, ratios in same]),
            "ratios where slowed": [ratios for _, ratios in slowed],
            "config": CONFIG,
            "environment": machine(torch.device("cpu")),
        }
        replace_json(given.out / "compare-runs.json", result)
        print(f"{number}: {[pair for pair, _ in same[-1:]]} {[pair for pair, _ in slowed[-1:]]}", flush=True)


if __name__ == "__main__":
    main()
