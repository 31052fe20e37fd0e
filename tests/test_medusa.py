"""Medusa: the heads' rows and candidates, shapes of drafts, typical acceptance by its definition, what is saved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from conformance import NO_EOS, each_draft, prompt, target_of
from rigged import medusa

from drafters import TargetModel, generate, load_drafter
from drafters.heads.medusa.module import MedusaHeads
from drafters.heads.medusa.shape import MedusaShape
from drafters.loop.acceptance import verify_greedy
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.medusa import MedusaDrafter, MedusaOptions, Typical
from drafters.model.draft_head import DRAFT_IDS
from drafters.policy.shape import acceptance_of, likeliest

GREEDY, HOT = Sampling(), Sampling(0.8, top_k=20)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("tree", "layers", "own"), [("chain", 1, False), ("static", 2, False), ("static", 1, True)])
def test_drafts_are_the_heads_on_the_last_true_feature(tree: str, layers: int, own: bool, temperature: float) -> None:
    """Catches a feature of another row, a head at another depth, another head's LM head, a q of another depth."""
    target = target_of("llama")
    drafter = medusa(target, None, tree, layers=layers, own_lm_heads=own, nodes=12)
    sizes, module = set(), drafter.module
    assert isinstance(module, MedusaHeads)

    def checked(state: DecodeState, draft: DraftTree) -> None:
        plan, sampled = drafter._plan, state.sampling
        sizes.add(draft.size)
        for row, known in enumerate(state.tokens):
            if state.finished[row] or not draft.size:
                continue
            states = module(target.features(torch.tensor([known[:-1]])).features[0, -1])
            lm_heads: list[Any] = [*module.lm_heads()] or [target.lm_head] * 4
            logits = torch.stack([head(one) for head, one in zip(lm_heads, states, strict=True)])
            if temperature == 0:
                top = logits.topk(8, dim=-1).indices
                expected = [int(top[depth, rank]) for depth, rank in zip(plan.above, plan.ranks, strict=True)]
                assert draft.tokens[row].tolist() == expected
                continue
            assert draft.q is not None and draft.q_row is not None and draft.q_row[row].tolist() == list(plan.above)
            wanted = sampled.probabilities(logits[: len(plan.levels)])
            torch.testing.assert_close(draft.q[row], wanted, atol=1e-4, rtol=1e-3)

    with each_draft(drafter, checked):
        options: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": NO_EOS, "temperature": temperature}
        generate(target, drafter, [prompt(8), prompt(5, 1)], top_k=30, top_p=0.95, **options)
    assert max(sizes) == (4 if tree == "chain" else 12)


def test_static_trees_have_the_likeliest_nodes() -> None:
    """Catches a tree by another table than the one that was given, or one table for both ways of choosing tokens."""
    target = target_of("llama")
    flat, steep = [[0.3] * 8] * 4, [[0.9, 0.01]] * 4
    drafter = medusa(target, None, "static", nodes=9, acceptance={"greedy": flat, "sampled": steep})
    table = [acceptance_of(row) for row in flat]
    expected = {path for (_, path), _ in zip(likeliest(table, 4), range(9), strict=False)}
    plan = drafter.shaper.fixed["greedy"]
    assert plan.size == len(expected) == 9 and plan.ranks.count(0) == sum(path[-1] == 0 for path in expected)
    assert plan.parents.count(-1) > 2
    assert len(drafter.shaper.fixed["sampled"].levels) == 4 > len(plan.levels)


# ------------------------------------------------------------------------------------------- typical acceptance


def typical_by_hand(draft: DraftTree, logits: torch.Tensor, sampling: Sampling, rule: Typical) -> set[tuple[int, ...]]:
    """The accepted rows of the best paths, from the definition, path by path."""
    parents, tokens = draft.parents[0].tolist(), draft.tokens[0].tolist()
    found: dict[tuple[int, ...], tuple[int, float]] = {(0,): (0, 0.0)}
    paths: dict[int, tuple[int, ...]] = {-1: (0,)}
    for node, parent in enumerate(parents):
        if paths.get(parent) is None or (draft.valid is not None and not draft.valid[0, node]):
            continue
        p = sampling.probabilities(logits[0, parent + 1]).double()
        entropy = -float((p[p > 0] * p[p > 0].log()).sum())
        if p[tokens[node]] > min(rule.epsilon, rule.delta * torch.tensor(-entropy).exp().item()):
            paths[node] = (*paths[parent], node + 1)
            depth, likelihood = found[paths[parent]]
            found[paths[node]] = depth + 1, likelihood + float(p[tokens[node]].log())
    return {path for path, value in found.items() if value == max(found.values())}


@pytest.mark.parametrize("batch", [1, 3])
def test_typical_acceptance_by_its_definition(batch: int) -> None:
    """Catches an entropy of another row, a node accepted whose parent is not, a shallower or unlikelier path, a token
    that is no node, and a warped p in one place but not in the other."""
    generator = torch.Generator().manual_seed(0)
    rule, deep, differing = Typical(0.3, 0.6), 0, 0
    parents = [-1, -1, -1, 0, 0, 1, 3, 3, 4, 5, 6]
    for trial in range(60):
        scale = (0.5, 1.5, 3.0)[trial % 3]
        logits = torch.randn(batch, len(parents) + 1, 7, generator=generator) * scale
        tokens = torch.randint(7, (batch, len(parents)), generator=generator)
        valid = torch.rand(batch, len(parents), generator=generator) < 0.9 if trial % 2 else None
        draft = DraftTree.from_parents(tokens, parents, valid=valid)
        sampling = (Sampling(1.0), Sampling(0.7, top_k=4))[trial % 4 // 2]
        verdict = rule(draft, logits, draft.ancestors(), sampling, generator)
        for row in range(batch):
            cut = slice(row, row + 1)
            one = replace(draft, tokens=tokens[cut], parents=draft.parents[cut], see=None)
            one.valid = None if valid is None else valid[cut]
            assert tuple(verdict.rows[row]) in typical_by_hand(one, logits[cut], sampling, rule)
            assert verdict.tokens[row][:-1] == [int(tokens[row, node - 1]) for node in verdict.rows[row][1:]]
            last = sampling.probabilities(logits[row, verdict.rows[row][-1]])
            assert float(last[verdict.tokens[row][-1]]) > 0
            deep += len(verdict.rows[row]) > 2
        greedy = verify_greedy(draft, logits, draft.ancestors(), GREEDY)
        differing += greedy.rows != verdict.rows
    assert deep > 10 and differing > 10


def test_typical_acceptance_is_lossy_and_marked(tmp_path: Path) -> None:
    """Catches a row of a report without its mark, greedy output that changes, and a loaded checkpoint lossy unasked."""
    target = target_of("llama")
    drafter = medusa(target, 0.4, "static", nodes=12, accept="typical", epsilon=0.2)
    assert not drafter.lossless and isinstance(drafter.rule(HOT), Typical) and drafter.rule(GREEDY) is verify_greedy
    assert medusa(target, None, "chain").lossless
    drafter.save_pretrained(tmp_path)
    again = load_drafter(str(tmp_path), target)
    assert isinstance(again, MedusaDrafter) and again.lossless and again.settings.epsilon == 0.09
    assert (again.settings.tree, again.settings.nodes) == ("static", 12)
    assert not load_drafter(str(tmp_path), target, accept="typical").lossless


# ------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("own", [False, True])
def test_what_is_saved_drafts_the_same(own: bool, tmp_path: Path) -> None:
    """Catches heads, layers or LM heads that a checkpoint does not bring back, and names that are not the released."""
    target = target_of("llama")
    drafter = medusa(target, None, "chain", heads=3, layers=2, own_lm_heads=own)
    drafter.save_pretrained(tmp_path)
    again = load_drafter(str(tmp_path), target)
    assert isinstance(again, MedusaDrafter) and len(again.module) == 3
    weights = drafter.module.state_dict()
    for name, value in again.module.state_dict().items():
        torch.testing.assert_close(value, weights[name].to(torch.bfloat16).to(value))
    names = {"0.0.linear.weight", "0.0.linear.bias", "2.1.linear.weight"} | ({"1.2.weight"} if own else set())
    assert names <= weights.keys() and ("1.2.weight" in weights) == own
    with pytest.raises(ValueError, match="unexpected weights: 2.0.linear"):
        load_drafter(str(tmp_path), target, heads=2)
    other = TargetModel(tiny.build("llama", seed=1), name="other")
    with pytest.raises(ValueError, match="other weights"):
        load_drafter(str(tmp_path), other)


def test_heads_begin_as_the_target() -> None:
    """Catches a random bias, with which heads begin somewhere else, and heads that begin without a gradient."""
    target = target_of("llama")
    heads = MedusaHeads(target.config, MedusaShape(heads=2, layers=2))
    x = torch.randn(3, target.hidden_size)
    assert torch.equal(heads(x), x[:, None].expand(-1, 2, -1))
    heads(x).sum().backward()
    assert all(part.grad is not None and part.grad.abs().max() > 0 for part in heads.parameters())


def test_own_lm_heads_draft_with_the_kept_tokens() -> None:
    """Catches a draft vocabulary that cuts the target's LM head where the heads have their own."""
    target = target_of("llama")
    ids = torch.randperm(target.vocab_size)[:30].int()
    drafter = medusa(target, None, "chain", own_lm_heads=True)
    drafter.module.register_buffer(DRAFT_IDS, ids)
    options = MedusaOptions(tree="chain", draft_vocab=20, draft_text=0)
    cut = MedusaDrafter(target, drafter.module, options)  # type: ignore[arg-type]
    feature = torch.randn(2, 1, target.hidden_size)
    expected = drafter.head.scores(feature, 4).logits[..., ids[:20].long()]
    torch.testing.assert_close(cut.head.scores(feature, 4).logits, expected, atol=1e-4, rtol=1e-4)
