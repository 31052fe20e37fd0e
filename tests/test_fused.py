"""The rewritten decoder layers against transformers' own: same values, same weights, and when they are not used."""

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conformance import prompt
from torch import Tensor
from transformers import AutoModelForCausalLM, Olmo2Config, PreTrainedModel, Qwen2Config, Qwen3MoeConfig

from drafters import TargetModel
from drafters.loop.tree import ROOT, DraftTree
from drafters.model.linear import Product
from drafters.model.rows import Placed, Rows, Scope

PARENTS = [ROOT, ROOT, 0, 0, 1, 2, 5]
MORE = {"qwen2": Qwen2Config, "qwen3-moe": Qwen3MoeConfig}


def build(family: str) -> PreTrainedModel:
    """A tiny model; Qwen2 has biases on its projections, the mixtures have experts."""
    if family not in MORE:
        return tiny.build(family)
    common = tiny.tiny_config("llama").to_dict()
    wanted = {key: common[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    wanted |= {key: common[key] for key in ("num_attention_heads", "num_key_value_heads", "initializer_range")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
    config = MORE[family](**wanted, **(experts if family == "qwen3-moe" else {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5)
    return model.eval()


def forwards(target: TargetModel) -> list[Tensor]:
    """Features, states and logits of prompts, trees, chains and layers in two parts, of a batch and of one sequence."""
    cache, alone = target.new_cache(2, 40), target.new_cache(1, 40)
    ids = torch.tensor([prompt(12), prompt(9, 1) + [0] * 3], device=target.device)  # rows start at different slots
    new = torch.tensor([prompt(8, 2), prompt(8, 3)], device=target.device)
    see = DraftTree(torch.zeros(2, 7, dtype=torch.long), torch.tensor([PARENTS] * 2)).ancestors().to(target.device)
    outputs = [target.run(ids, cache).features[1, :9]]
    cache.commit_first([12, 9])
    tree = target.run(new, cache, Rows(see, see.sum(-1) - 1), taps=(0, 2, 4))
    outputs += [tree.features, *tree.taps.values()]
    cache.commit([[0, 1, 3], [0]])
    outputs.append(target.run(new[:, :1], cache).features)
    outputs.append(target.run(new[:, 1:4], cache, Rows(offset=1)).features)  # a chain after an uncommitted row
    shallow = [target.shallow(new[:, i : i + 1], cache, 2, Rows(offset=i)) for i in range(3)]
    outputs.append(target.run(torch.cat(shallow, dim=1), cache, start=2).features)
    outputs.append(target.run(new[:, :7], cache, Rows(see[:, :7, :7], (see.sum(-1) - 1)[:, :7])).features)
    target.run(ids[:1], alone)
    alone.commit_first([12])
    return [*outputs, target.run(new[:1, :3], alone).features, target.lm_head(target.run(new[:1, :1], alone).features)]


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *MORE])
def test_fused_equals_stock(family: str) -> None:
    """Catches a wrong sign in RoPE, biases left out, rows that attend with another head's keys, windows forgotten."""
    model = build(family)
    fused, stock = TargetModel(model, engine="fused"), TargetModel(model, engine="stock")
    assert (fused.engine, stock.engine) == ("fused", "stock")
    for ours, theirs in zip(forwards(fused), forwards(stock), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


def test_weights_are_shared_not_copied(tmp_path: Path) -> None:
    """Catches a second copy of the model in memory, and stock layers that no longer are the model."""
    model = tiny.build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([prompt(9)])
    logits = model(ids).logits
    first, second = TargetModel(model), TargetModel(model)
    attention = model.model.layers[1].self_attn
    for target in (first, second):
        heads: Any = target.layers[1].attention.heads
        assert heads.weight.data_ptr() == attention.q_proj.weight.data_ptr()
        assert heads.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(again.state_dict(), before, rtol=0, atol=0)


def test_other_families_run_stock_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """Catches norms at other places than Llama's silently computed as Llama's, and a warning a layer."""
    common = tiny.tiny_config("llama").to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    model = AutoModelForCausalLM.from_config(Olmo2Config(**{key: common[key] for key in keys}), dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        target = TargetModel(model, name="an olmo")
    assert target.engine == "stock"
    (record,) = [record for record in caplog.records if record.name.startswith("drafters")]
    assert "an olmo" in record.getMessage() and "olmo2" in record.getMessage()
    with pytest.raises(ValueError, match="engine 'fused' cannot run an olmo: .*olmo2.*use engine 'stock'"):
        TargetModel(model, name="an olmo", engine="fused")


@pytest.mark.parametrize("obstacle", ["hook", "adapter", "attention"])
def test_changed_layers_run_stock(obstacle: str) -> None:
    """Catches a model's changes (hooks, LoRA's layers, eager attention) ignored, whose output would differ."""
    model = tiny.build("llama")
    layer: Any = model.model.layers[2]
    if obstacle == "hook":
        layer.self_attn.register_forward_hook(lambda module, args, output: None)
    elif obstacle == "adapter":

        class Other(torch.nn.Linear):
            pass

        layer.mlp.up_proj.__class__ = Other
    else:
        model.set_attn_implementation("eager")
    assert TargetModel(model).engine == "stock"
    with pytest.raises(ValueError, match="cannot run"):
        TargetModel(model, engine="fused")


def test_lm_head_can_be_derived() -> None:
    """Catches gradients silently lost in the packed product: heads are trained through the target's LM head."""
    target = TargetModel(tiny.build("llama"))
    features = torch.randn(3, tiny.HIDDEN_SIZE, requires_grad=True)
    target.lm_head(features).square().sum().backward()
    weight = target.model.lm_head.weight
    assert features.grad is not None
    torch.testing.assert_close(features.grad, 2 * (features @ weight.T @ weight).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_packed_product_is_the_product(dtype: torch.dtype, biased: bool) -> None:
    """Catches a layout for one number of rows used at another, and a bias lost."""
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype) if biased else None
    product = Product(weight, bias)
    for rows in (1, 3, 33):
        x = torch.randn(2, rows, 48).to(dtype)
        plain = torch.nn.functional.linear(x, weight, bias)
        tolerance = {"rtol": 2e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(product(x), plain, **tolerance)


@pytest.mark.parametrize("lengths", [[0], [3], [255], [256], [257], [5, 5], [5, 2]])
@pytest.mark.parametrize(("rows", "offset"), [(1, 0), (4, 0), (4, 2), (70, 0)])
@pytest.mark.parametrize("window", [None, 8])
def test_bias_is_the_mask(lengths: list[int], rows: int, offset: int, window: int | None) -> None:
    """Catches columns of a window at the wrong place, and query heads that get another row's mask."""
    placed = Placed(Rows(offset=offset), lengths, rows, torch.device("cpu"))
    mask, bias = placed.mask(Scope(window)), placed.bias(Scope(window), 2, torch.float32)
    assert (mask is None) == (bias is None)
    if mask is not None and bias is not None:
        assert set(bias.unique().tolist()) <= {0.0, float("-inf")}
        seen = (bias == 0).expand(len(lengths), -1, -1, -1)
        assert seen.shape[2] == 2 * rows
        for group in range(2):
            assert torch.equal(seen[:, :, group * rows : (group + 1) * rows], mask.expand_as(seen[:, :, :rows]))
