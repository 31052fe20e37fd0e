"""A program for vLLM's Python: its own DFlash and DSpark classes, as they load an exported head and compute with it.

    python vllm_block_class.py CASES.json

Each case names an exported ``folder``, its ``method``, the ``target`` it is served beside, ``inputs`` (safetensors:
states of the target ``[C, taps * H]``, embeddings of the block ``[T, H]``, and ``previous`` tokens ``[T]``) and
``out``, which gets the block's states ``[T, H]``, the logits ``[T, W]``, and of DSpark the Markov head's bias
``[T, W]`` and the confidence ``[T]``. A line of JSON on stdout has the target's states that vLLM would hand over, the
parameters that loading has left alone, and what vLLM reads of the layout.

The attention, which vLLM computes from the cache of an engine, is torch's here: over the keys and values that vLLM
projects from the context, then those of the block.
"""

from types import SimpleNamespace

import torch
import vllm_class  # sets vLLM's environment
from safetensors.torch import load_file, save_file
from torch import Tensor

context: dict[int, tuple[Tensor, Tensor]] = {}  # by attention layer, keys and values [C, key heads, D]
causal = {"blocks": False}


def attend(layer, query: Tensor, key: Tensor, value: Tensor, *_given: object, **_named: object) -> Tensor:
    """What vLLM's attention backends compute, over the context and the block."""
    before = context[id(layer)]
    q, k, v = (each.reshape(len(query), -1, layer.head_size) for each in (query, key, value))
    k, v = (torch.cat([old, new]) for old, new in zip(before, (k, v), strict=True))
    see = torch.ones(len(q), len(k), dtype=torch.bool)
    if causal["blocks"]:
        see = see.tril(len(k) - len(q))
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=see, scale=layer.impl.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).flatten(1)


def norm_each_layer(model, keys: Tensor) -> Tensor:
    """Norm keys ``[layers, C, key heads, D]`` of the context as vLLM means it, and its kernels for GPUs do it.

    That of vLLM 0.32 for CPUs takes the weights ``[layers, D]`` for one vector, so the first layer's for all layers.
    """
    spread = torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + model._rms_norm_eps)
    return keys * spread * model._k_norm_weights[:, None, None]


class Kept:
    """The part of an attention backend that writes the context's keys and values."""

    def __init__(self, impl) -> None:
        self.scale = impl.scale

    def do_kv_cache_update(self, layer, keys: Tensor, values: Tensor, *_given: object) -> None:
        context[id(layer)] = keys.clone(), values.clone()


def run(case: dict[str, str]) -> dict[str, object]:
    """Load one head and compute."""
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    config = vllm_class.engine_config(case["target"])
    config.speculative_config = SpeculativeConfig(  # set here: on a CPU vLLM has no runner for DSpark, and refuses it
        method=case["method"],
        model=case["folder"],
        num_speculative_tokens=4,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    draft = config.speculative_config.draft_model_config
    given = load_file(case["inputs"])
    count, rows = len(given["states"]), len(given["embeddings"])
    with set_current_vllm_config(config), torch.no_grad():
        model, left = vllm_class.loaded(config, draft, case["folder"])
        blocks = model.get_draft_attn_causal()
        assert len({*blocks}) == 1
        causal["blocks"] = blocks[0]
        for layer in model.model._attn_layers:
            layer.impl, layer.kv_cache = Kept(layer.impl), None
        places = torch.arange(count + rows)
        model.precompute_and_store_context_kv(
            model.combine_hidden_states(given["states"]), places[:count], torch.zeros(count, dtype=torch.long)
        )
        states = model(torch.zeros(rows, dtype=torch.long), places[count:], given["embeddings"])
        found = {"states": states}
        if "lm_head.weight" not in left:
            logits = model.compute_draft_logits if case["method"] == "dspark" else model.compute_logits
            found["logits"] = logits(states)
        if case["method"] == "dspark":
            embedded = model.markov_embed(given["previous"])
            found["bias"] = model.markov_bias(embedded)
            if model.model.confidence_head is not None:
                found["confidence"] = model.compute_confidence(states, embedded)
    save_file({name: value.contiguous() for name, value in found.items()}, case["out"])
    hf_config = draft.hf_config
    group = SimpleNamespace(**(getattr(hf_config, "dflash_config", None) or {}))
    return {
        "states": list(get_eagle3_aux_layers_from_config(config.speculative_config) or ()),
        "left": left,
        "mask": get_parallel_drafting_token_id(hf_config),
        "causal": blocks[0],
        "anchor_first": getattr(hf_config if case["method"] == "dspark" else group, "sample_from_anchor", None),
    }


if __name__ == "__main__":
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    DFlashQwen3Model._normalize_context_k = norm_each_layer
    vllm_class.main(run, attend)
