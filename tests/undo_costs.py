"""Cost of a chain that can be taken back on targets with a running state, by the kind of state.

    python tests/undo_costs.py          # prints the table; with a JSON file as argument, also puts it in there

Models of 4 layers with hidden size 1,024 and random weights, float32, one thread. Steps of 6 tokens (a chain of 5)
alternate: one keeps 3 tokens, one keeps all, and of one the tokens were announced: it reads them in one pass, and none
can be taken back. The other way to undo is such a pass, and the 3 tokens through the linear layers once more: its time
is the sum of both. A figure is the median of the ratios of neighbours.
"""

import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from families import build

from drafters import TargetModel
from drafters.common.files import replace_text
from drafters.common.machine import hardware
from drafters.model.running import RunningCache

CHAIN, KEPT, CONTEXT, ROUNDS = 5, 3, 64, 20
SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "head_dim": 128}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 4096, "num_hidden_layers": 4, "initializer_range": 0.02}
LINEAR = {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}
DELTA = {"linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128}
MAMBA2 = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_chunk_size": 256}
CONV = {"layer_types": ["conv", "conv", "conv", "full_attention"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated DeltaNet": ("qwen3_5_text", DELTA | LINEAR | {"linear_value_head_dim": 128}),
    "Mamba 2": ("bamba", MAMBA2 | {"attn_layer_indices": [3]}),
    "Mamba 1": ("mamba", {"state_size": 16, "intermediate_size": 2048, "time_step_rank": 64}),
    "convolution": ("lfm2", CONV),
    "lightning attention": ("minimax", LINEAR | {"num_local_experts": 2}),
}


@torch.inference_mode()
def measure(family: str, changes: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of a family."""
    target = TargetModel(build(family, SIZES | changes), name=family)
    ids = torch.randint(3, target.vocab_size, (1, CONTEXT + 9 * (CHAIN + 1) * (ROUNDS + 3)))
    cache = target.new_cache(1, ids.shape[1])
    cache.expect([CONTEXT])
    target.run(ids[:, :CONTEXT], cache)
    cache.commit_first([CONTEXT])

    def linear_seconds() -> float:
        """Seconds of the linear layers in one pass over the tokens that are kept."""
        run, spent = RunningCache.run, 0.0

        def timed(*arguments: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            result = run(*arguments)
            spent += time.perf_counter() - start
            return result

        RunningCache.run = timed  # type: ignore[method-assign]
        step(KEPT, KEPT, announced=True)
        RunningCache.run = run  # type: ignore[method-assign]
        return spent

    def step(tokens: int, kept: int, announced: bool = False) -> float:
        begin, start = cache.lengths[0], time.perf_counter()
        if announced:
            cache.expect([tokens])
        target.lm_head(target.run(ids[:, begin : begin + tokens], cache).features)
        cache.commit_first([kept])
        return time.perf_counter() - start

    rounds = []
    for _ in range(ROUNDS + 2):
        whole, part = step(CHAIN + 1, CHAIN + 1, announced=True), step(CHAIN + 1, KEPT)
        again = whole + linear_seconds()
        rounds.append((part / whole, part / step(CHAIN + 1, CHAIN + 1), part / step(1, 1), again / whole))
    names = ("to_one_pass", "to_keeping_all", "to_one_token", "running_again_to_one_pass")
    return {name: statistics.median(values) for name, values in zip(names, zip(*rounds[2:], strict=True), strict=True)}


def main() -> None:
    """Measure all kinds."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kinds = {}
    for kind, (family, changes) in KINDS.items():
        kinds[kind] = {"family": family, **measure(family, changes)}
        print(f"| {kind} | {family} |", *(f"{kinds[kind][name]:.2f} |" for name in list(kinds[kind])[1:]), flush=True)
    if sys.argv[1:]:
        file = Path(sys.argv[1])
        settings = {"chain": CHAIN, "kept": KEPT, "hidden_size": 1024, "layers": 4, "dtype": "float32", "threads": 1}
        settings |= {"torch": str(torch.__version__), "command": f"python {' '.join(sys.argv)}"}
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        settings |= hardware(torch.device("cpu")) | {"kinds": kinds}
        replace_text(file, json.dumps(known | {"undo_costs": settings}, indent=1) + "\n")


if __name__ == "__main__":
    main()
