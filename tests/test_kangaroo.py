"""Kangaroo: drafts equal the adapter run from scratch; the second early exit; shallow work is done once."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conformance import NO_EOS, each_draft, prompt, target_of
from rigged import EXIT_LAYER, kangaroo, quiet_depths

from drafters import TargetModel, generate, load_drafter
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT, DraftTree
from drafters.methods.kangaroo import KangarooDrafter, KangarooOptions, uncertain

ETA, SURER = 0.15, 0.2
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("rigged", "scale"), [(True, 0.1), (False, 1.0), (False, 0.0)])
def test_drafts_equal_the_adapter_from_scratch(rigged: bool, scale: float, temperature: float) -> None:
    """Catches adapter rows lost or kept too long, wrong positions, q without its warps, and a wrong stop by eta."""
    target = target_of("llama", quiet_depths(scale))
    drafter = kangaroo(target, rigged, eta=ETA, max_draft_tokens=4)
    sizes = set()

    def checked(state: DecodeState, draft: DraftTree) -> None:
        known, drafted = state.tokens[0], draft.tokens[0].tolist()
        sizes.add(draft.size)
        exits = target.features(torch.tensor([known + drafted]), taps=(EXIT_LAYER,)).taps[EXIT_LAYER]
        if not draft.size:  # only the bonus token has room
            assert state.room() == 1
            return
        assert draft.extra.hidden is not None and draft.extra.resume_layer == EXIT_LAYER
        torch.testing.assert_close(draft.extra.hidden, exits[:, len(known) - 1 :], atol=1e-3, rtol=1e-3)
        states = drafter.module(exits, torch.arange(exits.shape[1])[None])
        logits = target.lm_head(states)[:, len(known) - 1 : -1]
        if temperature == 0:
            assert torch.equal(draft.tokens, logits.argmax(-1))
        elif drafted:
            assert draft.q is not None
            torch.testing.assert_close(draft.q, state.sampling.probabilities(logits), atol=1e-4, rtol=1e-3)
        sure = logits.softmax(-1).amax(-1)[0].tolist()
        assert all(value > ETA for value in sure[:-1]), "it must stop after the first uncertain token"
        assert draft.size == min(4, state.room() - 1) or sure[-1] <= ETA, "it must not stop before"

    accepted = set()
    with each_draft(drafter, checked):
        for seed in range(2):
            options = {"max_new_tokens": 18, "eos_token_id": NO_EOS, "seed": seed, "top_k": 30, "top_p": 0.95}
            trace = generate(target, drafter, [prompt(8, seed)], temperature=temperature, **options).trace
            accepted |= {(step.accepted, step.depth) for step in trace.steps}
    if rigged:
        assert any(a == d > 0 for a, d in accepted) and any(a < d for a, d in accepted)
        assert len(sizes) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("rigged", "scale"), [(True, 0.1), (False, 0.0)])
def test_a_tree_equals_the_adapter_from_scratch(rigged: bool, scale: float, temperature: float) -> None:
    """Catches nodes that see a cousin's row, adapter rows of rejected nodes that stay, accepted ones that are lost, and
    a stop by how sure the adapter is of another node than the likeliest path's."""
    target = target_of("llama", quiet_depths(scale))
    drafter = kangaroo(target, rigged, eta=SURER, paths=TREE)
    shapes = set()

    def checked(state: DecodeState, draft: DraftTree) -> None:
        known, parents = state.tokens[0], draft.parents[0].tolist()
        shapes.add(draft.size)
        if not draft.size:  # only the bonus token has room
            assert state.room() == 1
            return
        assert draft.extra.hidden is not None
        sure: list[float] = []  # at each level, after the likeliest path so far
        for node, parent in enumerate(parents):
            path = [node]
            while parents[path[0]] != ROOT:
                path.insert(0, parents[path[0]])
            ids = known + draft.tokens[0, path].tolist()
            exits = target.features(torch.tensor([ids]), taps=(EXIT_LAYER,)).taps[EXIT_LAYER]
            torch.testing.assert_close(draft.extra.hidden[:, node + 1], exits[:, -1], atol=1e-3, rtol=1e-3)
            logits = target.lm_head(drafter.module(exits, torch.arange(exits.shape[1])[None]))[:, -2]
            sure += [logits.softmax(-1).amax().item()] if TREE[node] == [0] * (len(sure) + 1) else []
            if temperature == 0:
                rank = [other for other in range(node) if parents[other] == parent]
                assert ids[-1] == logits.topk(len(rank) + 1).indices[0, -1]
            else:
                assert draft.q is not None and draft.q_row is not None
                q = draft.q[:, draft.q_row[0, node]]
                torch.testing.assert_close(q, state.sampling.probabilities(logits), atol=1e-4, rtol=1e-3)
        assert all(value > SURER for value in sure[:-1])
        assert len(sure) == min(3, state.room() - 1) or sure[-1] <= SURER

    with each_draft(drafter, checked):
        options = {"max_new_tokens": 20, "eos_token_id": NO_EOS, "top_k": 30, "top_p": 0.95}
        trace = generate(target, drafter, [prompt(8)], temperature=temperature, **options).trace
    assert len(shapes) > 1, "it must stop early at times"
    assert len({step.accepted for step in trace.steps}) > 1


def test_confidence_by_entropy() -> None:
    """Catches an entropy of the wrong sign or base: of n equally likely tokens it says 1/n, as the first choice."""
    target = target_of("llama")
    for tokens in (1, 2, 4):
        logits = torch.full((1, target.vocab_size), -torch.inf)
        logits[0, :tokens] = 0.0
        for confidence in ("top1", "entropy"):
            for eta, unsure in ((1 / tokens - 0.01, False), (min(1 / tokens + 0.01, 0.999), tokens > 1)):
                options = KangarooOptions(eta=eta, confidence=confidence)  # type: ignore[arg-type]
                assert uncertain(logits, options) == unsure


def test_an_adapter_with_an_mlp_and_a_tree_is_saved_and_loaded(tmp_path: Path) -> None:
    """Catches a checkpoint that forgets its MLP (weights left over) or its tree."""
    target = target_of("llama")
    torch.manual_seed(0)
    module = KangarooAdapter(target.config, KangarooShape(exit_layer=EXIT_LAYER, ffn=True))
    drafter = KangarooDrafter(target, module, KangarooOptions(eta=0.0, paths=TREE))
    plain = sum(weights.numel() for weights in KangarooAdapter(target.config, KangarooShape(exit_layer=1)).parameters())
    mlp = 3 * target.hidden_size * target.config.intermediate_size
    assert sum(weights.numel() for weights in drafter.module.parameters()) == plain + mlp + target.hidden_size
    drafter.save_pretrained(tmp_path)
    again = load_drafter(str(tmp_path), target)
    assert isinstance(again, KangarooDrafter) and (again.module.shape.ffn, again.settings.paths) == (True, TREE)
    given = {"max_new_tokens": 8, "eos_token_id": NO_EOS}
    one, other = (generate(target, which, [prompt(6)], **given) for which in (drafter, again))
    assert one.trace.steps == other.trace.steps and torch.equal(one.tokens, other.tokens)


@pytest.mark.parametrize("options", [{"max_draft_tokens": 3}, {"paths": TREE}])
def test_shallow_layers_run_once(options: dict[str, Any]) -> None:
    """Catches verification that starts at layer 0 again, which doubles the cost that Kangaroo exists to save."""
    target = TargetModel(target_of("llama").model, engine="stock")  # whose layers take hooks
    drafter = kangaroo(target, True, eta=0.0, **options)
    rows = [0] * target.num_layers
    handles = [
        layer.register_forward_hook(
            lambda module, args, output, index=index: rows.__setitem__(index, rows[index] + args[0].shape[1])
        )
        for index, layer in enumerate(target.body.layers)
    ]
    try:
        trace = generate(target, drafter, [prompt(6)], max_new_tokens=10, eos_token_id=NO_EOS).trace
    finally:
        for handle in handles:
            handle.remove()
    assert len(set(rows)) == 1, f"every layer must see every row once, found {rows}"
    assert rows[0] == 6 + sum(step.drafted + 1 for step in trace.steps)
