"""Captured forwards on the simulated GPU: streams, memory that is short, and what only a GPU's kernels ask for."""

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from conformance import NO_EOS, prompt, rows_of
from rigged import perturbed
from simulated_cuda import CUDA, SimulatedCuda, simulated_cuda
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from drafters import TargetModel, generate, make_drafter
from drafters.methods.speculative import SpeculativeDrafter
from drafters.model import cache as kv_cache
from drafters.model.cache import KVCache, Storage
from drafters.model.graphs import GraphRunner
from drafters.model.rows import CHAIN, EVERYTHING, Placed


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
    assert again.runner.broken is None and "a forward is run without a graph" in caplog.text
    before = gpu.count("capture")
    decoded(again, make_drafter("prompt_lookup", again), new=16)
    assert gpu.count("capture") > before


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
