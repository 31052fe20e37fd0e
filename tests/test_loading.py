"""Loading a target: memory counted before weights are read, layers over several devices."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conformance import NO_EOS, checked_commits, prompt, rows_of
from rigged import eagle

from drafters import TargetModel, generate, make_drafter
from drafters.model import loading
from drafters.model.graphs import GraphRunner
from drafters.model.kv_cache import KVCache, cache_bytes
from drafters.model.self_check import check_layers_agree, graphs_agree

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 0)  # not equal, and yet the same memory


@pytest.fixture
def saved(tmp_path: Path) -> str:
    tiny.build("llama").save_pretrained(tmp_path)
    return str(tmp_path)


def test_bytes_are_those_of_the_model_and_its_cache() -> None:
    """Catches tied weights counted twice, one of keys and values forgotten, and heads for key heads."""
    for changes in ({}, {"tie_word_embeddings": True}):
        model = tiny.build("llama", **changes)
        counted = sum(weights.numel() for weights in model.parameters())
        assert loading.weight_bytes(model.config, torch.bfloat16) == 2 * counted
    cache = KVCache.for_config(model.config, 3, 17, torch.bfloat16, "cpu")
    keys, values = cache.views(0, 17)
    assert cache_bytes(model.config, 3, 17, torch.bfloat16) == sum(part.nbytes for part in keys + values)


def test_too_little_memory_is_said_before_weights_are_read(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an hour of downloading, or a process killed, where a message could say what to lower."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(loading, "SMALL", 0)
    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", read)
    weights = loading.weight_bytes(tiny.tiny_config("llama"), torch.float32)
    monkeypatch.setattr(loading, "free_memory", lambda _: weights - 1)
    with pytest.raises(ValueError, match=r"its weights need [0-9.]+ kB in float32, and cpu has .* device_map='auto'"):
        TargetModel.from_pretrained(saved, "float32", "cpu")
    monkeypatch.setattr(loading, "free_memory", lambda _: weights + 1000)
    with pytest.raises(ValueError, match=r"a cache of 4 x 2000 tokens .* lower max_new_tokens"):
        TargetModel.from_pretrained(saved, "float32", "cpu", cache_tokens=(4, 2000))
    with pytest.raises(AssertionError, match="were read"):
        TargetModel.from_pretrained(saved, "float32", "cpu")


def test_device_maps(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a map that is ignored, and layers left where every step would fetch them."""
    target = TargetModel.from_pretrained(saved, "float32", device_map={"": "cpu"})
    assert target.engine == "fused" and target._devices is None
    with pytest.raises(ValueError, match="both given"):
        TargetModel.from_pretrained(saved, "float32", "cpu", device_map="auto")
    load = loading.AutoModelForCausalLM.from_pretrained

    def spread(*arguments: Any, **options: Any) -> Any:
        del options["device_map"]
        model = load(*arguments, **options)
        model.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "disk"}
        return model

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", spread)
    with pytest.raises(ValueError, match="leaves layers of .* on disk"):
        TargetModel.from_pretrained(saved, "float32", device_map="auto")


def over_two_devices(family: str, engine: Any) -> TargetModel:
    """A target that believes its last two layers to lie elsewhere."""
    target = TargetModel(tiny.build(family), engine=engine)
    target._devices = [FIRST, FIRST, SECOND, SECOND]
    return target


@pytest.mark.parametrize("engine", ["fused", "eager"])
@pytest.mark.parametrize("method", ["autoregressive", "static"])
def test_over_several_devices(method: str, engine: Any) -> None:
    """Catches a cache of one device for layers of two, and rows of an accepted path moved in the first part alone."""
    rows = []
    for target in (TargetModel(tiny.build("llama"), engine=engine), over_two_devices("llama", engine)):
        drafter = eagle(target, 0.4, "static") if method == "static" else make_drafter(method, target)
        assert len(target.new_cache(1, 8)._parts) == (1 if target._devices is None else 2)
        prompts = [prompt(9), prompt(5, 1)]
        with checked_commits():
            found = generate(target, drafter, prompts, max_new_tokens=16, eos_token_id=NO_EOS)
        rows.append((rows_of(found), found.trace.tau))
    assert rows[0] == rows[1]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here: layers cannot be spread over them")
def test_over_two_gpus(saved: str) -> None:
    """Catches whatever pretended devices do not show: tensors of two real ones in one operation."""
    rows = []
    for options in ({"device": "cuda:0"}, {"device_map": "balanced"}):
        target = TargetModel.from_pretrained(saved, "float32", **options)  # type: ignore[arg-type]
        assert (target._devices is None) == ("device" in options)
        rows.append(rows_of(generate(target, eagle(target, 0.4, "static"), [prompt(9)], max_new_tokens=16)))
    assert rows[0] == rows[1]


def test_graphs_that_give_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches garbage decoded where a driver replays wrongly, or where a replay keeps the values of its capture."""
    target = TargetModel(tiny.build("llama"), engine="fused")
    bounds = check_layers_agree(target)
    assert graphs_agree(target, GraphRunner(target.model), bounds) is None
    run = GraphRunner.run

    def stale(self: GraphRunner, *arguments: Any, **options: Any) -> Any:
        key = arguments[1][0].shape[1]
        kept, found = self.__dict__.setdefault("kept", {}), run(self, *arguments, **options)
        return kept.setdefault(key, found) if self.broken is None else found

    monkeypatch.setattr(GraphRunner, "run", stale)
    assert "differs by" in (graphs_agree(target, GraphRunner(target.model), bounds) or "")
    with pytest.raises(ValueError, match="engine 'graphs' cannot run .* differs by"):
        TargetModel(tiny.build("llama"), engine="graphs")
    broken = GraphRunner(target.model)
    broken.broken = "no capturing here"
    assert graphs_agree(target, broken, bounds) == "no capturing here"
