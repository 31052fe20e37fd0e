"""A tiny Llama in a GGUF file, written as llama.cpp's converter would."""

from pathlib import Path

import gguf
import numpy as np
import torch
from chat_formats import CHATML, CHATML_SPECIALS
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel

HEADS, KV_HEADS, HIDDEN, INTERMEDIATE, LAYERS = 4, 2, 64, 96, 2
Kind = gguf.GGMLQuantizationType


def shapes(vocabulary: int) -> dict[str, tuple[str, tuple[int, int]]]:
    """Matrices by their names in a GGUF file: transformers' name, and the shape."""
    found = {"token_embd": ("model.embed_tokens", (vocabulary, HIDDEN))}
    found["output"] = ("lm_head", (vocabulary, HIDDEN))
    for layer in range(LAYERS):
        ours, theirs = f"blk.{layer}", f"model.layers.{layer}"
        found |= {
            f"{ours}.attn_q": (f"{theirs}.self_attn.q_proj", (HIDDEN, HIDDEN)),
            f"{ours}.attn_k": (f"{theirs}.self_attn.k_proj", (HIDDEN * KV_HEADS // HEADS, HIDDEN)),
            f"{ours}.attn_v": (f"{theirs}.self_attn.v_proj", (HIDDEN * KV_HEADS // HEADS, HIDDEN)),
            f"{ours}.attn_output": (f"{theirs}.self_attn.o_proj", (HIDDEN, HIDDEN)),
            f"{ours}.ffn_gate": (f"{theirs}.mlp.gate_proj", (INTERMEDIATE, HIDDEN)),
            f"{ours}.ffn_up": (f"{theirs}.mlp.up_proj", (INTERMEDIATE, HIDDEN)),
            f"{ours}.ffn_down": (f"{theirs}.mlp.down_proj", (HIDDEN, INTERMEDIATE)),
        }
    return found


def interleaved(name: str, weights: np.ndarray) -> np.ndarray:
    """Queries' and keys' rows in llama.cpp's order: the two halves of a head alternate."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.rpartition(".")[2])
    if heads is None:
        return weights
    return weights.reshape(heads, 2, -1, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)


def write(file: Path, kind: Kind = Kind.Q8_0) -> dict[str, torch.Tensor]:
    """A tiny model in a GGUF file; its matrices, as they are after quantisation, by transformers' names."""
    tokens = [*sorted(ByteLevel.alphabet()), "Ġt", "he", *CHATML_SPECIALS]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    for add, value in (
        (writer.add_context_length, 128),
        (writer.add_embedding_length, HIDDEN),
        (writer.add_block_count, LAYERS),
        (writer.add_feed_forward_length, INTERMEDIATE),
        (writer.add_head_count, HEADS),
        (writer.add_head_count_kv, KV_HEADS),
        (writer.add_layer_norm_rms_eps, 1e-5),
        (writer.add_rope_freq_base, 10_000.0),
        (writer.add_rope_dimension_count, HIDDEN // HEADS),
        (writer.add_vocab_size, len(tokens)),
        (writer.add_eos_token_id, len(tokens) - 1),
        (writer.add_bos_token_id, len(tokens) - 2),
    ):
        add(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 3) + [3] * 3)
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_chat_template(CHATML)
    random, made = np.random.default_rng(0), {}
    for name, (theirs, shape) in shapes(len(tokens)).items():
        weights = random.normal(0, 0.2, shape).astype(np.float32)
        packed = quantize(interleaved(name, weights), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        made[f"{theirs}.weight"] = torch.from_numpy(dequantize(quantize(weights, kind), kind))
    for name in ("output_norm", *(f"blk.{layer}.{norm}_norm" for layer in range(LAYERS) for norm in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", random.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return made
