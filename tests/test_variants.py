"""Variants of a live model: nothing that another thread may use is changed."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn

from drafters import TargetModel
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.methods.kangaroo import KangarooDrafter, KangarooOptions
from drafters.model.fused import FusedLayer
from drafters.model.variants import StandIn, variant

IDS = torch.arange(3, 23)[None]


@pytest.mark.parametrize("engine", ["stock", "fused"])
@pytest.mark.parametrize("family", ["mistral-sliding", "llama"])
def test_others_generate_while_a_model_is_checked(family: str, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches windows of 4 tokens, layers left out, an LM head replaced, or another precision, while another thread
    generates: when a model is loaded, and when a Kangaroo drafter is made."""
    model: Any = tiny.build(family)
    live, checking = TargetModel(model, engine=engine), threading.get_ident()
    adapter, during = KangarooAdapter(model.config, KangarooShape(exit_layer=2)), list[list[torch.Tensor]]()

    @torch.no_grad()
    def results() -> list[torch.Tensor]:
        output = live.features(IDS, taps=(0, 2))
        return [output.features, *output.taps.values(), live.shallow(IDS, None, 2), model(IDS, use_cache=False).logits]

    def interrupted(owner: Any, name: str, modules: list[Any]) -> None:
        real = getattr(owner, name)

        def call(self: Any, *given: Any, **named: Any) -> Any:
            if threading.get_ident() == checking and any(self is module for module in modules):
                with ThreadPoolExecutor(1) as other:
                    during.append(other.submit(results).result())
                assert torch.get_float32_matmul_precision() == "high"
            return real(self, *given, **named)

        monkeypatch.setattr(owner, name, call)

    expected = results()
    interrupted(nn.Linear, "forward", [model.lm_head, model.model.layers[2].mlp.up_proj])
    interrupted(FusedLayer, "__call__", live.layers[2:3])
    torch.set_float32_matmul_precision("high")
    try:
        TargetModel(model, engine=engine)
        loaded = len(during)
        KangarooDrafter(live, adapter, KangarooOptions())
    finally:
        torch.set_float32_matmul_precision("highest")
    assert 0 < loaded < len(during)
    for found in during:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_variant_shares_all_but_the_replaced_parts() -> None:
    """Catches copied weights, a changed original, and an old config kept by a layer."""
    model = tiny.build("mistral-sliding")
    config = type(model.config)(**model.config.to_dict() | {"sliding_window": 2})
    short = variant(model, {id(model.config): config})
    assert model.config.sliding_window == tiny.SLIDING_WINDOW and model.model.config is model.config
    assert all(one is other for one, other in zip(short.parameters(), model.parameters(), strict=True))
    users = [module for module in model.modules() if getattr(module, "config", None) is model.config]
    assert len(users) > 4 and sum(getattr(module, "config", None) is config for module in short.modules()) == len(users)
    assert short.lm_head is model.lm_head
    assert not torch.allclose(short(IDS).logits, model(IDS).logits)
    assert variant(model, {id(nn.Identity()): nn.Identity()}) is model


@pytest.mark.parametrize("way", ["accelerate", pytest.param("compiled", marks=pytest.mark.long), "method"])
def test_a_forward_bound_to_a_module_is_bound_to_its_variant(way: str) -> None:
    """Catches a variant that runs the original: its taps, layers and windows would have no effect."""
    model = tiny.build("llama")
    expected = model.model(IDS, output_hidden_states=True).hidden_states[2]
    if way == "accelerate":
        add_hook_to_module(model.model, AlignDevicesHook(execution_device="cpu"))
    elif way == "compiled":
        model.model.forward = torch.compile(model.model.forward, backend="eager")
    else:
        model.model.forward = model.model.forward
    seen: list[torch.Tensor] = []
    layer = model.model.layers[2]
    noted = StandIn(layer, lambda output, *given, **named: seen.append(given[0]) or output)
    other = variant(model, {id(layer): noted})
    other(IDS)
    assert len(seen) == 1 and torch.equal(seen[0], expected)
    model(IDS)
    assert len(seen) == 1


def test_a_user_keeps_hooks_on_tapped_layers() -> None:
    """Catches taps that run a copy of a layer made before a hook was set on it."""
    target = TargetModel(tiny.build("llama"), engine="stock")
    before = target.features(IDS, taps=(1, 2)).features
    handle = target.body.layers[1].register_forward_hook(lambda module, given, output: 2 * output)
    after = target.features(IDS, taps=(1, 2))
    handle.remove()
    assert not torch.allclose(after.features, before) and torch.equal(
        target.features(IDS, taps=(1, 2)).features, before
    )
