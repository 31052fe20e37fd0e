"""DFlash, DSpark and DFlash2: a head equals the forward of its description, and decoding drafts as it does."""

import itertools
from functools import partial
from typing import Any
from unittest import mock

import pytest
import tiny
import torch
from block_reference import block_states, markov_bias, selector_scores
from by_keys import new_head
from conformance import NO_EOS, check_children, each_draft, path_of, plain_greedy, prompt, rows_of, target_of
from rigged import BLOCK, SELECTOR, Cycling, block_costs, block_drafter, dflash, dspark
from test_eagle3 import check_stored
from tiny import HIDDEN_SIZE, VOCAB_SIZE
from torch import Tensor

from drafters import TargetModel, generate, generate_many, load_drafter
from drafters.drafting.grow import Marginals, Slots, fill, likeliest
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.block import DFlashDrafter, DSparkDrafter
from drafters.methods.dflash2 import DFlash2Drafter
from drafters.model.runner import StockLayer
from drafters.policy import shaper as shaper_file
from drafters.policy.truncation import Truncation

Case = tuple[str, dict[str, Any]]
CASES: dict[str, Case] = {
    "dflash": ("dflash", {}),
    "dflash-llama-causal": ("dflash", {"layer": "llama", "causal": True, "layers": 1}),
    "dflash-anchor-first-small-vocabulary": ("dflash", {"layout": "anchor-first", "draft_vocab_size": 60}),
    "dflash-windows": ("dflash", {"sliding_window": 5}),
    "dflash-mixed": ("dflash", {"sliding_window": 6, "full_layers": [1], "causal": "sliding"}),
    "dflash-anchored": ("dflash", {"sliding_window": 5, "window_edge": "anchor", "causal": "sliding"}),
    "dspark": ("dspark", {"layout": "anchor-first"}),
    "dspark-mixed-anchored": (
        "dspark", {"layout": "anchor-first", "sliding_window": 5, "full_layers": [0], "window_edge": "anchor"}
    ),
    "dspark-gated-small-vocabulary": (
        "dspark", {"layout": "anchor-first", "markov_head": "gated", "draft_vocab_size": 60}
    ),
    "dspark-rnn-fill-in": ("dspark", {"layout": "fill-in", "markov_head": "rnn"}),
    "dflash-mask-embedding": ("dflash", {"mask_embedding": True}),
    "dflash2": ("dflash2", {}),
    "dflash2-windows": ("dflash2", {"sliding_window": 5, "mask_embedding": True}),
    "dflash2-llama": ("dflash2", {"layer": "llama", "layout": "anchor-first", "conv_kernel_size": 3, "layers": 1}),
}  # fmt: skip


def made(target: TargetModel, case: Case, tree: str, **more: Any) -> Any:
    """A drafter with a random head."""
    name, options = case
    options = {"dflash": {}, "dspark": {"markov_rank": 8}, "dflash2": SELECTOR}[name] | options | more
    return block_drafter(name, target, None, tree, **options)


def tapped(target: TargetModel, drafter: Any, known: list[int]) -> Tensor:
    """``[T, taps * H]``."""
    taps = target.features(torch.tensor([known]), taps=drafter.taps).taps
    return torch.cat([taps[tap][0] for tap in drafter.taps], dim=-1)


def embedded(target: TargetModel, anchor: int) -> Tensor:
    """``[B, H]`` of a block."""
    return target.embed(torch.tensor([anchor] + [BLOCK["mask_token_id"]] * (BLOCK["block_size"] - 1)))


@pytest.mark.parametrize("case", CASES)
def test_a_training_pass_is_the_one_described(case: str) -> None:
    """Catches a key of a block that another block sees, the anchor's own feature among the context, a block one
    position early, context keys without their norm or RoPE, a layer norm over context features.
    """
    target = target_of("llama")
    drafter = made(target, CASES[case], "chain")
    head, size, known = drafter.module, BLOCK["block_size"], prompt(12)
    states, anchors = tapped(target, drafter, known), [4, 9, 1]
    blocks = [embedded(target, known[anchor]) for anchor in anchors]
    see = torch.zeros(len(anchors) * size, len(known) + len(anchors) * size, dtype=torch.bool)
    for number, anchor in enumerate(anchors):
        own = slice(number * size, (number + 1) * size)
        see[own, :anchor] = True
        inside = torch.ones(size, size).bool()
        inside = inside.tril() if head.shape.causal is True else inside
        see[own, len(known) + own.start : len(known) + own.stop] = inside
    positions = torch.cat([torch.arange(len(known)), *(torch.arange(size) + anchor for anchor in anchors)])
    found = head(states[None], torch.cat(blocks)[None], positions[None], see[None, None])[0].split(size)
    for anchor, block, rows in zip(anchors, blocks, found, strict=True):
        expected = block_states(head.state_dict(), head.config, states[:anchor], block, drafter.module.shape)
        torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)
    if not head.shape.causal and not head.shape.sliding_window:  # without a mask: one block behind all of the context
        alone = head(states[None, :4], blocks[0][None], positions[None, [0, 1, 2, 3, *range(4, 4 + size)]])
        torch.testing.assert_close(alone[0], found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_in_training_and_drafting(kind: str) -> None:
    """Catches a state of another slot, gates in another order, a memory that misses a token or outlives a block."""
    drafter = made(target_of("llama"), ("dspark", {"layout": "anchor-first", "markov_head": kind}), "chain")
    head, weights = drafter.module.markov_head, drafter.module.state_dict()
    previous = torch.randint(VOCAB_SIZE, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    states = torch.randn(2, 3, 5, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
    found = head.markov_w2(head(previous, states))
    for row, block, slot in itertools.product(range(2), range(3), range(5)):
        tokens = previous[row, block, : slot + 1].tolist()
        expected = markov_bias(weights, kind, tokens, states[row, block])
        torch.testing.assert_close(found[row, block, slot], expected, atol=1e-5, rtol=1e-5)
    confidence = drafter.module.confidence(states, previous)
    inputs = torch.cat([states, weights["markov_head.markov_w1.weight"][previous]], dim=-1)
    expected = inputs @ weights["confidence_head.proj.weight"][0] + weights["confidence_head.proj.bias"]
    torch.testing.assert_close(confidence, expected, atol=1e-5, rtol=1e-5)


class Described:
    """A drafter's scores after committed tokens and a path, from scratch."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.weights = drafter, drafter.module.state_dict()
        own = self.weights.get("lm_head.weight")
        self.own = drafter.target.model.get_output_embeddings().weight if own is None else own
        self.ids = torch.arange(len(self.own)) + self.weights.get("d2t", 0)

    def states(self, known: list[int]) -> Tensor:
        """``[D, H]`` of the slots that predict."""
        drafter, given = self.drafter, self.drafter.module.shape
        context = tapped(drafter.target, drafter, known)[:-1]
        block = embedded(drafter.target, known[-1])
        rows = block_states(self.weights, drafter.module.config, context, block, given)
        return rows[1:] if given.layout == "fill-in" else rows

    def logits(self, known: list[int], path: list[int]) -> Tensor:
        """``[V]`` of the children of ``path``."""
        drafter, given, rows = self.drafter, self.drafter.module.shape, self.states(known)
        scores = self.own @ rows[len(path)]
        if isinstance(drafter, DSparkDrafter):
            scores = scores + markov_bias(self.weights, given.markov_head, [known[-1], *path], rows)
        if isinstance(drafter, DFlash2Drafter):
            previous, state = [known[-1], *path][-1], rows[len(path)]
            scores = selector_scores(self.weights, given.selector_top_k, scores, previous, state)
        whole = torch.full((VOCAB_SIZE,), -torch.inf)
        whole[self.ids] = scores
        return whole


def compare(drafter: Any, counts: list[int], state: DecodeState, draft: DraftTree) -> None:
    """Children by the description: the likeliest ones, or a q that is right."""
    described = Described(drafter)
    for row, known in enumerate(state.tokens):
        if state.finished[row] or not draft.size:
            continue
        check_children(state, draft, partial(described.logits, known), row)
        counts.append(len(known))


DRAFTED = [
    *((case, "chain", 0.9) for case in CASES),
    *((case, "tree", 0.9) for case in list(CASES)[::2]),
    *((case, *drawn) for case in ("dflash", "dspark", "dflash2") for drawn in (("chain", 0.0), ("auto", 0.9))),
]


@pytest.mark.parametrize(("case", "tree", "temperature"), DRAFTED)
def test_drafts_equal_the_head_from_scratch(case: str, tree: str, temperature: float) -> None:
    """Catches a feature that stays out of the cache or is read twice, a block one position late, a slot of the other
    layout, a q of another slot, a Markov head that follows another node, draft ids that are not mapped."""
    target = target_of("llama")
    drafter = made(target, CASES[case], tree, nodes=24, top_k=3)
    if tree == "auto":
        drafter.policy = Cycling()
        drafter.policy.shapes = (((0,), (1,), (0, 0), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0), (1, 1, 0)),)
    scored, described, counts = drafter.head.scored, Described(drafter), []

    def with_states(states: Tensor, state: DecodeState) -> Any:
        for row, known in enumerate(state.tokens):
            if not state.finished[row]:
                torch.testing.assert_close(states[row], described.states(known), atol=1e-5, rtol=1e-5)
        return scored(states, state)

    with each_draft(drafter, partial(compare, drafter, counts)), mock.patch.object(drafter.head, "scored", with_states):
        options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": NO_EOS, "temperature": temperature}
        generate(target, drafter, [prompt(9), prompt(2, 1), prompt(1, 2)], **options)
    assert len(counts) > 9


@pytest.mark.parametrize("case", ["dflash", "dspark"])
@pytest.mark.parametrize("engine", ["stock", "graphs"])
def test_other_engines_draft_the_same(engine: Any, case: str) -> None:
    """Catches angles in a form that another engine does not have, a mask that is causal there, and a captured forward
    that writes the context to other slots."""
    target, counts = TargetModel(tiny.build("llama"), engine=engine, name=engine), []
    name, options = CASES[case]
    drafter = made(target, (name, options), "chain")
    if engine == "stock":
        drafter.module.layers[0].register_forward_hook(lambda *given: None)  # so that it cannot be fused
        drafter = type(drafter)(target, drafter.module, drafter.settings)
        assert isinstance(drafter.head.block.layers[0].layer, StockLayer)
    with each_draft(drafter, partial(compare, drafter, counts)):
        generate(target, drafter, [prompt(9), prompt(2, 1)], max_new_tokens=8, eos_token_id=NO_EOS, temperature=0.9)
    assert len(counts) > 6


@pytest.mark.parametrize("confidence", [True, False])
@pytest.mark.parametrize("layout", ["fill-in", "anchor-first"])
def test_the_estimate_reads_earlier_tokens_only(layout: str, confidence: bool) -> None:
    """Catches an estimate of a position that reads its own token, which would change the output's distribution; one of
    another slot; max q before the Markov head.
    """
    target = target_of("llama")
    more: dict[str, Any] = {"layout": layout, "markov_head": "rnn", "confidence_head": confidence, "truncate": True}
    drafter, counts = block_costs(made(target, ("dspark", more), "chain")), []
    described = Described(drafter)

    def length(policy: Truncation, certainty: Tensor, state: DecodeState) -> int:
        tokens = drafts[-1].tokens
        for row, known in enumerate(state.tokens):
            if state.finished[row]:
                continue
            context = tapped(target, drafter, known)[:-1]
            states = block_states(described.weights, drafter.module.config, context, embedded(target, known[-1]))
            for slot, found in enumerate(certainty[row]):
                before = [known[-1], *tokens[row, :slot].tolist()]
                if confidence:
                    place = states[slot + drafter.module.shape.first_slot]
                    inputs = torch.cat([place, described.weights["markov_head.markov_w1.weight"][before[-1]]])
                    weights = described.weights["confidence_head.proj.weight"][0]
                    expected = weights @ inputs + described.weights["confidence_head.proj.bias"][0]
                else:
                    q = described.logits(known, before[1:]).softmax(-1)
                    expected = q.max().logit()
                torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
                counts.append(slot)
        return certainty.shape[1]

    drafts: list[DraftTree] = []

    def noted(*given: Any) -> DraftTree:
        drafts.append(fill(*given))
        return drafts[-1]

    with mock.patch.object(Truncation, "length", length), mock.patch.object(shaper_file, "fill", noted):
        options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": NO_EOS, "temperature": 1.0}
        generate(target, drafter, [prompt(9), prompt(2, 1)], **options)
    assert set(counts) == set(range(drafter.shaper.depth))


@pytest.mark.parametrize("name", ["dflash", "dspark", "dflash2"])
def test_rows_that_join_draft_as_alone(name: str) -> None:
    """Catches a joined row that keeps the context or the pending features of the row before it."""
    target = target_of("llama")
    drafter = made(target, (name, {"layout": "anchor-first"}), "chain")
    prompts = iter([(key, prompt(length, key)) for key, length in enumerate([9, 3, 6, 1, 12, 5])])
    counts = []
    with each_draft(drafter, partial(compare, drafter, counts)):
        options: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": NO_EOS}
        done = generate_many(target, drafter, lambda: next(prompts, None), batch=2, longest=12, **options)
        for one in done:
            ids = prompt([9, 3, 6, 1, 12, 5][int(str(one.key))], int(str(one.key)))
            assert one.tokens == plain_greedy(target, ids, 6)
    assert len(counts) > 12


@pytest.mark.parametrize("shared", [True, False])
def test_the_tree_has_the_likeliest_nodes(shared: bool) -> None:
    """Catches a node whose parent or likelier sibling is missing, scores that are not cumulative, a path that is scored
    after another one."""
    generator = torch.Generator().manual_seed(5)
    for nodes in (1, 4, 9, 25):
        base = torch.randn(2, 3, 6, generator=generator)
        bigram = torch.randn(6, 6, generator=generator)
        slots: Any = Marginals(base) if shared else Bigrams(base, bigram)
        draft = likeliest(slots, 3, 4, nodes)
        for row in range(2):
            scores = {}
            for depth in (1, 2, 3):
                for path in itertools.product(range(6), repeat=depth):
                    logits = [base[row, n] + (0 if shared or n == 0 else bigram[path[n - 1]]) for n in range(depth)]
                    scores[path] = sum(float(x.log_softmax(-1)[t]) for x, t in zip(logits, path, strict=True))
            limits = [base[row, n].topk(4).indices.tolist() for n in range(3)]
            kept = [path for path in scores if all(t in limits[n] for n, t in enumerate(path))]
            if not shared:
                kept = beam(scores, 4)
            expected = sorted(kept, key=scores.__getitem__, reverse=True)[:nodes]
            assert {tuple(path_of(draft, node, row)) for node in range(draft.size)} == set(expected)
            if nodes <= 4:  # neither limit cuts off one of the four likeliest nodes
                assert set(expected) == set(sorted(scores, key=scores.__getitem__, reverse=True)[:nodes])


def beam(scores: dict[tuple[int, ...], float], width: int) -> list[tuple[int, ...]]:
    """The paths that a beam search scores which extends ``width`` paths of a level by their ``width`` best tokens."""
    found: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for _ in range(3):
        children = [sorted(((*path, t) for t in range(6)), key=scores.__getitem__)[-width:] for path in level]
        found += (candidates := list(itertools.chain(*children)))
        level = sorted(candidates, key=scores.__getitem__)[-width:]
    return found


class Bigrams(Slots):
    """Slots that depend on the token before them."""

    def __init__(self, base: Tensor, bigram: Tensor) -> None:
        self.base, self.bigram = base, bigram
        self.before = torch.zeros(len(base), 1, 6)

    def logits(self, depth: int) -> Tensor:
        return self.base[:, depth : depth + 1] + self.before

    def follow(self, tokens: Tensor, parents: Tensor) -> None:
        self.before = self.bigram[tokens]

    def certainty(self) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("case", ["dflash", "dspark-gated-small-vocabulary", "dflash2-windows"])
def test_a_checkpoint_drafts_the_same(case: str, tmp_path: Any) -> None:
    """Catches options of the head, or the list of its draft tokens, that are not saved."""
    target = target_of("llama")
    drafter = made(target, CASES[case], "chain", depth=3)
    drafter.save_pretrained(tmp_path)
    again: Any = load_drafter(tmp_path, target)
    assert again.name == CASES[case][0] and again.taps == (1, 2, 3) and again.shaper.depth == 3
    assert again.settings == drafter.settings and again.lm_head.width == drafter.lm_head.width
    check_stored(drafter, again)


@pytest.mark.parametrize("layout", ["fill-in", "anchor-first"])
def test_the_layout_is_always_written(layout: str) -> None:
    """Catches a checkpoint that another program has to guess about."""
    drafter = dspark(target_of("llama"), None, "chain", layout)
    assert drafter.drafter_config()["layout"] == layout
    given = {key: value for key, value in drafter.drafter_config().items() if key != "layout"}
    with pytest.raises(ValueError, match="layout: a block does not .* set it to fill-in .* or to anchor-first"):
        new_head(DSparkDrafter, drafter.target.config, **given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"taps": [1, 9]}, "taps are .* 9 is no state of it; give numbers from 0"),
        ({"draft_vocab_size": VOCAB_SIZE + 1}, "vocabulary has 97 tokens; give at most that"),
        ({"depth": 5}, "depth is 5, and the head predicts 4 tokens at once; use 4 or less"),
        ({"tree": "tree", "truncate": True}, "truncate cuts chains, and tree is tree"),
        ({"layout": "anchor_first"}, "layout: Input should be 'fill-in' or 'anchor-first'"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], told: str) -> None:
    """Catches a head that is built all the same, and fails or accepts nothing after hours."""
    target = target_of("llama")
    with pytest.raises(ValueError, match=told):
        DFlashDrafter.from_weights(
            target, dflash(target, None, "chain").module.state_dict(), BLOCK | {"layout": "fill-in"} | change
        )


def test_a_draft_ends_with_its_limit() -> None:
    """Catches block tokens verified beyond the limit, and a block made shorter there, which no head was trained on."""
    target = target_of("llama")
    drafter, blocks = dflash(target, 0.0, "chain"), []
    run = target.runner.run

    def seen(part: Any, inputs: Any, *given: Any) -> Any:
        if part is drafter.head.block:
            blocks.append(inputs[0].shape[1])
        return run(part, inputs, *given)

    with mock.patch.object(target.runner, "run", seen):
        result = generate(target, drafter, [prompt(6)], max_new_tokens=8, eos_token_id=NO_EOS)
    sizes = [step.drafted for step in result.trace.steps]
    assert rows_of(result)[0] == plain_greedy(target, prompt(6), 8)
    assert sizes == [4, 1] and blocks == [5, 5]
