"""The forward of block drafters, written from its description: DFlash (section 3.1), DSpark (sections 3.1 and 3.2) and
DFlash2 (its technical blog).

No cache, no engine, no module: whole sequences, one block at a time.
"""

import math
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def rms(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps) * weight


def turned(heads: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE of ``[T, heads, D]`` at ``positions [T]``, in two halves."""
    width = heads.shape[-1]
    angles = positions[:, None, None] * theta ** (-torch.arange(0, width, 2) / width)  # [T, 1, D / 2]
    first, second = heads.chunk(2, dim=-1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def sees(shape: Any, layer: int, context: int, rows: int) -> Tensor:
    """Bool ``[rows, context + rows]``: what row j of a block with the anchor a = ``context`` attends to in a layer.

    Of a sliding layer with a window of W: the token at p if a + j - p < W (z-lab, vLLM), or for the edge "anchor" if
    a - W <= p (speculators). Inside the block all rows, or those up to j.
    """
    see = torch.zeros(rows, context + rows, dtype=torch.bool)
    sliding = shape.sliding_window is not None and layer not in shape.full_layers
    causal = sliding if shape.causal == "sliding" else shape.causal
    for j in range(rows):
        for p in range(context):
            near = context - p <= shape.sliding_window if shape.window_edge == "anchor" else True
            if shape.window_edge == "slot" and sliding:
                near = context + j - p < shape.sliding_window
            see[j, p] = near or not sliding
        for k in range(rows):
            see[j, context + k] = k <= j or not causal
    return see


def convolved(own: Weights, name: str, side: int, inputs: Tensor, rows: Tensor) -> Tensor:
    """``rows [T, H]`` by the kernels that ``inputs [T, H]`` give for a side: 0 before the sublayer, 1 behind it."""
    base = own[f"{name}.base_kernel"]
    taps, width = base.shape[1:]
    dynamic = (inputs @ own[f"{name}.kernel_projection.weight"].T).view(len(rows), 2, taps, -1)
    groups = torch.arange(width) * dynamic.shape[-1] // width
    kernels = base[side] + dynamic[:, side][..., groups]  # [T, taps, H]
    return torch.stack([sum(kernels[i, t] * rows[i - t] for t in range(min(taps, i + 1))) for i in range(len(rows))])


def block_states(weights: Weights, config: Any, states: Tensor, block: Tensor, shape: Any = None) -> Tensor:
    """States ``[T, H]`` of a block's rows, for the LM head.

    Args:
        states: ``[C, taps * H]``, the target's, of all tokens before the anchor. block: ``[T, H]`` embeddings.
        shape: the head's; None: all rows see everything.
    """
    eps, context, rows = config.rms_norm_eps, len(states), len(block)
    if (own_mask := weights.get("mask_embedding")) is not None:
        block = torch.cat([block[:1], own_mask.expand(rows - 1, -1)])
    features = rms(states @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    theta, width = config.rope_parameters["rope_theta"], config.head_dim
    positions = torch.arange(context + rows).float()
    hidden = block
    for number in range(config.num_hidden_layers):
        own = {name.removeprefix(f"layers.{number}."): w for name, w in weights.items() if f"layers.{number}." in name}
        around = "attention_conv.base_kernel" in own
        inputs = normed = rms(hidden, own["input_layernorm.weight"], eps)
        normed = convolved(own, "attention_conv", 0, inputs, normed) if around else normed
        both = torch.cat([features, normed])
        given = {"q": normed, "k": both, "v": both}
        heads = {n: (x @ own[f"self_attn.{n}_proj.weight"].T).view(len(x), -1, width) for n, x in given.items()}
        for n in "qk":
            if (norm := own.get(f"self_attn.{n}_norm.weight")) is not None:
                heads[n] = rms(heads[n], norm, eps)
        groups = heads["q"].shape[1] // heads["k"].shape[1]
        q, k = turned(heads["q"], positions[context:], theta), turned(heads["k"], positions, theta)
        k, v = k.repeat_interleave(groups, dim=1), heads["v"].repeat_interleave(groups, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(width)
        if shape is not None:
            scores = scores.masked_fill(~sees(shape, number, context, rows), -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(rows, -1)
        mixed = mixed @ own["self_attn.o_proj.weight"].T
        hidden = hidden + (convolved(own, "attention_conv", 1, inputs, mixed) if around else mixed)
        inputs = inner = rms(hidden, own["post_attention_layernorm.weight"], eps)
        inner = convolved(own, "mlp_conv", 0, inputs, inner) if around else inner
        gate = torch.nn.functional.silu(inner @ own["mlp.gate_proj.weight"].T)
        mixed = (gate * (inner @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
        hidden = hidden + (convolved(own, "mlp_conv", 1, inputs, mixed) if around else mixed)
    return rms(hidden, weights["norm.weight"], eps)


def markov_bias(weights: Weights, kind: str, tokens: list[int], states: Tensor) -> Tensor:
    """What DSpark adds to the logits ``[W]`` of the slot after ``tokens``, the anchor first; ``states [D, H]``."""
    head = {name.removeprefix("markov_head."): w for name, w in weights.items() if name.startswith("markov_head.")}
    if kind == "rnn":
        rank = head["markov_w1.weight"].shape[1]
        memory, out = torch.zeros(rank), torch.zeros(rank)
        for token, state in zip(tokens, states, strict=False):
            joint = torch.cat([memory, head["markov_w1.weight"][token], state])
            parts = head["joint_proj.weight"] @ joint + head["joint_proj.bias"]
            gate, candidate, out = parts[:rank].sigmoid(), parts[rank : 2 * rank].tanh(), parts[2 * rank :].tanh()
            memory = gate * memory + (1 - gate) * candidate
        return head["markov_w2.weight"] @ out
    embedding, state = head["markov_w1.weight"][tokens[-1]], states[len(tokens) - 1]
    if kind == "gated":
        gate = head["gate_proj.weight"] @ torch.cat([state, embedding]) + head["gate_proj.bias"]
        embedding = gate.sigmoid() * embedding
    return head["markov_w2.weight"] @ embedding


def selector_scores(weights: Weights, top_k: int, logits: Tensor, previous: int, state: Tensor) -> Tensor:
    """DFlash2's scores ``[V]`` of a slot's tokens: -inf but for the ``top_k`` likeliest by its ``logits [V]``."""
    head = {name.removeprefix("candidate_selector."): w for name, w in weights.items()}
    scores = torch.full_like(logits, -torch.inf)
    for token in logits.argsort(descending=True)[:top_k].tolist():
        edge = head["predecessor_codebook"][previous] * (head["hidden_projection.weight"] @ state)
        scores[token] = logits[token] + (edge * head["successor_codebook"][token]).sum()
    return scores
