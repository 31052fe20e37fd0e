"""Cost of undoing a rejected part of a chain, by the kind of running state.

    python tests/undo_costs.py              # prints the table
    python tests/undo_costs.py FILE         # and writes it as JSON

Models of 4 layers, hidden 1,024, random weights in float32, with head shapes as in released configs. A step is a pass over
6 tokens (a chain of 5 drafted ones) and its commit. Steps that keep all 6 tokens and steps that keep fewer alternate;
the figure is the median of the ratios of neighbours.
"""

import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from families import build

from drafters import TargetModel

CHAIN, CONTEXT, ROUNDS = 5, 64, 40
SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "head_dim": 128}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 4096, "num_hidden_layers": 4, "initializer_range": 0.02}
LINEAR = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
DELTA = {"linear_num_value_heads": 16, "linear_num_key_heads": 16, "linear_key_head_dim": 128}
DELTA |= {"linear_value_head_dim": 128, "layer_types": LINEAR}
MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_chunk_size": 256}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated DeltaNet": ("qwen3_5_text", DELTA),
    "Mamba 2": ("bamba", MAMBA | {"attn_layer_indices": [3]}),
    "Mamba 1": ("mamba", {"state_size": 16, "intermediate_size": 2048, "time_step_rank": 64}),
    "convolution": ("lfm2", {"layer_types": ["conv", "conv", "conv", "full_attention"]}),
    "lightning attention": ("minimax", {"layer_types": LINEAR, "num_local_experts": 2}),
}


def main():
    torch.set_num_threads(1)
    for kind, (family, changes) in KINDS.items():
        target = TargetModel(build(family, SIZES | changes), name=family)
        ids = torch.randint(3, 4096, (1, CONTEXT + 4000))
        cache = target.new_cache(1, CONTEXT + 4000)
        cache.expect([CONTEXT])
        target.run(ids[:, :CONTEXT], cache)
        cache.commit_first([CONTEXT])

        def step(n, kept, whole=False):
            at = cache.lengths[0]
            t = time.perf_counter()
            if whole:
                cache.expect([n])
            target.lm_head(target.run(ids[:, at : at + n], cache).features)
            cache.commit_first([kept])
            return time.perf_counter() - t

        for _ in range(2):
            step(6, 3)
            step(6, 6, True)
            step(1, 1)
        R = {k: [] for k in ("undo/whole", "whole/one", "undo/one", "kept3/kept6")}
        T = []
        for i in range(12):
            o = step(1, 1)
            u = step(6, 3)
            w = step(6, 6, True)
            u6 = step(6, 6)
            R["undo/whole"].append(u / w)
            R["whole/one"].append(w / o)
            R["undo/one"].append(u / o)
            R["kept3/kept6"].append(u / u6)
            T.append(o)
        print(
            kind,
            {k: round(statistics.median(v), 2) for k, v in R.items()},
            round(1e3 * statistics.median(T)),
            sum(p.numel() for p in target.model.parameters()),
            flush=True,
        )


import logging

logging.disable(logging.WARNING)
with torch.inference_mode():
    main()
