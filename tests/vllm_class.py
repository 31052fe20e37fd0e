"""A program for vLLM's Python: its own EAGLE-3 classes, as they load an exported head and compute with it.

    python vllm_class.py CASES.json

Each case names an exported ``folder``, the ``target`` it is served beside, ``inputs`` (safetensors: states of the
target ``[T, taps * H]`` and the next tokens' embeddings ``[T, H]``) and ``out``, which gets what is fed back ``[T, H]``
and the logits ``[T, V]``. A line of JSON on stdout has the target's states that vLLM would hand over, and the names of
the parameters that loading has left alone.

The attention, which vLLM computes from the cache of an engine, is torch's here.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def causal(layer, query: Tensor, key: Tensor, value: Tensor, *_given: object, **_named: object) -> Tensor:
    """What vLLM's attention backends compute, without their cache."""
    q, k, v = (each.reshape(len(query), -1, layer.head_size).transpose(0, 1)[None] for each in (query, key, value))
    seen = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    if layer.sliding_window is not None:
        seen = seen.triu(1 - layer.sliding_window)
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=seen, scale=layer.impl.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).flatten(1)


def engine_config(target: str, **more: object):
    """vLLM's configuration of an engine that serves the target."""
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
    return EngineArgs(model=target, **arguments, **more).create_engine_config()


def loaded(config, draft, folder: str) -> tuple[object, list[str]]:
    """vLLM's class with the head's weights, and the names of the parameters that loading has left alone."""
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    model = initialize_model(config, model_config=draft)
    for weight in model.parameters():
        weight.fill_(float("nan") if weight.is_floating_point() else -1)
    model.load_weights(iter(load_file(f"{folder}/model.safetensors").items()))
    left = [name for name, weight in model.named_parameters() if (weight.isnan() | (weight == -1)).any()]
    process_weights_after_loading(model, draft, torch.device("cpu"))
    return model, left


def run(case: dict[str, str]) -> dict[str, list]:
    """Load one head and compute."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    speculation = {"method": "eagle3", "model": case["folder"], "num_speculative_tokens": 3}
    config = engine_config(case["target"], speculative_config=speculation)
    runner = SimpleNamespace(speculative_config=config.speculative_config)
    states = GPUModelRunner._get_eagle3_aux_layers_from_config(runner)
    given = load_file(case["inputs"])
    places = torch.arange(len(given["states"]))
    with set_current_vllm_config(config), torch.no_grad():
        model, left = loaded(config, config.speculative_config.draft_model_config, case["folder"])
        features = model.combine_hidden_states(given["states"])
        hidden, fed_back = model(torch.zeros_like(places), places, features, given["embeddings"])
        found = {"fed_back": fed_back.contiguous()}
        if "lm_head.weight" not in left:
            found["logits"] = model.compute_logits(hidden).contiguous()
    save_file(found, case["out"])
    return {"states": list(states or ()), "left": left}


def main(run_case, attention) -> None:
    """Run all cases of the command line with this attention."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.attention.attention import Attention

    Attention.forward = attention

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
    for case in json.loads(Path(sys.argv[1]).read_text()):
        print(json.dumps(run_case(case)), flush=True)


if __name__ == "__main__":
    main(run, causal)
