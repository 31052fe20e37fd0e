"""Every family of transformers that takes a tree: exact, or refused with a reason before hours are spent.

Exact: the target decodes what stock ``generate`` does; with a learned head, too; and that head's decoding computes what
its training does. What works with which family is in docs/targets.md, which tests/families.py writes.
"""

import logging
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny
import torch
from by_keys import new_head
from conformance import prompt
from families import DECODED, PAGE, REFUSED, WIDE, WINDOW, build, decode, trial
from published import assert_equal, served_features
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma3Config,
    Kosmos2Config,
    LlavaConfig,
    Mistral3Config,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from drafters import TargetModel, make_drafter
from drafters.config import HeadLayer
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.hub.checkpoint import load_checkpoint, make_config, save_checkpoint
from drafters.layouts.convert import convert
from drafters.layouts.export import check, export, served_by
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.methods.kangaroo import KangarooDrafter, KangarooOptions
from drafters.model.check import ROWS
from drafters.model.ends import load_frozen_ends
from drafters.model.text_lm import with_causal_lm
from train.core.attention import use_dialogue_attention
from train.eagle import EagleConfig
from train.preflight.estimate import meta_task

NEW_TOKENS = 12
OWN_LAYERS = (
    "llama",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "olmo2",
    "phi3",
    "glm4",
    "nemotron",
    "exaone4",
    "gemma",
    "deepseek_v3",
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def known(family: str) -> None:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {family}")


# make test tries these, which have every kind of mask, cap, factor and expert, and make test-long the others.
KINDS = {"llama", "mixtral", "qwen3", "qwen3_moe", "glm4", "phi3", "gpt_oss", "gpt2", "deepseek_v3", "gemma3_text"}
KINDS |= {"gemma4_text", "granite", "cohere2", "llama4_text", "qwen3_next", "bamba", "mamba", "lfm2", "minimax"}


def in_time(family: str) -> Any:
    """Of make test, or of make test-long."""
    return family if family in KINDS else pytest.param(family, marks=pytest.mark.long)


@pytest.mark.parametrize("family", [in_time(family) for family in DECODED])
def test_a_family_does_what_the_page_says(family: str, tmp_path: Path) -> None:
    """Catches a family that decodes something else than its model, or that a head no longer fits."""
    known(family)
    row = trial(family, tmp_path)
    assert f"| {family} | {' | '.join(row.values())} |" in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_is_refused_with_a_reason(family: str) -> None:
    """Catches a traceback from deep inside, garbage, and a model whose states cannot be captured either."""
    known(family)
    changes, reason = REFUSED[family]
    model = build(family, changes)
    with pytest.raises(ValueError, match=reason):
        TargetModel(model, name=family)
    captured = TargetModel(model, name=family, capture_only=True)
    ids = torch.tensor([prompt(ROWS)])
    output = captured.features(ids, taps=(1,))
    torch.testing.assert_close(captured.lm_head(output.features), model(ids, use_cache=False).logits)
    with pytest.raises(ValueError, match="can only be captured"):
        captured.new_cache(1, 8)


@pytest.mark.parametrize("family", OWN_LAYERS)
def test_a_head_drafts_as_it_trains(family: str) -> None:
    """Catches a head of the target's own layers, or of Llama's, that drafts otherwise than it was trained."""
    target = TargetModel(build(family, DECODED[family]), name=family)
    expected = decode(target, make_drafter("autoregressive", target), [prompt(ROWS)], NEW_TOKENS)
    states, tokens = torch.randn(1, ROWS, target.hidden_size), torch.tensor([prompt(ROWS, 1)])
    positions = torch.arange(ROWS)[None]
    options = EagleOptions(tree="dynamic", top_k=3, nodes=6)
    layers: tuple[HeadLayer, ...] = get_args(HeadLayer)
    heads = [EagleDrafter(target, EagleHead(target.config, EagleShape(layer=layer)), options) for layer in layers]
    for eagle in heads:
        assert decode(target, eagle, [prompt(ROWS)], NEW_TOKENS) == expected
        eagle.head.cache = target.new_cache(1, 2 * ROWS, 1, eagle.head.layer)
        trained = eagle.module(states, target.embed(tokens), positions)
        torch.testing.assert_close(eagle.head.extend(states, tokens), trained, atol=1e-3, rtol=1e-3)
    kangaroo = KangarooDrafter(
        target, KangarooAdapter(target.config, KangarooShape(exit_layer=1)), KangarooOptions(eta=0.0)
    )
    cache = target.new_cache(1, 2 * ROWS, layers=1)
    found = target.runner.run(kangaroo.head.part, [states], cache)[0]
    torch.testing.assert_close(found, kangaroo.module(states, positions), atol=1e-3, rtol=1e-3)
    for head in (EagleHead(target.config), KangarooAdapter(target.config, KangarooShape(exit_layer=1))):
        use_dialogue_attention(head, target.config)  # as at the start of a training


SGLANG = {"glm4", "gpt_oss", "llama", "mistral", "qwen2", "qwen3"}
# hidden_size is heads times head_dim, which the official code wants, but for the last one.
WIDTHS: list[tuple[str, dict[str, Any]]] = [("gpt_oss", WINDOW | WIDE), ("qwen3", {})]
WIDTHS += [(name, DECODED[name] | WIDE) for name in ("llama", "mistral", "mixtral", "qwen2", "qwen3", "glm4", "olmo2")]


@pytest.mark.parametrize(("family", "changes"), WIDTHS)
def test_a_head_goes_where_the_dry_run_says(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Catches a trained head that no engine serves, a dry run that names an engine which the export refuses, a
    config.json of another RoPE, width or norm than the head's, and what --check refuses of our own."""
    target = TargetModel(build(family, changes), name=str(tmp_path / "target"))
    target.model.save_pretrained(target.name)
    given = {"target": target.name, "features": "f", "out": "o", "steps": 1, "batch_tokens": 8, "learning_rate": 0.1}
    options = meta_task(EagleConfig(**given), target.config).head.stored()
    assert options["layer"] == ("target" if family in ("llama", "mistral", "mixtral", "qwen2") else "llama")
    head: Any = new_head(EagleDrafter, target.config, **options)
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
        back: Any = new_head(EagleDrafter, target.config, **config["drafter"])
        back.load_state_dict(weights)
        ours = head(states, tokens, positions)
        assert torch.equal(back(states, tokens, positions), ours)
        assert_equal(served_features(out, states, tokens), ours)


def test_a_llama_layer_turns_by_its_own_rope_in_16_bits() -> None:
    """Catches angles of the target's, which some families keep in float32 or for a part of each head."""
    for family in ("olmo2", "glm"):
        target = TargetModel(build(family, {}).bfloat16(), name=family)
        drafter = EagleDrafter(
            target, EagleHead(target.config, EagleShape(layer="llama")), EagleOptions(tree="chain", depth=2)
        )
        assert len(decode(target, drafter, [prompt(ROWS)], NEW_TOKENS)[0]) == NEW_TOKENS


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
        use_dialogue_attention(Deaf(config, KangarooShape(exit_layer=1)), config)
    with pytest.raises(ValueError, match="run one row at a time it gives something else"):
        Forgetful(config)


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}


# The text model's own layers of Qwen-VL take positions of three kinds, which are equal for text.
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
TEXTS: list[tuple[Any, str, dict[str, Any]]] = [(LlavaConfig, "llama", {}), (Mistral3Config, "mistral", {})]
TEXTS += [(Gemma3Config, "gemma3_text", DECODED["gemma3_text"]), (Qwen2_5_VLConfig, "qwen2_5_vl_text", WIDE | ROPE)]
TEXTS += [(Qwen3VLConfig, "qwen3_vl_text", ROPE)]


@pytest.mark.parametrize(("kind", "text", "changes"), TEXTS)
def test_the_text_model_of_a_multimodal_folder(kind: Any, text: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Catches a traceback, the list of all families, and an embedding or a fingerprint of something else."""
    inner = {**tiny._COMMON, **changes, "model_type": text, "num_hidden_layers": 2}
    whole = AutoModelForImageTextToText.from_config(kind(text_config=inner, vision_config=VISION)).eval()
    whole.save_pretrained(tmp_path)
    if text == "qwen2_5_vl_text":  # named as in the released files
        found = load_file(tmp_path / "model.safetensors")
        assert any(key.startswith("visual.") for key in found) and "model.layers.0.input_layernorm.weight" in found
    target = TargetModel.from_pretrained(str(tmp_path), "float32", "cpu")
    ids = torch.tensor([prompt(ROWS)])
    torch.testing.assert_close(target.lm_head(target.features(ids).features), whole(ids).logits, atol=1e-4, rtol=1e-4)
    ends = load_frozen_ends(str(tmp_path), "float32")
    assert ends.fingerprint == target.fingerprint() and torch.equal(ends.embed(ids), target.embed(ids))


def test_the_last_logits_of_a_text_model() -> None:
    """Catches logits of the first tokens, where stock decoding and capture ask for those of the last, and tied
    ends that are drawn apart."""
    config = Qwen3VLConfig(
        text_config={**tiny._COMMON, **ROPE, "num_hidden_layers": 2}, vision_config=VISION
    ).text_config
    assert with_causal_lm(config)
    config.tie_word_embeddings = True
    tied = AutoModelForCausalLM.from_config(config)
    assert tied.get_output_embeddings().weight is tied.get_input_embeddings().weight
    config.tie_word_embeddings = False
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.tensor([prompt(9)])
    whole = model(ids).logits
    assert whole.shape[1] == 9 and not torch.equal(whole[:, 0], whole[:, -1])
    for last in (1, 3):
        torch.testing.assert_close(model(ids, logits_to_keep=last).logits, whole[:, -last:], atol=1e-5, rtol=1e-5)
    first = model(ids[:, :5], use_cache=True)
    rest = model(ids[:, 5:], past_key_values=first.past_key_values)
    torch.testing.assert_close(rest.logits, whole[:, 5:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, whole)
    assert not with_causal_lm(Kosmos2Config().text_config) and not with_causal_lm(Qwen3VLConfig().vision_config)


def test_a_multimodal_model_without_a_causal_lm(tmp_path: Path) -> None:
    """Catches a traceback, or a list of all families that transformers has."""
    Kosmos2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a multimodal model .* no causal LM for its text model") as caught:
        TargetModel.from_pretrained(str(tmp_path))
    assert len(str(caught.value)) < 300
