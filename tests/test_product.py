"""int8 and int4 targets: how far from the model they are, what they keep, and that drafting on them stays lossless."""

from pathlib import Path

import pytest
import tiny
import torch
from conformance import NO_EOS, prompt, rows_of
from rigged import eagle, perturbed

from drafters import TargetModel, generate, make_drafter
from drafters.methods.speculative import SpeculativeDrafter
from drafters.model import backend
from drafters.model.linear import GROUP, Int4, Int8, Product, Quantization, fit_groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_single_row_of_a_large_product(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the shape of what is returned, and another row's values, where one row is multiplied four times over."""
    monkeypatch.setattr("drafters.model.linear.LARGE", 1000)
    torch.manual_seed(0)
    weight, bias = torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype)
    for shape in ((1, 1, 48), (1, 48), (48,), (1, 2, 48)):
        x = torch.randn(shape).to(dtype)
        found, plain = Product(weight, bias)(x), torch.nn.functional.linear(x, weight, bias)
        assert found.shape == plain.shape
        torch.testing.assert_close(found, plain, rtol=2e-2, atol=1e-1 if dtype == torch.bfloat16 else 1e-4)


# int4 groups at least 32 inputs.
SIZES: dict[str, dict[str, int]] = {"int8": {}, "int4": {"hidden_size": 64, "intermediate_size": 96}}


def quantized(family: str = "llama", kind: Quantization = "int8") -> TargetModel:
    return TargetModel(tiny.build(family, **SIZES[kind]), quantize=kind)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_int8_product_is_near(dtype: torch.dtype, kernel: bool, biased: bool) -> None:
    """Catches scales of the wrong axis, a bias lost, and a way round a missing kernel that gives something else."""
    torch.manual_seed(0)
    weight = (torch.randn(70, 48) * torch.logspace(-2, 1, 70)[:, None]).to(dtype)  # outputs of very unequal size
    bias = torch.randn(70).to(dtype) if biased else None
    product = Product(weight, bias)
    product.quantize("int8")
    assert isinstance(product.quantized, Int8) and product.quantized.kernel
    product.quantized.kernel = kernel
    assert product.weight.numel() == 0 and product.nbytes < 0.6 * weight.nbytes + 400
    for rows in (1, 3, 33):
        x = torch.randn(2, rows, 48).to(dtype)
        plain = torch.nn.functional.linear(x, weight, bias).float()
        # Each weight is off by half a step of its row's scale at most; in bf16 the result's rounding comes on top.
        step = weight.float().abs().amax(1) / 127
        bound = 0.51 * step * x.float().abs().sum(-1, keepdim=True) + 1e-5
        if dtype == torch.bfloat16:
            bound = bound + 0.02 * (x.float().abs() @ weight.float().abs().T + 3)
        gap = (product(x).float() - plain).abs()
        assert (gap <= bound).all() and gap.max() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["ours", "torch", "spread"])
def test_int4_product_is_near(dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches groups along the wrong axis, nibbles swapped, a way round a missing kernel that gives something else."""
    if way != "ours":
        monkeypatch.setattr(backend, "pack", lambda *given: None)
    outputs, inputs = (70 if way == "spread" else 64), 96  # torch's CPU kernel takes multiples of 16
    weight = (torch.randn(outputs, inputs) * torch.logspace(-2, 1, inputs)).to(dtype)  # inputs of very unequal size
    weight[3, :GROUP], weight[5] = 0.5, 0.0  # groups of one value
    bias = torch.randn(outputs).to(dtype)
    product = Product(weight, bias)
    product.quantize("int4")
    four = product.quantized
    ours = way == "ours" and backend.pack(weight) is not None
    assert isinstance(four, Int4) and (four.cpu_weight is not None) == ours
    assert four.kernel == (way != "spread" and not ours)
    assert product.nbytes < weight.nbytes
    kept = (product(torch.eye(inputs, dtype=dtype)) - bias).T.float()
    grouped = weight.float().view(outputs, -1, GROUP)
    step = ((grouped.amax(-1) - grouped.amin(-1)) / 15).repeat_interleave(GROUP, dim=1)
    rounding = 0 if dtype == torch.float32 else 2**-7
    assert ((kept - weight.float()).abs() <= 1.01 * step + rounding * (weight.float().abs() + 3) + 1e-5).all()
    for rows in (1, 3, 33):
        x = torch.randn(2, rows, inputs).to(dtype)
        plain = torch.nn.functional.linear(x.float(), kept, bias.float())
        bound = 1e-3 + rounding * (x.float().abs() @ weight.float().abs().T + 3)
        assert ((product(x).float() - plain).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grid_is_found_again(dtype: torch.dtype) -> None:
    """Catches a model from a 4-bit file quantised to other steps than its own, which is a second loss."""
    scales, lowest = torch.rand(40, 3, 1) + 0.1, torch.randn(40, 3, 1)
    values = torch.randint(0, 16, (40, 3, GROUP))
    values[::2] = values[::2].clamp_max(11)  # the upper steps are not in use
    weight = (values * scales + lowest).to(dtype).float()
    found, steps, middles = fit_groups(weight, dtype)
    again = (found.float() - 8) * steps.float()[..., None] + middles.float()[..., None]
    step = scales.expand_as(weight)
    assert ((again - weight).abs() <= (0.01 if dtype == torch.float32 else 0.09) * step).all()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-sliding"])
def test_quantised_target_is_near(family: str) -> None:
    """Catches a projection quantised twice or not at all, and weights of the stock layers kept in memory."""
    plain, target = TargetModel(tiny.build(family)), quantized(family)
    ids = torch.tensor([prompt(20)])
    ours, theirs = (model.lm_head(model.features(ids).features).float() for model in (target, plain))
    similar = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)
    assert 0.96 < similar.min() < 1.0 - 1e-6
    layer = target.body.layers[1]
    assert sum(weights.numel() for weights in layer.self_attn.parameters() if weights.dim() > 1) == 0
    assert layer.mlp.down_proj.weight.numel() == 0
    assert target.bytes_read() < 0.5 * plain.bytes_read() and target.parameters == plain.parameters


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_drafting_on_it_is_lossless(kind: Quantization) -> None:
    """Catches rows of a block computed otherwise than one alone: what is kept must be the quantised target's own."""
    target, plain = quantized(kind=kind), TargetModel(tiny.build("llama", **SIZES[kind]))
    baseline = make_drafter("autoregressive", target)
    for drafter in (
        SpeculativeDrafter.from_options(target, draft_model=perturbed(plain, 0.05)),
        eagle(target, 0.4, "static"),
    ):
        for seed in range(3):
            options = {"max_new_tokens": 24, "eos_token_id": NO_EOS}
            expected = generate(target, baseline, [prompt(9, seed)], **options)
            found = generate(target, drafter, [prompt(9, seed)], **options)
            assert rows_of(found) == rows_of(expected)
            assert found.trace.tau > 1.0


def test_it_is_the_same_target(tmp_path: Path) -> None:
    """Catches a drafter of the target refused on its quantised form, or accepted on another's."""
    tiny.build("llama").save_pretrained(tmp_path)
    plain = TargetModel.from_pretrained(str(tmp_path), "float32")
    target = TargetModel.from_pretrained(str(tmp_path), "float32", quantize="int8")
    assert target.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize("tied", [False, True])
def test_the_lm_head_of_a_quantised_target(tied: bool) -> None:
    """Catches a head that is counted as it was, or whose quantising takes the tied embedding's weights along."""
    sizes = {"tie_word_embeddings": tied, **SIZES["int4"]}
    plain, target = (TargetModel(tiny.build("llama", **sizes).bfloat16(), quantize=kind) for kind in (None, "int8"))
    ids, features = torch.tensor([prompt(20)]), torch.randn(9, plain.hidden_size).bfloat16()
    assert torch.equal(target.embed(ids), plain.embed(ids))
    head = target.model.get_output_embeddings().weight
    gap = (target.lm_head(features).float() - features.float() @ head.float().T).abs().max()
    assert gap < 0.02 * plain.lm_head(features).float().abs().max()
    layers = sum(product.nbytes for layer in target.layers for product in layer.products)
    norms = sum(w.nbytes for name, w in target.model.named_parameters() if "norm" in name)
    read, whole = target.bytes_read() - layers - norms, 2 * head.numel()
    assert head.numel() < read < 0.7 * whole if backend.pack(head) is not None else read == whole
