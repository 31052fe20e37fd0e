"""The bound of the check at loading comes from the model's rounding, which depends on its weights and on the device."""

import random
from typing import Any

import pytest
import tiny
import torch
from test_self_check import load
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from drafters.model import check


def random_model(kind: str, seed: int) -> PreTrainedModel:
    """A random model in bf16, of a family, depth, width and spread of weights that the seed chooses."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 160, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": choose.choice((0.02, 0.2, 0.4))}
    if kind == "deep":
        sizes |= {"num_hidden_layers": choose.choice((12, 24, 32)), "hidden_size": 128, "num_attention_heads": 2}
    elif kind == "wide":
        sizes |= {"hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 2048, "num_hidden_layers": 2}
    else:
        sizes["initializer_range"] = choose.choice((0.5, 1.0))
    family = choose.choice((LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config))
    sizes |= {"head_dim": 64} if family is Qwen3Config else {}
    model = AutoModelForCausalLM.from_config(family(**sizes), dtype=torch.bfloat16)
    for name, weights in model.named_parameters():
        if weights.dim() == 1:
            weights.data.uniform_(0.5, 1.5) if "norm" in name else weights.data.normal_()
    model.eval()
    return model


# The first were refused by a bound that knew the number of layers only.
SEEDS = {"large": (1, 17), "wide": (45,), "deep": (5,)}


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for kind, seeds in SEEDS.items() for seed in seeds])
def test_right_models_load_in_bf16(kind: str, seed: int) -> None:
    """Catches a bound on errors that does not come from the model: some amplify rounding more than others."""
    for engine in ("fused", "stock"):
        load(random_model(kind, seed), "bfloat16", engine)


@pytest.mark.long
@pytest.mark.parametrize("kind", SEEDS)
def test_many_right_models_load_in_bf16(kind: str) -> None:
    """Catches a right model of 50 that is refused."""
    for seed in range(50):
        load(random_model(kind, seed), "bfloat16")


@pytest.mark.parametrize("engine", ["stock", "fused"])
def test_rounding_of_products_counts_in_float32(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a right model refused because float32 is multiplied in fewer bits, and a wrong one taken for that."""
    torch.set_float32_matmul_precision("medium")  # bf16, where a CPU multiplies bf16
    try:
        for seed in range(3):
            load(tiny.build("llama", seed), "float32", engine)
            load(tiny.build("mistral-sliding", seed), "float32", engine)
        model = tiny.build("llama")
        over = check._over_a_tree
        monkeypatch.setattr(check, "_over_a_tree", lambda *given: [rows.roll(1, -1) for rows in over(*given)])
        with pytest.raises(ValueError, match="other features over a tree"):
            load(model, "float32", engine)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_products_in_fewer_bits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the unit of float32 for a device that multiplies in TF32, or that of TF32 for one that does not."""
    found = load(tiny.build("llama"), "float32")
    assert check._unit(found) == torch.finfo(torch.float32).eps
    linear = F.linear
    coarse = lambda given, weights: linear((given.view(torch.int32) & ~8191).view(torch.float32), weights)  # noqa: E731
    monkeypatch.setattr(F, "linear", coarse)  # 10 bits of 23 are left
    assert 2**-10 <= check._unit(found) < 2**-8


def test_a_precision_set_by_the_newer_way() -> None:
    """Catches a load that asks torch for the older setting, which then raises an error."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        load(tiny.build("llama"), "float32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def test_little_rounding_allows_little_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a bound that is too wide for a model that hardly amplifies rounding: an error of 5% in all rows."""
    model, over = tiny.build("llama", initializer_range=0.02), check._over_a_tree
    noisy = lambda *given: [rows * (1 + 0.05 * torch.randn_like(rows)) for rows in over(*given)]  # noqa: E731
    monkeypatch.setattr(check, "_over_a_tree", noisy)
    with pytest.raises(ValueError, match=r"bound 0\.0[34]"):
        load(model, "bfloat16")


def test_rounding_is_measured_without_others_random_numbers() -> None:
    """Catches a load that changes what another thread draws next, and a bound that differs from load to load."""
    model = random_model("large", 1)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found = load(model, "bfloat16")
    assert torch.equal(torch.rand(3), expected)
    ids = torch.arange(3, 15)[None]
    assert check.most_allowed(found, ids, 1.0) == check.most_allowed(found, ids, 1.0) > 0.05
