"""EAGLE-3: the head equals a forward written from its description, and drafts as it does from scratch."""

import math
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from by_keys import new_head
from conformance import NO_EOS, check_children, each_draft, prompt, target_of
from rigged import eagle3
from tiny import HIDDEN_SIZE, VOCAB_SIZE
from torch import Tensor

from drafters import TargetModel, generate, load_drafter
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.eagle import Eagle3Drafter, Eagle3Options

VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "small-vocabulary": {"kept": 60},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "qwen3": {"layer": "qwen3", "layers": 2, "own_lm_head": False},
    "window": {"sliding_window": 4, "layers": 2},  # shorter than a prompt, as long as a draft
}


def rms(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps) * weight


def turned(heads: Tensor, theta: float) -> Tensor:
    """RoPE of ``[T, heads, D]`` at positions 0 .. T - 1, in two halves."""
    length, _, width = heads.shape
    frequencies = theta ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None, None] * frequencies  # [T, 1, D / 2]
    first, second = heads.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def described(
    weights: dict[str, Tensor], config: Any, options: Eagle3Shape, features: Tensor, tokens: Tensor
) -> Tensor:
    """The head's layers over ``features [T, H]`` and embeddings ``tokens [T, H]``, as section 3.1 describes them."""
    eps, hidden, length = config.rms_norm_eps, features, len(features)
    for number in range(options.layers):
        own = {name.removeprefix(f"layers.{number}."): w for name, w in weights.items() if f"layers.{number}." in name}
        normed = rms(tokens if number == 0 else hidden, own["input_layernorm.weight"], eps)
        if number == 0:
            feature = rms(hidden, own["hidden_norm.weight"], eps)
            normed = torch.cat([normed, feature], dim=-1)  # the embedding first
            hidden = feature if options.norm_before_residual else hidden
        heads = {n: (normed @ own[f"self_attn.{n}_proj.weight"].T).view(length, -1, config.head_dim) for n in "qkv"}
        if options.layer == "qwen3":
            heads |= {n: rms(heads[n], own[f"self_attn.{n}_norm.weight"], eps) for n in "qk"}
        theta = config.rope_parameters["rope_theta"]
        groups = heads["q"].shape[1] // heads["k"].shape[1]
        q, k, v = turned(heads["q"], theta), turned(heads["k"], theta), heads["v"]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(config.head_dim)
        back = torch.arange(length)[:, None] - torch.arange(length)
        scores = scores.masked_fill((back < 0) | (back >= (options.sliding_window or length)), -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(length, -1)
        hidden = hidden + mixed @ own["self_attn.o_proj.weight"].T
        inner = rms(hidden, own["post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(inner @ own["mlp.gate_proj.weight"].T)
        hidden = hidden + (gate * (inner @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return rms(hidden, weights["norm.weight"], eps) if options.norm_output else hidden


def first_features(weights: dict[str, Tensor], config: Any, options: Eagle3Shape, states: list[Tensor]) -> Tensor:
    """``fc`` over the target's states ``[T, H]``, each or all of them normed."""
    eps = config.rms_norm_eps
    if options.fc_norm:
        states = [rms(state, weights[f"fc_norm.{n}.weight"], eps) for n, state in enumerate(states)]
    together = torch.cat(states, dim=-1)
    if options.norm_before_fc:
        together = rms(together, weights["input_norm.weight"], eps)
    return together @ weights["fc.weight"].T


def shaken(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    """The head's weights, with norms that are not 1."""
    generator = torch.Generator().manual_seed(3)
    for weights in drafter.module.parameters():
        if weights.dim() == 1:
            weights.data += 0.2 * torch.randn(weights.shape, generator=generator)
    return drafter.module.state_dict()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_head_is_the_one_described(variant: str) -> None:
    """Catches feature and embedding in the wrong order, a norm too few, a residual after the norm, another RoPE."""
    target = target_of("llama")
    head: Any = eagle3(target, None, "chain", **VARIANTS[variant]).module
    drafter, options = Eagle3Drafter(target, head, Eagle3Options()), eagle3_shape(variant)
    weights, ids = shaken(drafter), torch.tensor([prompt(11)])
    taps = target.features(ids, taps=drafter.taps).taps
    states = [taps[tap][0, :-1] for tap in drafter.taps]
    tokens = target.embed(ids[0, 1:])
    features = first_features(weights, head.config, options, states)
    expected = described(weights, head.config, options, features, tokens)
    found = head(head.fused(torch.cat(states, dim=-1))[None], tokens[None], torch.arange(10)[None])
    torch.testing.assert_close(found[0], expected, atol=1e-5, rtol=1e-5)
    scored = expected if options.norm_output else rms(expected, weights["norm.weight"], head.config.rms_norm_eps)
    torch.testing.assert_close(head.scored(found)[0], scored, atol=1e-5, rtol=1e-5)


def eagle3_shape(variant: str, **more: Any) -> Eagle3Shape:
    given = {"taps": [1, 2, 3]} | VARIANTS[variant] | more
    if (kept := given.pop("kept", None)) is not None:
        given["draft_vocab_size"] = kept
    return Eagle3Shape(**given)


DRAFTED = [
    *((variant, tree, 0.9) for variant in VARIANTS for tree in ("chain", "dynamic")),
    *(("eagle3", tree, temperature) for tree, temperature in (("static", 0.9), ("chain", 0.0), ("dynamic", 0.0))),
]


@pytest.mark.parametrize(("variant", "tree", "temperature"), DRAFTED)
def test_drafts_equal_the_head_from_scratch(variant: str, tree: str, temperature: float) -> None:
    """Catches true features that stay out, feedback before the norm, draft ids not mapped, stale cache rows."""
    target = target_of("llama")
    drafter = eagle3(target, None, tree, depth=4, top_k=3, nodes=9, **VARIANTS[variant])
    weights, head, options = shaken(drafter), drafter.module, drafter.module.shape
    drafter = Eagle3Drafter(target, head, drafter.settings)  # norms are copied
    own = weights.get("lm_head.weight", target.model.get_output_embeddings().weight)
    ids = torch.arange(len(own)) + weights.get("d2t", 0)

    def logits(known: list[int], path: list[int]) -> Tensor:
        """Of the children of ``path``: true features up to the root, the head's own beyond."""
        tokens = known + path
        taps = target.features(torch.tensor([known[:-1]]), taps=drafter.taps).taps
        features = first_features(weights, head.config, options, [taps[tap][0] for tap in drafter.taps])
        for count in range(len(known) - 1, len(tokens)):
            predicted = described(
                weights, head.config, options, features, target.embed(torch.tensor(tokens[1 : count + 1]))
            )
            features = torch.cat([features, predicted[-1:]])
        last = features[-1]
        last = last if options.norm_output else rms(last, weights["norm.weight"], head.config.rms_norm_eps)
        whole = torch.full((VOCAB_SIZE,), -torch.inf)
        whole[ids] = own @ last
        return whole

    checked = []

    def compared(state: DecodeState, draft: DraftTree) -> None:
        check_children(state, draft, lambda path: logits(state.tokens[0], path))
        checked.append(draft.size > 0)

    with each_draft(drafter, compared):
        generate(target, drafter, [prompt(9)], max_new_tokens=9, eos_token_id=NO_EOS, temperature=temperature)
    assert len(checked) > 3 and checked[0]


def test_a_window_on_both_engines() -> None:
    """Catches an engine that runs the head's layers without their window."""

    def drafts(engine: Any) -> list[Any]:
        target = TargetModel(tiny.build("llama"), name="target", engine=engine)
        drafter, found = eagle3(target, None, "static", **VARIANTS["window"]), []
        propose = drafter.propose
        with mock.patch.object(drafter, "propose", lambda state: found.append(propose(state)) or found[-1]):
            generate(target, drafter, [prompt(9), prompt(5)], max_new_tokens=9, eos_token_id=NO_EOS)
        return [draft.tokens.tolist() for draft in found]

    assert drafts("fused") == drafts("stock") and len(drafts("fused")) > 3


def test_a_checkpoint_drafts_the_same(tmp_path: Any) -> None:
    """Catches options of the head, or the list of its draft tokens, that are not saved."""
    target = target_of("llama")
    drafter = eagle3(target, None, "chain", kept=60, layer="qwen3", norm_output=True, fc_norm=True)
    drafter.save_pretrained(tmp_path / "head")
    again: Any = load_drafter(tmp_path / "head", target)
    assert again.name == "eagle3" and again.taps == (1, 2, 3) and again.lm_head.width == 60
    check_stored(drafter, again)


def check_stored(drafter: Any, again: Any) -> None:
    for name, weights in drafter.module.state_dict().items():
        stored = weights.bfloat16().to(weights) if weights.is_floating_point() else weights
        assert torch.equal(stored, again.module.state_dict()[name]), name


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"taps": [1, 9]}, "taps are .* 9 is no state of it"),
        ({"norm_before_fc": True, "fc_norm": True}, "two norms in one place"),
        ({"own_lm_head": False, "draft_vocab_size": 8}, "leave one of them out"),
        ({"draft_vocab_size": VOCAB_SIZE + 1}, "vocabulary has"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], told: str) -> None:
    """Catches a head that is built all the same, and fails or accepts nothing after hours."""
    target = target_of("llama")
    with pytest.raises(ValueError, match=told):
        new_head(Eagle3Drafter, target.config, **({"taps": [1, 2, 3]} | change))


@pytest.mark.parametrize(("ids", "told"), [([5, 3, 9], "must increase"), ([5, 9, VOCAB_SIZE], "to 97, and it has 97")])
def test_wrong_draft_tokens_are_refused(ids: list[int], told: str) -> None:
    """Catches ids stored where engines store offsets, and ids of another tokenizer."""
    target = target_of("llama")
    head: Any = new_head(Eagle3Drafter, target.config, taps=[1], draft_vocab_size=3)
    head.d2t.copy_(torch.tensor(ids) - torch.arange(3))
    with pytest.raises(ValueError, match=told):
        Eagle3Drafter(target, head, Eagle3Options())


def test_the_width_of_the_states() -> None:
    """Catches an fc that reads the states in another order than ``taps`` says."""
    target = target_of("llama")
    drafter = eagle3(target, None, "chain", taps=[3, 1])
    output = target.features(torch.tensor([prompt(5)]), taps=(1, 3))
    found = drafter.head.true_features(output)
    assert torch.equal(found[..., :HIDDEN_SIZE], output.taps[3]) and torch.equal(
        found[..., HIDDEN_SIZE:], output.taps[1]
    )
