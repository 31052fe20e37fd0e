"""Whole layers by our kernels against the same layers by torch's operations, both measured against float32."""

from typing import Any

import pytest
import torch
from conformance import NO_EOS, prompt, rows_of
from test_cpu_kernels import needs_tiles
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from drafters import TargetModel, generate, make_drafter
from drafters.cpu import layers as cpu_layers
from drafters.cpu.layers import JoinedLayers, cpu_layer
from drafters.loop.tree import ROOT, DraftTree
from drafters.model import backend
from drafters.model.fused import FusedLayer
from drafters.model.layers import AttentionLayer, layer_kind
from drafters.model.rows import CHAIN, Placed, Rows
from drafters.model.runner import Part, PartLayer

pytestmark = needs_tiles
SIZES: dict[str, Any] = {"vocab_size": 97, "intermediate_size": 160, "num_hidden_layers": 3, "initializer_range": 0.2}
HEADS = {
    (64, 2): {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    (32, 3): {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1},
    (96, 1): {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 2},
    (128, 4): {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 1},
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, **HEADS[64, 2]),
    "heads of 32": LlamaConfig(**SIZES, **HEADS[32, 3], attention_bias=True, mlp_bias=True),
    "heads of 96": LlamaConfig(**SIZES, **HEADS[96, 1]),
    "heads of 128": LlamaConfig(**SIZES, **HEADS[128, 4]),
    "a window": MistralConfig(**SIZES, **HEADS[64, 2], sliding_window=24),
    "biases": Qwen2Config(**SIZES, **HEADS[64, 2]),
    "head norms": Qwen3Config(**SIZES, **HEADS[64, 2], head_dim=32),
}


def model_of(name: str, dtype: torch.dtype) -> Any:
    """With norms and biases that are not one and zero, where leaving one out would be unseen."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    for path, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.uniform_(0.5, 1.5) if "norm" in path else parameter.data.normal_()
    return model.bfloat16().to(dtype).eval()


def random_tree(batch: int, rows: int) -> Rows:
    """Of a root's ``rows`` descendants, each a child of one before it."""
    generator = torch.Generator().manual_seed(rows)
    parents = [[ROOT, *(int(torch.randint(ROOT, i, (), generator=generator)) for i in range(1, rows - 1))]] * batch
    see = DraftTree(torch.zeros(batch, rows - 1, dtype=torch.long), torch.tensor(parents)).ancestors()
    return Rows(see, see.sum(-1) - 1)


def steps(target: TargetModel, context: int) -> list[Tensor]:
    """Features, and states between layers, of chains and trees of many sizes, of two prompts and of one alone."""
    lengths = [context, context // 2]
    ids = torch.tensor([prompt(context), prompt(context, 1)])
    cache = target.new_cache(2, 2 * context + 80)
    found = [target.run(ids, cache, taps=(1,)).taps[1], target.run(ids, cache).features]
    cache.commit_first(lengths)
    found.append(target.run(ids[:, 3:], cache).features)  # a prompt behind another
    for rows in (1, 2, 3, 5, 9, 17, 30):
        new = torch.tensor([prompt(rows, 2), prompt(rows, 3)])
        found.append(target.run(new, cache, taps=(1,)).taps[1])
        found.append(target.run(new, cache).features)
        if rows > 1:
            found.append(target.run(new, cache, random_tree(2, rows)).features)
            found.append(target.run(new[:, 1:], cache, Rows(offset=1)).features)
    alone = target.new_cache(1, context + 80)
    target.run(ids[:1, : context // 2], alone)
    alone.commit_first([context // 2])
    for rows in (1, 4, 40):
        new = torch.tensor([prompt(rows, 4)])
        found.append(target.run(new, alone, random_tree(1, rows) if rows > 4 else CHAIN).features)
    short = target.new_cache(1, 50)
    return [*found, target.run(ids[:1, :40], short).features]


def by_torch(target: TargetModel) -> TargetModel:
    """The target with its layers one by one, through torch's operations."""
    assert all(cpu_layer(layer) is not None for layer in target.layers)
    one_by_one(target.part(0, None), *((tap,) for tap in range(4)), (0, 1, 3))
    return target


def one_by_one(part: Part, *taps: tuple[int, ...]) -> None:
    part.joined = dict.fromkeys(((), *taps), part.layers)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@torch.inference_mode()
@pytest.mark.parametrize(("name", "context"), [("llama", 20), *((name, 300) for name in CONFIGS)])
def test_layers_are_as_near_to_float32_as_torch_comes(name: str, context: int) -> None:
    """Catches angles, masks, windows, biases, norms or cache slots of another row, head or batch row; a part of a long
    row left out; keys that were not written before they are read.
    """
    exact = steps(TargetModel(model_of(name, torch.float32), engine="stock"), context)
    ours = steps(TargetModel(model_of(name, torch.bfloat16)), context)
    torchs = steps(by_torch(TargetModel(model_of(name, torch.bfloat16))), context)
    for wanted, found, other in zip(exact, ours, torchs, strict=True):
        assert found.shape == other.shape and error(found, wanted) < 2 * error(other, wanted) + 0.004
    wanted, found, other = (torch.cat([each.flatten() for each in states]) for states in (exact, ours, torchs))
    assert error(found, wanted) < 1.25 * error(other, wanted)  # a step of a few rows varies, all together do not


def test_layers_at_every_level(level: str) -> None:
    """Catches attention by tiles that is right with a matrix unit alone, or with none."""
    test_layers_are_as_near_to_float32_as_torch_comes("llama", 300)


@torch.inference_mode()
@pytest.mark.parametrize("context", [1100, 2500])
def test_long_rows(context: int) -> None:
    """Catches a task of several parts of a row that keeps one of them, or weighs them alike, and one that ends before
    its last part does.
    """
    found: dict[str, list[Tensor]] = {"float32": [], "ours": [], "torch's": []}
    for way, states in found.items():
        target = TargetModel(model_of("llama", torch.float32 if way == "float32" else torch.bfloat16))
        target = by_torch(target) if way == "torch's" else target
        ids = torch.tensor([prompt(context), prompt(context, 1)])
        cache = target.new_cache(2, context + 80)
        for start in range(0, context, 500):
            target.run(ids[:, start : start + 500], cache)
            cache.commit_first([min(500, context - start)] * 2)
        cache.lengths = [context, context // 2 + 7]
        for rows in (3, 33):
            new = torch.tensor([prompt(rows, 2), prompt(rows, 3)])
            states.append(target.run(new, cache).features)
            states.append(target.run(new, cache, random_tree(2, rows)).features)
    for exact, ours, torchs in zip(*found.values(), strict=True):
        assert error(ours, exact) < 1.2 * error(torchs, exact) + 0.004


@torch.inference_mode()
@pytest.mark.parametrize("rows", [128, 129, 385, 513])
def test_prompts_of_wide_layers(rows: int) -> None:
    """Catches rows that are multiplied part by part, of a layout that has all rows between two of a row's columns."""
    config = LlamaConfig(**SIZES | {"intermediate_size": 6144, "num_hidden_layers": 1}, **HEADS[64, 2])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    target, ids = TargetModel(model), torch.tensor([prompt(rows)])
    found = target.run(ids, target.new_cache(1, rows)).features[0]
    wanted = by_torch(target).run(ids, target.new_cache(1, rows)).features[0]
    assert max(error(one, other.float()) for one, other in zip(found, wanted, strict=True)) < 0.1


@torch.inference_mode()
def test_a_large_batch_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches angles, masks, slots or states of the first part in place of a later one's."""
    target = TargetModel(model_of("llama", torch.bfloat16))
    batch = torch.tensor([prompt(40, row) for row in range(5)])
    found = []
    for together in (1024, 100, 1):
        monkeypatch.setattr(cpu_layers, "ROWS_PER_CALL", together)
        cache = target.new_cache(5, 100)
        target.run(batch, cache)
        cache.commit_first([40, 30, 20, 10, 5])
        found.append(
            torch.cat([target.run(batch, cache).features, target.run(batch, cache, random_tree(5, 40)).features])
        )
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@torch.inference_mode()
def test_layers_in_one_call_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a layer skipped, run twice or fed another's states, keys written to another layer's slots, taps of the
    wrong place, layers that are never run in one call, and a stack that goes on with the weights of before."""
    target, ids = TargetModel(model_of("llama", torch.bfloat16)), torch.tensor([prompt(30, row) for row in range(2)])
    counts: list[int] = []
    run = JoinedLayers.__call__

    def counted(self: JoinedLayers, *given: Any) -> Tensor:
        counts.append(len(self._pointers))
        return run(self, *given)

    def outputs(taps: tuple[int, ...]) -> list[Tensor]:
        cache = target.new_cache(2, 60)
        target.run(ids, cache, taps=taps)
        cache.commit_first([30, 20])
        output = target.run(ids[:, :7], cache, random_tree(2, 7), taps=taps)
        first_two = target.shallow(ids[:, :5], target.new_cache(2, 9), 2)
        written = [keys[:, :, :37] for keys in cache.keys]
        return [output.features, first_two, *(output.taps[tap] for tap in taps), *written]

    monkeypatch.setattr(JoinedLayers, "__call__", counted)
    join = backend.join_layers
    for quantize in (False, True):
        if quantize:
            for layer in target.layers:
                layer.quantize_products("int8")
        found = []
        for together in (True, False):
            target._parts.clear()
            each = lambda layers, taps: [part for layer in layers for part in join([layer], taps)]  # noqa: E731
            monkeypatch.setattr(backend, "join_layers", join if together else each)
            found.append([outputs(taps) for taps in ((), (1,), (0, 1, 3))])
            assert set(counts) == ({3, 2, 1} if together else {1})
            counts.clear()
        for ours, other in zip(found[0], found[1], strict=True):
            assert all(torch.equal(one, two) for one, two in zip(ours, other, strict=True))


@torch.inference_mode()
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_layers(quantize: Any) -> None:
    """Catches layers that go on with the weights of before, or scales that are lost on the way."""
    ours = TargetModel(model_of("biases", torch.bfloat16), quantize=quantize)
    torchs = by_torch(TargetModel(model_of("biases", torch.bfloat16), quantize=quantize))
    whole = steps(TargetModel(model_of("biases", torch.bfloat16)), 20)
    found, other = steps(ours, 20), steps(torchs, 20)
    for one, two, unquantised in zip(found, other, whole, strict=True):
        assert error(one, two.float()) < 0.5 * error(two, unquantised.float())


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["without a first norm", "without an MLP"])
def test_layers_of_heads(kind: str) -> None:
    """Catches EAGLE's layer normed, and Kangaroo's adapter sent through an MLP that it does not have."""
    model = model_of("llama", torch.bfloat16)
    layer: Any = model.model.layers[0]
    if kind == "without a first norm":
        layer.input_layernorm = nn.Identity()
    else:
        stock, layer = layer, AttentionLayer(layer_kind(model.config)).bfloat16()
        layer.load_state_dict(stock.state_dict(), strict=False)
    target = TargetModel(model_of("llama", torch.bfloat16))
    hidden = torch.randn(2, 12, 256).bfloat16()
    found = []
    for whole in (True, False):
        part, cache = Part([PartLayer(FusedLayer(layer), 0)]), target.new_cache(2, 20, 1)
        assert cpu_layer(part.layers[0].layer) is not None
        if not whole:
            one_by_one(part)
        target.runner.run(part, [hidden[:, :5]], cache)
        cache.commit_first([5, 4])
        found.append(target.runner.run(part, [hidden[:, 5:]], cache)[0])
    assert error(found[0], found[1].float()) < 0.01


@torch.inference_mode()
@pytest.mark.parametrize("reason", ["experts", "another activation", "narrow heads", "norms in float32"])
def test_layers_that_are_not_for_them(reason: str) -> None:
    """Catches a layer computed as another one, float32 read as pairs of bf16, a model that cannot be loaded."""
    config: PretrainedConfig = LlamaConfig(**SIZES, **HEADS[64, 2])
    if reason == "norms in float32":
        layer: Any = model_of("llama", torch.bfloat16).model.layers[0]
        assert cpu_layer(FusedLayer(layer)) is not None
        layer.post_attention_layernorm.float()
        assert cpu_layer(FusedLayer(layer)) is None
        return
    if reason == "another activation":
        config.hidden_act = "gelu"
    if reason == "experts":
        config = MixtralConfig(**SIZES, **HEADS[64, 2], num_local_experts=2, num_experts_per_tok=1)
    elif reason == "narrow heads":
        config = LlamaConfig(**SIZES, **HEADS[64, 2], head_dim=16)
    target = TargetModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval())
    assert target.engine == "fused" and all(cpu_layer(layer) is None for layer in target.layers)


@torch.inference_mode()
@pytest.mark.parametrize("context", [4, 20, 141])
def test_what_is_not_a_number_stays_where_it_is(context: int) -> None:
    """Catches slots beyond the last that are multiplied by zero: of a draft that overflowed and was rejected."""
    target = TargetModel(model_of("llama", torch.bfloat16))
    cache = target.new_cache(1, context + 60)
    for memory in cache.keys + cache.values:
        memory.fill_(torch.nan)
    target.run(torch.tensor([prompt(context)]), cache)
    cache.commit_first([context])
    for rows in (1, 5, 18):
        assert target.run(torch.tensor([prompt(rows)]), cache).features.isfinite().all()
        assert target.run(torch.tensor([prompt(rows + 1)]), cache, random_tree(1, rows + 1)).features.isfinite().all()


@torch.inference_mode()
def test_a_prompt_of_another_length_changes_nothing() -> None:
    """Catches rows of a batch that see each other's slots, or memory of an earlier forward: what follows a prompt would
    depend on what was decoded before it.
    """
    target = TargetModel(model_of("llama", torch.bfloat16))
    drafter = make_drafter("autoregressive", target)
    prompts = [prompt(9), prompt(140, 1), prompt(33, 2)]
    together = rows_of(generate(target, drafter, prompts, max_new_tokens=24, eos_token_id=NO_EOS))
    again = rows_of(generate(target, drafter, prompts[::-1], max_new_tokens=24, eos_token_id=NO_EOS))[::-1]
    assert together == again


@torch.inference_mode(False)
def test_gradients_go_through_torch() -> None:
    """Catches a head that is trained on a target's layers and gets no gradient, for the kernels have none."""
    target = TargetModel(model_of("llama", torch.bfloat16))
    (layer,) = backend.join_layers(target.part(0, 1).layers, ())
    assert isinstance(layer.layer, JoinedLayers)
    hidden = torch.randn(1, 4, 256, dtype=torch.bfloat16)
    angles = target.runner.rope(Placed(CHAIN, [0], 4, hidden.device))
    wanted = hidden.clone().requires_grad_()
    layer.layer(wanted, angles, None, None, 0).float().square().sum().backward()
    assert wanted.grad is not None and wanted.grad.abs().sum() > 0
    with torch.no_grad():
        found = layer.layer(hidden, angles, None, None, 0)
    other = target.layers[0](hidden, angles, None, None, 0)
    assert found.grad_fn is None and error(found, other.float()) < 0.01
