"""A program for SGLang's Python: its own EAGLE classes, as they load an exported head and compute with it.

    python sglang_class.py CASES.json

Each case names an exported ``folder``, the ``target`` it is served beside, ``inputs`` (safetensors: features
``[T, H]``, of EAGLE-3 the target's states ``[T, taps * H]``, and the next tokens' embeddings ``[T, H]``) and ``out``,
which gets the features ``[T, H]``, of EAGLE-3 also the logits and the target's ids of the draft tokens. A line of JSON
on stdout has the names of the parameters that loading has left alone, and the states that an EAGLE-3 head is given.

SGLang needs compiled kernels to serve. Its classes are plain torch on a CPU: the names of kernels and of torchvision
are missing, and the attention, which each of its backends computes from a cache, is torch's here.
"""

import json
import os
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import is_torchvision_available


class Absent(ModuleType):
    """A module that is imported from and never called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__, self.__path__ = ModuleSpec(name, None), []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class CausalAttention:
    """What SGLang's attention backends compute, without their cache."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer, *_args: object, **_options: object) -> Tensor:
        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=layer.scaling, enable_gqa=True
        )
        return out[0].transpose(0, 1).flatten(1)


def leave_out_kernels() -> None:
    """Give SGLang the names that it imports of kernels and of torchvision where they are not installed."""
    if not is_torchvision_available():  # asked once, before there is a module by that name
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.io"):
            sys.modules[name] = Absent(name)
    try:
        import sgl_kernel  # noqa: F401
    except ImportError:
        sys.modules["sgl_kernel"] = Absent("sgl_kernel")


def start(target: str) -> None:
    """One process that is all of SGLang's ranks."""
    leave_out_kernels()
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path=target, device="cpu", attention_backend="torch_native"), role="scheduler")
    with tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")


def states_of(config, layers: int) -> list[int]:
    """The states that SGLang's Llama hands over for this draft model: before the layers of these numbers."""
    from sglang.srt.models.llama import LlamaForCausalLM

    target = SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True), model=SimpleNamespace())
    target.config = SimpleNamespace(num_hidden_layers=layers)
    ids = (getattr(config, "eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
    LlamaForCausalLM.set_eagle3_layers_to_capture(target, ids)
    return target.model.layers_to_capture


def run(case: dict[str, str]) -> dict[str, list]:
    """Load one head and compute."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.runtime_context import get_parallel

    config, target = AutoConfig.from_pretrained(case["folder"]), AutoConfig.from_pretrained(case["target"])
    given = load_file(case["inputs"])
    count = len(given["features"])
    ids, places = torch.zeros(count, dtype=torch.long), torch.arange(count)
    with get_parallel().override(tp_rank=0), torch.no_grad():
        model = ModelRegistry.resolve_model_cls(config.architectures)[0](config)
        for weight in model.parameters():
            weight.fill_(float("nan"))
        model.load_weights(iter(load_file(f"{case['folder']}/model.safetensors").items()))
        left = [name for name, weight in model.named_parameters() if weight.isnan().any()]
        batch = ForwardBatch(ForwardMode.EXTEND, 1, ids, ids[:1], torch.tensor([count]), places, count)
        batch.spec_info = SimpleNamespace(hidden_states=given["features"])
        with forward_context(ForwardContext(attn_backend=CausalAttention())):
            out = model.model(ids, places, batch, input_embeds=given["embeddings"])
        if isinstance(out, Tensor):  # EAGLE
            found, states = {"features": out}, []
        else:
            scored, fed_back = out
            found, states = {"features": fed_back[0]}, states_of(config, target.num_hidden_layers)
            found["logits"] = scored @ model.lm_head.weight[: config.draft_vocab_size].T  # without the padding
            if model.get_hot_token_id() is not None:
                found["ids"] = model.get_hot_token_id()
    save_file({name: value.contiguous() for name, value in found.items()}, case["out"])
    return {"left": left, "states": states}


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    start(cases[0]["target"])
    for case in cases:
        print(json.dumps(run(case)), flush=True)
