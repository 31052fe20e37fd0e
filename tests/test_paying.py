"""Trees that grow while they pay: confidence that is counted, and the draft of most tokens per second for it."""

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
from conformance import NO_EOS, plain_greedy, prompt, target_of
from drafters.policy.growth import FRONTIER, Confidence, Paying, _Growth
from drafters.policy.kept_costs import Costs, Curve
from rigged import AUTO_COSTS, auto_eagle, goes_by
from test_eagle import from_scratch, path_of, trained_head
from torch import Tensor

from drafters import generate
from drafters.drafting.passes import Level, TorchPasses
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.eagle import EagleDrafter, EagleOptions
from drafters.model.rows import Rows
from drafters.policy.costs import CostsByLength

CPU = torch.device("cpu")


def costs(row: float, draft: float) -> Costs:
    """In times of a plain step: of a row more, and of a draft pass."""
    line = Curve((1, 2), (1.0, 1.0 + row))
    return Costs(1.0, line, line, draft, Curve((1,), (draft,)))


def test_confidence_by_hand() -> None:
    """Catches a count of another depth, rank or probability, and the head's word taken for more than it counts for."""
    one = Confidence()
    assert one.of(0, 0, 0.7) == pytest.approx(0.7)
    for number in range(30):
        one.learn(0, 0, 0.72, number % 3 == 0)
    assert one.of(0, 0, 0.7) == pytest.approx((10 + 6 * 0.7) / 36)
    for other in ((1, 0, 0.7), (0, 1, 0.7), (0, 0, 0.2), (0, 0, 0.99)):
        assert one.of(*other) == pytest.approx(other[2])
    one.learn(7, 9, 0.3, True)
    assert one.of(2, 3, 0.3) == one.of(5, 30, 0.3) == pytest.approx((1 + 6 * 0.3) / 7)
    for _ in range(3000):
        one.learn(0, 0, 0.72, False)
    assert one.of(0, 0, 0.7) < 0.02


def test_a_head_that_says_nan_is_not_drafted_with() -> None:
    """Catches a generation that ends with Python's own message because a head's probabilities are NaN; the target's
    tokens come in any case."""
    assert Confidence().of(1, 0, float("nan")) == 0.0
    target = target_of("llama")
    drafter = auto_eagle(target, 0.4)
    for weights in drafter.module.parameters():
        weights.data.fill_(float("nan"))
    ids = prompt(6, 1)
    found = generate(target, drafter, [ids], max_new_tokens=30, eos_token_id=NO_EOS)
    assert found.tokens[0].tolist() == plain_greedy(target, ids, 30)
    assert found.trace.steps[-1].drafted == 0


def test_the_draft_is_the_best_of_all() -> None:
    """Catches a node that does not pay, one that would, and one without its parent: against every subtree there is."""
    draw, sizes = random.Random(0), set()
    for _ in range(60):
        paying = Paying(costs(draw.uniform(0.0, 0.5), 0.1), nodes=9, depth=3, top_k=2)
        paying._sums[:2] = draw.uniform(1.0, 2.5), 1.0
        grown = paying._grown = _Growth()
        parents = [-1]
        for width in (1, 2, 1):
            values = [sorted((draw.uniform(0.05, 0.95), draw.uniform(0.01, 0.4)), reverse=True) for _ in range(width)]
            likely = grown.add(Level([[0, 1]] * width, [[0, 1]] * width, values), parents, paying.confidence)
            parents = likely[: 2 if width == 1 else 1]
        nodes, worth = grown.nodes, 1.0 / max(paying.speedup, 1.0)
        best = 0.0
        for picked in itertools.product((False, True), repeat=len(nodes)):
            kept = [index for index, wanted in enumerate(picked) if wanted]
            if all(nodes[index].parent in (-1, *kept) for index in kept):
                row = paying.costs.verify.at(1 + len(kept)) - 1.0
                best = max(best, sum(nodes[index].chance for index in kept) * worth - row)
        draft = paying._keep(0.0, 0.0, torch.device("cpu"))
        chances = [nodes[paying._rows[place + 1]].chance for place in range(draft.size)]
        row = paying.costs.verify.at(1 + draft.size) - 1.0
        assert sum(chances) * worth - row == pytest.approx(best)
        assert all(-1 <= int(parent) < place for place, parent in enumerate(draft.parents[0]))
        sizes.add(draft.size)
    assert len(sizes) > 3 and 0 in sizes


class Sure:
    """A head that is sure of token 1, as sure as it says."""

    width = 8

    def __init__(self, sure: float) -> None:
        self.logits = torch.full((8,), (1 - sure) / 7).log()
        self.logits[1] = torch.tensor(sure).log()

    def __call__(self, features: Tensor) -> Tensor:
        return self.logits.expand(*features.shape[:-1], -1)

    def tokens(self, places: Tensor) -> Tensor:
        return places + 100


@pytest.mark.parametrize("rate", [0.98, 0.5, 0.1])
def test_it_goes_on_as_long_as_it_is_right(rate: float) -> None:
    """Catches passes that do not pay, none where they do, and a head taken at its word that is often wrong."""
    paying = Paying(costs(0.02, 0.15), nodes=20, depth=7, top_k=3)

    def extend(features: Tensor, places: Tensor, rows: Rows) -> Tensor:
        count = 1 if rows.see is None else rows.see.shape[1]
        assert count == places.shape[1] == features.shape[1]
        return features

    draw, depths = random.Random(1), list[int]()
    for _ in range(300):
        if not paying.wants(7):
            depths.append(0)
            continue
        draft = paying.grow(TorchPasses(torch.zeros(1, 1, 4), extend, Sure(0.9)), 7, CPU)  # type: ignore[arg-type]
        path, tokens, row = [0], list[int](), 0
        while True:
            right = draw.random() < rate
            tokens.append(101 if right else 99)
            children = [n for n in range(draft.size) if draft.parents[0, n] == row - 1 and draft.tokens[0, n] == 101]
            if not right or not children:
                break
            row = children[0] + 1
            path.append(row)
        paying.learn(path, tokens)
        depths.append(max((len(path_of(draft, node)) for node in range(draft.size)), default=0))
    late, found = sum(depths[-100:]) / 100, paying.promised()
    assert late > 6 if rate == 0.98 else 0.5 < late < 3.5 if rate == 0.5 else late < 0.3
    assert found.steps == 300 and found.tokens >= 300
    if rate == 0.1:
        assert found.choice == "no draft" and found.plain_steps < 1.15 * found.tokens
    else:
        assert found.tokens > found.plain_steps


def test_other_costs() -> None:
    """Catches trees that grow by the costs of a shorter text, and a judgement (whether drafts pay) that is carried from
    one length to another: after a long prompt, none would be drafted for a short one.
    """
    cheap, dear = costs(0.02, 0.15), costs(2.0, 0.4)
    paying, extend = Paying(cheap, nodes=20, depth=5, top_k=3), lambda features, places, rows: features

    def sizes(steps: int) -> list[int]:
        head, predicted = Sure(0.7), torch.zeros(1, 1, 4)
        given: Any = predicted, extend, head
        return [paying.grow(TorchPasses(*given), 5, CPU).size for _ in range(steps) if paying.wants(5)]

    large, rate = sizes(12)[-1], paying.speedup
    assert rate > 1.3 and large > 3
    for _ in range(2):
        paying.reckon(dear)
        assert max(sizes(18)) == 0 and paying.speedup < 0.8
        assert len(sizes(60)) < 6
        paying.reckon(cheap)
        assert paying.speedup == rate and len(found := sizes(8)) == 8 and found[-1] == large
        rate = paying.speedup
    cheaper = costs(0.01, 0.1)
    paying.reckon(dear), paying.reckon(cheaper)
    assert len(sizes(8)) == 8


def test_a_tree_after_steps_without_one_takes_them_in() -> None:
    """Catches probes taken for as cheap as a draft that follows another."""
    late = 0.05
    paying, extend = Paying(costs(2.0, 0.4)._replace(late=late), 20, 5, 3), lambda features, places, rows: features
    given: Any = torch.zeros(1, 1, 4), extend, Sure(0.7)
    drafted: list[tuple[int, float]] = []
    for step in range(900):
        before = paying.promised().plain_steps
        if paying.wants(5):
            paying.grow(TorchPasses(*given), 5, CPU)
            drafted.append((step, paying.promised().plain_steps - before))
    (first, alone), *_, (earlier, _), (last, whole) = drafted
    assert first == 0 and last - earlier > 100
    assert whole - alone == pytest.approx(late * (last - earlier - 1)) and paying.speedup < 0.8
    while not paying.wants(5):
        pass
    paying.begin()
    before = paying.promised().plain_steps
    paying.grow(TorchPasses(*given), 5, CPU)
    assert paying.promised().plain_steps - before == pytest.approx(alone)


def grows_at(drafter: EagleDrafter, costs: Costs) -> None:
    """Drafts that grow have these costs; those of a fixed shape never pay."""
    goes_by(drafter, lambda *given: costs)
    line = Curve((1, 2), (1.0, 9.0))
    assert drafter.auto is not None
    drafter.auto._ask = lambda *given: Costs(1.0, line, line, 9.0, line)


def test_drafts_are_what_the_head_says() -> None:
    """Catches a head fed another node's feature or token, siblings that see each other, wrong positions, and what is
    learnt of one node put down to another: none of it changes the output, only tau.
    """
    target, sizes = target_of("llama"), []
    cheap = Costs(1.0, *AUTO_COSTS[1:3], 0.02, Curve((1,), (0.02,)))
    drafter = EagleDrafter(target, trained_head(target), EagleOptions(top_k=3, nodes=12, depth=4))
    grows_at(drafter, cheap)
    propose, learnt = drafter.propose, []

    def checked(state: DecodeState) -> DraftTree:
        draft = propose(state)
        assert drafter.paying is not None
        grown = drafter.paying._grown
        for row, index in drafter.paying._rows.items():
            if draft.size and index in grown.rows:
                level, place = grown.rows[index]
                logits = from_scratch(drafter, state.tokens[0], path_of(draft, row - 1))
                found = logits.float().softmax(-1).topk(3)
                assert grown.levels[level].tokens[place] == found.indices.tolist()
                assert grown.levels[level].probabilities[place] == pytest.approx(found.values.tolist(), abs=1e-2)
        sizes.append((draft.size, len({*draft.parents[0].tolist()})))
        return draft

    def learn(depth: int, rank: int, probability: float, right: bool) -> None:
        learnt.append((depth, rank, right))

    with mock.patch.object(drafter, "propose", checked), mock.patch.object(Confidence, "learn", side_effect=learn):
        generate(target, drafter, [prompt(9)], max_new_tokens=40, eos_token_id=NO_EOS)
    assert max(size for size, _ in sizes) > 4 and max(inner for _, inner in sizes) > 2
    assert {depth for depth, _, _ in learnt} >= {0, 1} and any(right for *_, right in learnt)


@pytest.mark.parametrize("dear", ["growing", "fixed shapes", "both"])
def test_what_promises_more_drafts(dear: str) -> None:
    """Catches trees that go on growing where asking the host at each level costs more than it saves, a fixed shape
    where they pay, and a plain step where either would.
    """
    target = target_of("llama")
    drafter = auto_eagle(target, 0.0)
    line, slow = Curve((1, 16), (1.0, 1.1)), Curve((1, 16), (0.9, 0.9))
    cheap, costly = Costs(1.0, line, line, 0.02, Curve((1,), (0.02,))), Costs(1.0, line, line, 0.9, slow)
    goes_by(drafter, lambda *given: costly if dear != "growing" else cheap)
    if dear == "fixed shapes":
        drafter._grown_costs = CostsByLength(lambda length: cheap)
    elif dear == "growing":
        drafter._grown_costs = CostsByLength(lambda length: costly)
    grew, propose = [], drafter.propose

    def noted(state: DecodeState) -> DraftTree:
        draft = propose(state)
        grew.append(drafter._growing is not None and draft.size > 0)
        return draft

    with mock.patch.object(drafter, "propose", noted):
        result = generate(target, drafter, [prompt(9)], max_new_tokens=120, eos_token_id=NO_EOS)
    assert result.tokens[0].tolist() == plain_greedy(target, prompt(9), 120)
    late = [step.drafted for step in result.trace.steps][-10:-2]
    assert (sum(grew[-10:-2]) > 2) == (dear == "fixed shapes")
    assert (min(late) >= 3) == (dear != "both")


def test_more_may_be_forwarded_than_is_kept() -> None:
    """Catches a head's cache with room for the draft alone, which the candidates of a long look ahead overflow."""
    target = target_of("llama")
    drafter = EagleDrafter(target, trained_head(target), EagleOptions(top_k=4, nodes=3))
    grows_at(drafter, AUTO_COSTS)
    with mock.patch.object(Paying, "_worth_a_pass", lambda paying, likely: (FRONTIER, 0.0)):
        result = generate(target, drafter, [prompt(9)], max_new_tokens=24, eos_token_id=NO_EOS)
    assert result.tokens[0].tolist() == plain_greedy(target, prompt(9), 24)
    assert max(step.drafted for step in result.trace.steps) <= 3
