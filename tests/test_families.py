"""Every family of transformers that looks like Llama from afar: exact, or refused with a reason before hours are spent.

Exact: the target decodes what stock ``generate`` does; with a learned head, too; and that head's decoding computes what
its training does.
"""

import logging
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny
import torch
from conformance import NO_EOS, prompt, rows_of
from published import assert_equal, served_features
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from drafters import TargetModel, generate, make_drafter
from drafters.config import HeadLayer
from drafters.hub.checkpoint import load_checkpoint, make_config, save_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import check, export, served_by
from drafters.methods.eagle import EagleDrafter, EagleHead, EagleOptions
from drafters.methods.kangaroo import KangarooAdapter, KangarooDrafter, KangarooOptions
from drafters.model.check import ROWS
from train.configs import EagleConfig
from train.core.attention import use_dialogue_attention
from train.preflight.estimate import meta_task

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
    "doge": ({}, "(layer|row) . .*adds something else"),
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
        if weights.dim() == 1 and name.endswith(
            "weight"
        ):  # norms start at one and biases at zero, where a fault is unseen
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
    options = EagleOptions(tree="dynamic", top_k=3, nodes=6)
    layers: tuple[HeadLayer, ...] = get_args(HeadLayer)
    heads = [EagleDrafter(target, EagleHead(target.config, layer=layer), options) for layer in layers]
    kangaroo = KangarooDrafter(target, KangarooAdapter(target.config), KangarooOptions(exit_layer=1, eta=0.0))
    for drafter in (*heads, kangaroo):
        assert decode(target, drafter) == stock
        drafter._cache = target.new_cache(1, 2 * ROWS, layers=1)
    for eagle in heads:
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
    if family == "gemma":  # whose embedding is scaled, which no layer of a head makes up for
        with pytest.raises(ValueError, match=f"no learned head .*'{family}': .*{reason}"):
            EagleHead(target.config, layer="llama")


@pytest.mark.parametrize("family", REFUSED)
def test_targets_are_refused_with_a_reason(family: str) -> None:
    """Catches a traceback from deep inside where a family is not supported, and garbage where it is taken for one."""
    changes, reason = REFUSED[family]
    with pytest.raises(ValueError, match=reason):
        TargetModel(build(family, changes), name=family)


SGLANG = {"glm4", "gpt_oss", "llama", "mistral", "qwen2", "qwen3"}
# hidden_size is heads times head_dim, which the official code wants, but for the last one.
WIDTHS: list[tuple[str, dict[str, Any]]] = [("gpt_oss", NO_HEADS["gpt_oss"][0] | WIDE), ("qwen3", {})]
WIDTHS += [(name, HEADS[name] | WIDE) for name in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "glm4", "olmo2")]


@pytest.mark.parametrize(("family", "changes"), WIDTHS)
def test_a_head_goes_where_the_dry_run_says(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Catches a trained head that no engine serves, a dry run that names an engine which the export refuses, a
    config.json of another RoPE, width or norm than the head's, and what --check refuses of our own."""
    target = TargetModel(build(family, changes), name=str(tmp_path / "target"))
    target.model.save_pretrained(target.name)
    given = {"target": target.name, "features": "f", "out": "o", "steps": 1, "batch_tokens": 8, "learning_rate": 0.1}
    options = meta_task(EagleConfig(**given), target.config).drafter_config()
    assert options["layer"] == ("target" if family in ("llama", "mistral", "mixtral", "qwen2") else "llama")
    head: Any = EagleDrafter.build_module(target.config, options)
    for weights in head.parameters():
        weights.data.normal_(1.0 if weights.dim() == 1 else 0.0, 0.2)
    save_checkpoint(tmp_path / "head", head, make_config("eagle", options, target), dtype=None)
    reasons = served_by("eagle", options, target.config)
    assert reasons["vllm"] is None
    assert (reasons["official"] is None) == (family in ("llama", "mixtral", "qwen2", "qwen3") and changes != {})
    assert (reasons["sglang"] is None) == (family in SGLANG)
    states, tokens = torch.randn(1, ROWS, target.hidden_size), target.embed(torch.tensor([prompt(ROWS, 1)]))
    positions = torch.arange(ROWS)[None]
    for to in ("vllm", "sglang", "official"):
        out = tmp_path / to
        if to == "official" and (reason := reasons[to]) is not None and "runs no targets" not in reason:
            with pytest.raises(ValueError, match=re.escape(f"cannot be exported for the official code: {reason}")):
                export(str(tmp_path / "head"), to, out)
            continue
        notes = export(str(tmp_path / "head"), to, out)  # the layout, also where the engine has no such target
        assert (reasons[to] is None) == (not notes), notes
        assert check(out, to, target.name).endswith(f", for {target.name}")
        convert(str(out), target.name, tmp_path / f"{to}-back")
        config, weights = load_checkpoint(tmp_path / f"{to}-back")
        back: Any = EagleDrafter.build_module(target.config, config["drafter"])
        back.load_state_dict(weights)
        ours = head(states, tokens, positions)
        assert torch.equal(back(states, tokens, positions), ours)
        assert_equal(served_features(out, states, tokens), ours)


def test_a_llama_layer_turns_by_its_own_rope_in_16_bits() -> None:
    """Catches angles of the target's, which some families keep in float32 or for a part of each head."""
    for family in ("olmo2", "glm"):
        target = TargetModel(build(family, {}).bfloat16(), name=family)
        drafter = EagleDrafter(target, EagleHead(target.config, layer="llama"), EagleOptions(tree="chain", depth=2))
        assert len(decode(target, drafter)[0]) == NEW_TOKENS


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
