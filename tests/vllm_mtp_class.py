"""A program for vLLM's Python: its own MTP classes, as they load a target's files and compute with their layers.

    python vllm_mtp_class.py CASES.json

Each case names a ``target`` with MTP layers in its files, ``inputs`` (safetensors: hidden states and the next tokens'
embeddings ``[T, H]``) and ``out``, which gets ``fed_back_k [T, H]`` and ``logits_k [T, V]`` of each step. Step k reads
what step k - 1 fed back. A line of JSON on stdout has the names of the parameters that loading did not write.
"""

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm_class import causal, engine_config, loaded, main


def latent(layer, query: Tensor, latents: Tensor, rotated: Tensor, *_given: object, **_named: object) -> Tensor:
    """What vLLM computes in latent attention: query ``[T, heads, d]``, and the keys' part with RoPE ``[T, 1, R]``."""
    widths = [layer.qk_nope_head_dim, layer.v_head_dim]
    keys, values = layer.kv_b_proj(latents)[0].unflatten(-1, (layer.num_heads, -1)).split(widths, dim=-1)
    keys = torch.cat([keys, rotated.view(len(keys), 1, -1).expand(-1, layer.num_heads, -1)], dim=-1)
    q, k, v = (each.transpose(0, 1)[None] for each in (query, keys, values))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
    return out[0].transpose(0, 1).flatten(1)


def run(case: dict[str, str]) -> dict[str, list]:
    """Load the layers of one target and compute."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    MLAAttention.forward = latent  # vLLM serves it on GPUs only, and its RoPE for CPUs misreads the strides of its keys
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    config = engine_config(case["target"], speculative_config={"method": "mtp", "num_speculative_tokens": 1})
    given, found = load_file(case["inputs"]), {}
    hidden, places = given["states"], torch.arange(len(given["states"]))
    with set_current_vllm_config(config), torch.no_grad(), set_forward_context(None, config):
        model, left = loaded(config, config.speculative_config.draft_model_config, case["target"])
        for step in range(int(case["layers"])):
            named = {"spec_step_idx": step} if step else {}
            output = model(torch.zeros_like(places), places + step, hidden, inputs_embeds=given["embeddings"], **named)
            scored, hidden = output if isinstance(output, tuple) else (output, output)
            found[f"fed_back_{step}"] = hidden.contiguous()
            found[f"logits_{step}"] = model.compute_logits(scored, **named).contiguous()
    save_file(found, case["out"])
    return {"states": [], "left": left}


if __name__ == "__main__":
    main(run, causal)
