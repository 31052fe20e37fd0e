"""Captured forwards on the simulated GPU: streams, memory that is short, and what only a GPU's kernels ask for."""

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from conformance import NO_EOS, prompt, rows_of
from families import DECODED, build
from rigged import eagle, perturbed
from simulated_cuda import CUDA, SimulatedCuda, simulated_cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from drafters import TargetModel, generate, make_drafter
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.methods.speculative import SpeculativeDrafter
from drafters.model import cache as kv_cache
from drafters.model.cache import KVCache, Storage
from drafters.model.graphs import GraphRunner
from drafters.model.rows import CHAIN, EVERYTHING, Placed
from drafters.model.runner import StockLayer


@pytest.fixture
def gpu() -> Iterator[SimulatedCuda]:
    with simulated_cuda() as device:
        yield device


def on_gpu(engine: Any = "graphs") -> TargetModel:
    return TargetModel(tiny.build("llama").to("cuda"), engine=engine)  # type: ignore[arg-type]


def decoded(target: TargetModel, drafter: Any, seed: int = 0, new: int = 12) -> list[list[int]]:
    return rows_of(generate(target, drafter, [prompt(9, seed)], max_new_tokens=new, eos_token_id=NO_EOS))


def test_each_model_captures_on_a_stream_of_its_own(gpu: SimulatedCuda) -> None:
    """Catches graphs of a target and of its draft model that share cuBLAS' workspace, which is a stream's: the one
    that was there first may go first."""
    target = on_gpu()
    draft = perturbed(target, 0.05)
    gpu.captured_on.clear()
    decoded(target, make_drafter("autoregressive", target))
    alone = set(gpu.captured_on)
    decoded(target, SpeculativeDrafter.from_options(target, draft_model=draft, gamma=2))
    assert len(alone) == 1 and 0 not in alone
    assert len(set(gpu.captured_on)) == 2 and len(gpu.captured_on) > 2


def test_a_trial_leaves_nothing_behind(gpu: SimulatedCuda) -> None:
    """Catches graphs and caches of the trial at loading that live until the collector comes by, beside those in use."""

    def graphs() -> set[int]:
        return {id(one) for one in gc.get_objects() if isinstance(one, torch.cuda.CUDAGraph | Storage)}

    gc.collect()
    before = graphs()
    gc.disable()
    try:
        on_gpu()
        left = graphs() - before
    finally:
        gc.enable()
    assert gpu.count("capture") > 0 and not left


def test_memory_that_is_short_for_one_graph(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Catches one shape that found no room, after which nothing is captured any more."""
    target = on_gpu()
    assert isinstance(target.runner, GraphRunner)
    expected = decoded(target, make_drafter("autoregressive", target))
    again = on_gpu()
    assert isinstance(again.runner, GraphRunner)
    failing, captured = [2], again.runner._graph_of

    def short(*given: Any) -> Any:
        if failing[0]:
            failing[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return captured(*given)

    monkeypatch.setattr(again.runner, "_graph_of", short)
    with caplog.at_level(logging.WARNING):
        assert decoded(again, make_drafter("autoregressive", again)) == expected
    assert (
        all(part.uncaptured is None for part in again._parts.values())
        and "a forward is run without a graph" in caplog.text
    )
    before = gpu.count("capture")
    decoded(again, make_drafter("prompt_lookup", again), new=16)
    assert gpu.count("capture") > before


def test_a_forward_that_waits_for_the_gpu_is_not_captured(gpu: SimulatedCuda, caplog: Any) -> None:
    """Catches a capture that fails, after which torch's allocator raises internal errors, a model that does not load
    for it, and a reason that is said twice or not at all."""
    model: Any = build("jetmoe", DECODED["jetmoe"]).to("cuda")
    with caplog.at_level(logging.WARNING, "drafters"):
        target = TargetModel(model, name="routed")
    assert target.engine == "stock" and gpu.count("capture") == 0 and not gpu.sync_debug
    (said,) = [each.getMessage() for each in caplog.records if "without graphs" in each.getMessage()]
    assert said.startswith("routed runs without graphs: ") and "waits for the GPU" in said
    with pytest.raises(ValueError, match="engine 'graphs' cannot run routed: .*waits for the GPU.*engine 'stock'"):
        TargetModel(model, name="routed", engine="graphs")


def test_a_model_with_hooks_is_not_captured(gpu: SimulatedCuda, caplog: Any) -> None:
    """Catches hooks that are called at the capture and at no replay."""
    model: Any = build("glm", DECODED["glm"]).to("cuda")
    model.model.layers[1].register_forward_hook(lambda module, args, output: None)
    assert TargetModel(model).engine == "stock" and "hooks are set" in caplog.text


def test_a_heads_own_layers_are_captured(gpu: SimulatedCuda) -> None:
    """Catches masks, angles and positions of a head's transformers layer that stay those of its capture."""
    target = TargetModel(build("olmo2", {}).to("cuda"))  # type: ignore[arg-type]
    module: Any = EagleHead(target.config, EagleShape(layer="target")).to("cuda")
    head: Any = EagleDrafter(target, module, EagleOptions(tree="chain")).head
    head.cache = target.new_cache(1, 40, 1, head.layer)
    states, tokens = torch.randn(1, 12, target.hidden_size, device=CUDA), torch.tensor([prompt(12)], device=CUDA)
    trained = module(states, target.embed(tokens), torch.arange(12, device=CUDA)[None])
    for start, stop in ((0, 6), (6, 9), (9, 12)):
        found = head.extend(states[:, start:stop], tokens[:, start:stop])
        head.cache.commit_first([stop - start])
        torch.testing.assert_close(found, trained[:, start:stop], atol=1e-4, rtol=1e-4)
    assert len(head.part.captured) == 1 and isinstance(head.part.layers[0].layer, StockLayer)


def test_a_head_without_graphs_leaves_the_targets(gpu: SimulatedCuda, caplog: Any, monkeypatch: Any) -> None:
    """Catches a target that decodes without graphs because a head's layers cannot be captured."""
    target = on_gpu()
    drafter = eagle(target, None, "static")
    expected = decoded(target, drafter)
    again = on_gpu()
    head, captured = eagle(again, None, "static"), GraphRunner._graph_of

    def graph_of(self: GraphRunner, forward: Any, *rest: Any) -> Any:
        if forward.__self__.part is head.head.part:
            raise RuntimeError("no kernel")
        return captured(self, forward, *rest)

    monkeypatch.setattr(GraphRunner, "_graph_of", graph_of)
    before = gpu.count("replay")
    with caplog.at_level(logging.WARNING, "drafters"):
        assert decoded(again, head) == expected
    assert gpu.count("replay") > before and head.head.part.uncaptured == "no CUDA graph could be captured: no kernel"
    assert caplog.text.count("some layers run without graphs") == 1


def test_a_cache_that_is_large_enough_is_used_again(gpu: SimulatedCuda) -> None:
    """Catches everything captured again with each longer question, and then with a shorter one."""
    target = on_gpu()
    large = target.new_cache(1, 3000)
    storage = large.storage
    assert storage is not None and storage.capacity == 4096
    large.release()
    assert target.new_cache(1, 40).storage is storage and target.new_cache(1, 40).storage is not storage
    small, other = target.new_cache(1, 40), target.new_cache(1, 5000)
    kept = small.storage
    small.release(), other.release()
    assert target.new_cache(1, 40).storage is kept  # the smallest that is large enough


def test_free_caches_make_room(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches "a cache needs ..." while unused caches, and graphs captured with them, hold the memory."""
    target = on_gpu()
    drafter = make_drafter("autoregressive", target)
    expected = decoded(target, drafter)
    (part,) = target._parts.values()
    assert part.captured
    real = kv_cache.free_memory

    def free(device: torch.device) -> int:
        return real(device) if not part.captured else 0

    monkeypatch.setattr(kv_cache, "SMALL", 0)
    monkeypatch.setattr(kv_cache, "free_memory", free)
    assert isinstance(target.new_cache(1, 5000), KVCache) and not part.captured
    monkeypatch.setattr(kv_cache, "free_memory", lambda device: 0)
    with pytest.raises(ValueError, match="lower max_new_tokens"):
        target.new_cache(1, 9000)
    monkeypatch.undo()
    assert decoded(target, drafter) == expected


def test_attention_on_cuda(gpu: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches cuDNN's attention, which makes a plan for every length, and a bias whose first value is not aligned."""
    target = on_gpu("fused")
    seen: list[list[SDPBackend]] = []
    biases: list[torch.Tensor] = []
    real = F.scaled_dot_product_attention

    def attend(*given: Any, **options: Any) -> torch.Tensor:
        seen.append(_cur_sdpa_kernel_backends())
        if options.get("attn_mask") is not None:
            biases.append(options["attn_mask"])
        return real(*given, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    decoded(target, make_drafter("prompt_lookup", target, gamma=7), new=20)
    assert seen and not any(SDPBackend.CUDNN_ATTENTION in kinds for kinds in seen)
    assert biases and all(bias.storage_offset() == 0 and bias.is_contiguous() for bias in biases)
    assert SDPBackend.CUDNN_ATTENTION in _cur_sdpa_kernel_backends()  # as it was, for everybody else
    placed = Placed(CHAIN, [13], 8, CUDA)
    bias = placed.bias(EVERYTHING, 2, torch.bfloat16)
    assert bias is not None and bias.is_contiguous() and not bias.storage_offset()
