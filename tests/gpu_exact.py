"""Every method on a real GPU: are its tokens the CPU's, are forwards captured, is the memory constant?

    python tests/gpu_exact.py --out exact.json

Tiny random models in float32. Greedy tokens are compared with the CPU's, sampled ones (whose random numbers no CPU
draws) with those of the same layers without graphs.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda_runs import GREEDY_ONLY, METHODS, PROMPTS, Decoded, Models, decode


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
    runner: Any = target.runner
    return {
        "captured": sum(len(part.captured) for part in target._parts.values()),
        "broken": runner.broken,
        "segments_before": before,
        "segments_after": segments(),
        "tokens": len(again.tokens[0]),
    }


def main(argv: list[str] | None = None) -> None:
    """Compare, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--new-tokens", type=int, default=24)
    given = parser.parse_args(argv)
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": compare(given.new_tokens)}
    found["steady"] = steady(given.new_tokens)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    wrong = [f"{row['method']} at {row['temperature']:g}" for row in found["rows"] if not row["same"]]
    print(f"{len(found['rows'])} runs; other tokens: {', '.join(wrong) or 'none'}; {found['steady']}")


if __name__ == "__main__":
    main()
