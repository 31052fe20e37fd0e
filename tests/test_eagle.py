"""EAGLE: what the loop drafts through caches and tree masks equals the head run from scratch on each path."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from conformance import NO_EOS, check_children, each_draft, prompt, target_of
from rigged import eagle
from torch import nn
from transformers import AutoConfig

from drafters import TargetModel, generate, load_drafter, make_drafter
from drafters.config import SHIFTED, UNSHIFTED, HeadInputs
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.eagle import EagleDrafter, EagleOptions

OTHERS: tuple[HeadInputs, ...] = (UNSHIFTED, "token", "feature")


Made = dict[tuple[int, ...], torch.Tensor]


def from_scratch(drafter: EagleDrafter, known: list[int], path: list[int], made: Made | None = None) -> torch.Tensor:
    """Logits ``[V]`` for the children of ``path``: no cache, true features up to the root, predicted ones beyond.

    ``made`` keeps the features of paths after the same ``known``: longer paths go on from them.
    """
    return drafter.target.lm_head(_features(drafter, known, path, {} if made is None else made)[0, -1])


def _features(drafter: EagleDrafter, known: list[int], path: list[int], made: Made) -> torch.Tensor:
    """``[1, T, H]`` features; the last was predicted at the end of ``path``."""
    if tuple(path) in made:
        return made[tuple(path)]
    target, tokens = drafter.target, known + path
    if path:
        features = _features(drafter, known, path[:-1], made)
    else:
        features = target.features(torch.tensor([known[:-1]])).features
    count = features.shape[1]
    shift = drafter.module.shape.token_shift
    embeddings = target.embed(torch.tensor([tokens[shift : shift + count]]))
    predicted = drafter.module(features, embeddings, torch.arange(count)[None])
    made[tuple(path)] = torch.cat([features, predicted[:, -1:]], dim=1)
    return made[tuple(path)]


def check_draft(drafter: EagleDrafter, state: DecodeState, draft: DraftTree, row: int = 0) -> None:
    made: Made = {}
    logits = lambda path: from_scratch(drafter, state.tokens[row], path, made)  # noqa: E731
    check_children(state, draft, logits, row, atol=5e-3, rtol=2e-2)


HEADS = [("llama", SHIFTED, 0.0), ("llama", SHIFTED, 0.9), ("qwen3", SHIFTED, 0.9)]


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
@pytest.mark.parametrize(("family", "inputs", "temperature"), [*HEADS, *(("llama", other, 0.9) for other in OTHERS)])
def test_drafts_equal_the_head_from_scratch(family: str, inputs: HeadInputs, tree: str, temperature: float) -> None:
    """Catches a head fed feature_i with token_i, stale rows in its cache, siblings that see each other, positions."""
    target = target_of(family)
    drafter = eagle(target, None, tree, depth=4, top_k=3, nodes=9, inputs=inputs)
    continuation = (
        generate(target, drafter, [prompt(9)], max_new_tokens=16, eos_token_id=NO_EOS, temperature=temperature)
        .tokens[0]
        .tolist()
    )
    checked = []

    def forced(state: DecodeState, draft: DraftTree) -> None:
        check_draft(drafter, state, draft)
        done = len(state.tokens[0]) - 9
        path = list(range(1 + len(checked) % 2))
        checked.append(draft.size)
        if temperature == 0 and draft.is_chain and state.room() > 4:  # make one or two draft tokens right
            draft.tokens = draft.tokens.clone()
            draft.tokens[0, path] = torch.tensor(continuation[done : done + len(path)])

    with each_draft(drafter, forced):
        generate(target, drafter, [prompt(9)], max_new_tokens=16, eos_token_id=NO_EOS, temperature=temperature)
    assert len(checked) > 3


def trained_head(target: TargetModel) -> EagleHead:
    """A head overfitted for a moment on the target's own greedy text: its drafts are accepted in part."""
    torch.manual_seed(0)
    head = EagleHead(target.config)
    ids = generate_text(target)
    features = target.features(ids).features.clone()
    embeddings = target.embed(ids).clone()
    positions = torch.arange(ids.shape[1] - 1)[None]
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    with torch.enable_grad():
        for _ in range(150):
            predicted = head(features[:, :-1], embeddings[:, 1:], positions)
            loss = nn.functional.smooth_l1_loss(predicted, features[:, 1:])
            truth = target.lm_head(features[:, 1:]).softmax(-1)
            loss = loss + nn.functional.cross_entropy(target.lm_head(predicted).flatten(0, 1), truth.flatten(0, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return head


def generate_text(target: TargetModel) -> torch.Tensor:
    ids = torch.tensor([prompt(8, seed) for seed in range(4)])
    with torch.no_grad():
        for _ in range(24):
            ids = torch.cat([ids, target.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
def test_trained_head_is_accepted(tree: str) -> None:
    """Catches training and drafting that disagree (alignment, positions): an overfitted head must be accepted often."""
    target = target_of("llama")
    drafter = EagleDrafter(target, trained_head(target), EagleOptions(tree=tree, top_k=4, nodes=20))
    traces = [
        generate(target, drafter, [prompt(8, seed)], max_new_tokens=24, eos_token_id=NO_EOS).trace for seed in range(4)
    ]
    tau = sum(trace.decoded_tokens for trace in traces) / sum(len(trace.steps) for trace in traces)
    assert tau > 1.6, f"{tree}: tau {tau:.2f}"


@pytest.mark.parametrize("inputs", OTHERS)
def test_inputs_are_kept_with_the_head(inputs: HeadInputs, tmp_path: Path) -> None:
    """Catches a head that is loaded as one that reads something else, or an fc that it does not have."""
    target = target_of("llama")
    eagle(target, None, "auto", inputs=inputs).save_pretrained(tmp_path)
    drafter = load_drafter(str(tmp_path), target)
    assert isinstance(drafter, EagleDrafter) and drafter.module.shape.inputs == inputs
    assert any(name.startswith("fc") for name, _ in drafter.module.named_parameters()) == (inputs == UNSHIFTED)
    plain = generate(target, make_drafter("autoregressive", target), [prompt(8)], max_new_tokens=12)
    assert torch.equal(generate(target, drafter, [prompt(8)], max_new_tokens=12).tokens, plain.tokens)


def test_options_that_the_tree_does_not_read(tmp_path: Path) -> None:
    """Catches paths and depths that a user gives and that change nothing; those of a checkpoint are its own tree's."""
    target = target_of("llama")
    eagle(target, None, "chain", depth=2).save_pretrained(tmp_path)
    assert load_drafter(str(tmp_path), target, tree="static").max_draft == 25
    with pytest.raises(ValueError, match="paths is given, and tree=chain does not read it"):
        load_drafter(str(tmp_path), target, paths=[[0]])
    with pytest.raises(ValueError, match="depth is given, and tree=static does not read it"):
        make_drafter("eagle", target, checkpoint=str(tmp_path), tree="static", depth=3)


def test_features_taken_in_are_true() -> None:
    """Catches predicted features kept after verification: the head would drift the further the better it drafts."""
    target = target_of("llama")
    drafter = eagle(target, 0.3, "dynamic", top_k=4, nodes=12)
    observe, accepted = drafter.observe, []

    def checked(state, draft, output, verdict) -> None:  # noqa: ANN001
        observe(state, draft, output, verdict)
        features = drafter.head.pending.features
        count = features.shape[1]
        accepted.append(count)
        known = state.tokens[0]
        true = target.features(torch.tensor([known[:-1]])).features[:, -count:]
        torch.testing.assert_close(features, true, atol=1e-4, rtol=1e-4)
        assert drafter.head.cache.lengths[0] == len(known) - 1 - count

    with mock.patch.object(drafter, "observe", checked):
        generate(target, drafter, [prompt(9)], max_new_tokens=24, eos_token_id=NO_EOS)
    assert max(accepted) > 2


def test_head_for_a_mixture_of_experts_is_dense() -> None:
    """Catches eight experts in Mixtral's head: EAGLE (Table 2) gives 0.28B, one dense layer."""
    target = target_of("mixtral")
    names = dict(EagleHead(target.config).named_parameters())
    assert names["layers.0.mlp.down_proj.weight"].shape == (target.hidden_size, target.config.intermediate_size)
    assert names["fc.weight"].shape == (target.hidden_size, 2 * target.hidden_size)
    assert not any("input_layernorm" in name or "expert" in name for name in names)


def test_a_llama_layer_is_as_wide_as_a_dense_one() -> None:
    """Catches an MLP of one small expert: OLMoE's have half the model's width, and a token uses eight."""
    sizes = {"vocab_size": 97, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    for family, given, wide in (
        ("olmoe", experts | {"intermediate_size": 32}, 64),  # of an expert
        ("qwen3_moe", experts | {"intermediate_size": 192, "moe_intermediate_size": 24}, 192),  # of a dense layer
        ("qwen3", {"intermediate_size": 80}, 80),
    ):
        config = AutoConfig.for_model(family, **sizes, **given)
        names = dict(EagleHead(config, EagleShape(layer="llama")).named_parameters())
        assert names["layers.0.mlp.down_proj.weight"].shape == (64, wide)
        assert not any("q_norm" in name or "bias" in name or "expert" in name for name in names)


def test_sampled_tree_has_the_warped_q() -> None:
    """Catches a draft distribution without the target's warps: lossless still, but it drafts what top-p rejects."""
    target = target_of("llama")
    drafter = eagle(target, None, "static")
    supports = []

    def checked(state: DecodeState, draft: DraftTree) -> None:
        if draft.q is not None:
            supports.append(int((draft.q > 0).sum(-1).max()))

    with each_draft(drafter, checked):
        generate(target, drafter, [prompt(9)], max_new_tokens=12, temperature=1.5, top_k=5, top_p=0.9)
    assert supports and 1 < max(supports) <= 5
