"""Every family of transformers that looks like Llama from afar: exact, or refused with a reason before hours are spent.

Exact: the target decodes what stock ``generate`` does; with a learned head, too; and that head's decoding computes what
its training does.
"""

import logging
from typing import Any

import pytest
import tiny
import torch
from conformance import NO_EOS, prompt, rows_of
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from drafters import TargetModel, generate, make_drafter
from drafters.eagle import EagleDrafter, EagleHead, EagleOptions
from drafters.kangaroo import KangarooAdapter, KangarooDrafter, KangarooOptions
from drafters.model.self_check import ROWS
from train.attention import use_dialogue_attention

NEW_TOKENS = 12
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_shared_experts": 1}
EXPERTS |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
WINDOW = {"sliding_window": tiny.SLIDING_WINDOW}
WIDE = {"hidden_size": 64}  # where heads are hidden_size / heads wide
LATENT = WIDE | {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16}

HEADS: dict[str, dict[str, Any]] = {  # target and both heads are exact
    **{name: {} for name in ("llama", "mistral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")},
    **{name: {} for name in ("olmo2", "phi3", "phimoe", "starcoder2", "nemotron", "granite", "granitemoe", "smollm3")},
    **{name: {} for name in ("glm", "glm4", "arcee", "seed_oss", "ernie4_5", "apertus")},
    **dict.fromkeys(("ministral", "exaone4", "cwm"), WINDOW),
    **dict.fromkeys(("olmoe", "helium", "stablelm"), WIDE),
}
NO_HEADS: dict[str, tuple[dict[str, Any], str]] = {  # the target is exact, heads are refused
    "gemma": ({}, "its embedding is a GemmaTextScaledWordEmbedding, not a plain one"),
    "gpt_oss": (WINDOW, "scaled_dot_product_attention"),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "jetmoe": ({}, r"has no \['self_attn.o_proj in its layers'\]"),
    "olmo": ({}, "no attribute 'weight'"),
    "olmo3": (WINDOW, "layer_type"),
    "gemma2": (WINDOW, "caps its logits"),
    "gemma3_text": (WINDOW, "layer_type"),
    "cohere": ({}, "its logits are not what its LM head gives"),
    "cohere2": (WINDOW, "its logits are not what its LM head gives"),
    "deepseek_v3": (LATENT, "cannot be run layer by layer"),
    "doge": ({}, "layer 0 of 2 .* adds something else"),
    "phi": ({}, r"has no \['norm'\]"),
    **{name: ({}, "has no .*'embed_tokens'") for name in ("gpt2", "gpt_neox", "opt", "bloom")},
}


def build(family: str, changes: dict[str, Any]) -> Any:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {family}")
    options = {**tiny._COMMON, "num_hidden_layers": 2, "sliding_window": None, **EXPERTS, **changes}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options), dtype=torch.float32)
    for name, weights in model.named_parameters():
        if weights.dim() == 1 and name.endswith("weight"):  # norms start at one and biases at zero: nobody would see
            weights.data.uniform_(0.5, 1.5)
        elif weights.dim() == 1:
            weights.data.normal_(0, 0.3)
    model.generation_config.eos_token_id = None
    return model.eval()


def exact_target(family: str, changes: dict[str, Any]) -> tuple[TargetModel, list[list[int]]]:
    """A target that decodes as the stock model does, and what."""
    model = build(family, changes)
    ids = torch.tensor([prompt(ROWS)])  # longer than the windows
    stock = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[:, ROWS:].tolist()
    target = TargetModel(model, name=family)
    assert decode(target, make_drafter("autoregressive", target)) == stock
    return target, stock


def decode(target: TargetModel, drafter: Any) -> list[list[int]]:
    return rows_of(generate(target, drafter, [prompt(ROWS)], max_new_tokens=NEW_TOKENS, eos_token_id=NO_EOS))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


@pytest.mark.parametrize("family", HEADS)
def test_targets_and_heads_are_exact(family: str) -> None:
    """Catches a family that decodes something else than its model, a head that cannot be built where it could, and one
    that drafts otherwise than it was trained."""
    target, stock = exact_target(family, HEADS[family])
    states, tokens = torch.randn(1, ROWS, target.hidden_size), torch.tensor([prompt(ROWS, 1)])
    positions = torch.arange(ROWS)[None]
    eagle = EagleDrafter(target, EagleHead(target.config), EagleOptions(tree="dynamic", top_k=3, nodes=6))
    kangaroo = KangarooDrafter(target, KangarooAdapter(target.config), KangarooOptions(exit_layer=1, eta=0.0))
    for drafter in (eagle, kangaroo):
        assert decode(target, drafter) == stock
        drafter._cache = target.new_cache(1, 2 * ROWS, layers=1)
    trained = eagle.module(states, target.embed(tokens), positions)
    torch.testing.assert_close(eagle._extend(states, tokens), trained, atol=1e-3, rtol=1e-3)
    trained = kangaroo.module(states, positions)
    torch.testing.assert_close(
        target.runner.run(kangaroo._adapter, [states], kangaroo._cache)[0], trained, atol=1e-3, rtol=1e-3
    )
    for kind in (EagleHead, KangarooAdapter):
        use_dialogue_attention(kind(target.config), target.config)  # as at the start of a training


@pytest.mark.parametrize("family", NO_HEADS)
def test_heads_are_refused_with_a_reason(family: str) -> None:
    """Catches a training that ends after hours in a head that its target cannot draft with, or in a traceback."""
    changes, reason = NO_HEADS[family]
    target, _ = exact_target(family, changes)
    for kind in (EagleHead, KangarooAdapter):
        for device in ("cpu", "meta"):  # as training does, and as the features' run does beforehand
            with torch.device(device), pytest.raises(ValueError, match=f"no learned head .*'{family}': .*{reason}"):
                use_dialogue_attention(kind(target.config), target.config)


@pytest.mark.parametrize("family", REFUSED)
def test_targets_are_refused_with_a_reason(family: str) -> None:
    """Catches a traceback from deep inside where a family is not supported, and garbage where it is taken for one."""
    changes, reason = REFUSED[family]
    with pytest.raises(ValueError, match=reason):
        TargetModel(build(family, changes), name=family)


class Deaf(KangarooAdapter):
    """Takes no notice of a mask."""

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, mask: Any = None, *rest: Any, **named: Any
    ) -> Any:
        return super().forward(hidden, position_ids, None, *rest, **named)


class Forgetful(EagleHead):
    """Takes no notice of a cache."""

    def forward(self, *states: Any, cache: Any = None, **named: Any) -> Any:
        return super().forward(*states, **named)


def test_a_head_that_drafts_otherwise_than_it_trains_is_refused() -> None:
    """Catches a layer that takes packed dialogues for one, or one row for a text: no shape or argument shows it."""
    config = tiny.tiny_config("llama")
    with pytest.raises(ValueError, match="run on packed dialogues it gives something else"):
        use_dialogue_attention(Deaf(config), config)
    with pytest.raises(ValueError, match="run one row at a time it gives something else"):
        Forgetful(config)
