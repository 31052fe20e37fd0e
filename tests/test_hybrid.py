"""Hybrid: the conformance suite, a head that stays in step with what was copied, and the choice between the two."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import conformance
import pytest
import torch
from conformance import NO_EOS, prompt, target_of
from distribution import LIMIT, WARPS, deviation, toy
from drafters.policy.kept_costs import Costs, Curve
from drafters.policy.looking import FRUITLESS
from drafters.policy.weighing import Scales, Trust
from rigged import AUTO_COSTS, Cycling, auto_eagle, eagle, medusa, perturbed
from test_auto import by_length
from test_eagle import check_draft
from test_prompt_lookup import Primed

from drafters import Drafter, TargetModel, generate, generate_many, make_drafter
from drafters.base import Promised
from drafters.drafting.one_tree import leaves_draft, overlaps, with_copies
from drafters.drafting.retrieval import NOTHING, Copy
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.methods.eagle import EagleDrafter
from drafters.methods.hybrid import HybridDrafter, _matching
from drafters.methods.prompt_lookup import PromptLookupDrafter


def hybrid(
    target: TargetModel, head: Drafter, lookup: Drafter | None = None, costs: Costs = AUTO_COSTS, one_tree: bool = False
) -> Drafter:
    """One that weighs, on the machine of ``costs``."""
    lookup = lookup or Primed.from_options(target, gamma=5)
    drafter = HybridDrafter.from_options(target, head=head, lookup=lookup, one_tree=one_tree)
    assert drafter.weighing is not None
    drafter.weighing.ask = lambda *given: costs
    return drafter


def by_match(
    target: TargetModel, head: Drafter, lookup: Drafter | None = None, match: int = 3, one_tree: bool = False
) -> HybridDrafter:
    lookup = lookup or Primed.from_options(target, gamma=3)
    return HybridDrafter.from_options(target, head=head, lookup=lookup, match=match, one_tree=one_tree)


TestHybrid = conformance.suite(
    lambda t: hybrid(t, auto_eagle(t, 0.4)), accepts="some", longest_draft=8, remembers=True,
    families=("llama", "mistral-sliding"),
)  # fmt: skip
TestDraftModel = conformance.suite(
    lambda t: hybrid(t, by_length("speculative", t, draft_model=perturbed(t, 0.05))), accepts="some", longest_draft=12,
    remembers=True, families=("llama",),
)  # fmt: skip
TestByMatch = conformance.suite(
    lambda t: by_match(t, eagle(t, 0.4, "static")), accepts="some", longest_draft=5, families=("llama", "qwen3")
)
TestOneTree = conformance.suite(
    lambda t: by_match(t, eagle(t, 0.4, "static"), match=1, one_tree=True), accepts="some", longest_draft=5,
    families=("mistral-sliding",),
)  # fmt: skip
TestOneTreeWeighed = conformance.suite(
    lambda t: hybrid(t, auto_eagle(t, 0.4), one_tree=True), accepts="some", longest_draft=8, remembers=True,
    families=("llama",),
)  # fmt: skip


class Spoilt(PromptLookupDrafter):
    """Its index holds whatever is given to it, for what the model says next: now right, now wrong."""

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        known = len(state.tokens[row])
        answer = conformance.plain_greedy(self.target, state.tokens[row], 2)
        wrong = (answer[1] + 1) % self.target.vocab_size
        drafts = ([answer[0], wrong], answer, [wrong, wrong])
        return Copy(drafts[known % 3], [-1, 0], [0.5, 0.5], known % 5)


@pytest.mark.parametrize(("rows", "temperature"), [(1, 0.0), (1, 0.9), (3, 0.0)])
@pytest.mark.parametrize("make", [lambda t: eagle(t, None, "chain", depth=3), lambda t: auto_eagle(t, None, Cycling())])
def test_the_head_takes_in_what_was_copied(
    make: Callable[[TargetModel], EagleDrafter], rows: int, temperature: float
) -> None:
    """Catches features of copied steps that the head misses or takes in twice: only its acceptance would suffer."""
    target = target_of("llama")
    head = make(target)
    drafter = by_match(target, head, Spoilt.from_options(target))
    propose, checked, copied = drafter.propose, [], []

    def forced(state: DecodeState) -> DraftTree:
        draft = propose(state)
        copied.append(drafter._by == "lookup")
        if drafter._by == "head" and draft.size:
            for row, finished in enumerate(state.finished):
                if not finished:
                    check_draft(head, state, draft, row)
            checked.append(copied[-2:-1])
        return draft

    with mock.patch.object(drafter, "propose", forced):
        for seed in range(2):
            prompts = [prompt(9 + 4 * row, seed) for row in range(rows)]
            options = {"max_new_tokens": 24, "eos_token_id": NO_EOS, "temperature": temperature, "seed": seed}
            generate(target, drafter, prompts, **options)  # type: ignore[arg-type]
    assert [True] in checked and [False] in checked


@pytest.mark.parametrize(
    ("by", "ended", "told"), [("head", False, "observe"), ("lookup", True, "follow"), ("no one", False, "follow"),
                              ("no one", True, "observe")],
)  # fmt: skip
def test_what_the_head_is_told(by: str, ended: bool, told: str) -> None:
    """Catches a head that has rested and does not hear that a row has ended: by whom a batch was waited for decides how
    much of its promises is believed."""
    target, state, verdict = target_of("llama"), mock.Mock(), mock.Mock(tokens=[], rows=[])
    drafter: Any = hybrid(target, auto_eagle(target, None))
    drafter.head, drafter._own = mock.Mock(), mock.Mock()
    state.ended_by.return_value, drafter.weighing, drafter._by = ended, None, by
    drafter.observe(state, mock.Mock(), mock.Mock(), verdict)
    assert [name for name in ("observe", "follow") if getattr(drafter.head, name).called] == [told]


def test_the_head_rests_in_its_text_alone() -> None:
    """Catches a head that is not asked in a text because its drafts, chosen otherwise, paid in none before."""
    target = target_of("llama")
    drafter: Any = hybrid(target, auto_eagle(target, None, costs(2.0)), None, costs(2.0))
    propose, asked = drafter.head.propose, []

    def noted(state: DecodeState) -> DraftTree:
        asked.append((state.sampling.temperature, state.steps))
        return propose(state)

    with mock.patch.object(drafter.head, "propose", noted):
        for temperature in (1.0, 0.0):
            generate(target, drafter, [prompt(9)], max_new_tokens=150, eos_token_id=NO_EOS, temperature=temperature)
    assert sum(temperature > 0 for temperature, _ in asked) < 50 and (1.0, 0) in asked and (0.0, 0) in asked


@pytest.mark.parametrize("warp", [0, 1])
def test_output_is_distributed_as_the_targets(warp: int) -> None:
    """Catches a choice between the two that hangs on what the head drew, and copies verified by the head's q."""
    target = toy()
    head = by_length("speculative", target, draft_model=toy(1, 1))
    lookup = PromptLookupDrafter.from_options(target, gamma=3, max_ngram=4)
    assert deviation(hybrid(target, head, lookup), WARPS[warp], tokens=2_000) < LIMIT


@pytest.mark.parametrize("one_tree", [False, True])
def test_an_eagle_head_sampled(one_tree: bool) -> None:
    """Catches a head's tree verified as a copy is, and a copy beside it that is drawn where the head's is refused."""
    target = toy()
    drafter = by_match(target, eagle(target, 0.6, "static"), match=1 if one_tree else 2, one_tree=one_tree)
    assert deviation(drafter, WARPS[0], tokens=1_500) < LIMIT


TREE = DraftTree.from_parents(torch.tensor([[5, 6, 7]]), [-1, -1, 0])  # 5 (then 7) and 6


def test_one_tree_by_hand() -> None:
    """Catches a copy that is not merged with what the head drafted, one below another node, rows that change their
    number, a sampled node's q given to a copied one, levels at which verification stops, filling that is accepted."""
    copy = Copy([5, 7, 8, 9, 4], [-1, 0, 1, 2, -1], [0.5] * 5, 3)
    held = overlaps(TREE, [copy])
    assert held == [{0: 0, 1: 2}] and [leaves_draft(copy, held[0], node) for node in range(5)] == [0, 0, 1, 0, 1]
    whole = with_copies(TREE, [copy], held, [[4, 3, 2]])
    assert whole.tokens.tolist() == [[5, 6, 7, 8, 9, 4]] and whole.parents.tolist() == [[-1, -1, 0, 2, 3, -1]]
    assert whole.valid is None and len(whole.levels) == 4 and whole.ancestors()[0, 5].tolist() == [1, 1, 0, 1, 1, 1, 0]
    q = torch.ones(1, 1, 10) / 10
    drawn = DraftTree.from_parents(TREE.tokens, [-1, -1, 0], q=q, q_row=[0, 0, -1])
    sampled = with_copies(drawn, [copy], held, [[2]])
    assert sampled.q is q and sampled.q_row is not None and sampled.q_row.tolist() == [[0, 0, -1, -1]]
    assert sampled.levels == (2, 0, 0)
    chain = DraftTree.chain(torch.tensor([[5, 7]]))
    assert with_copies(chain, [copy], overlaps(chain, [copy]), [[2, 3]]).is_chain
    rows = replace(TREE, tokens=TREE.tokens.expand(2, -1), parents=TREE.parents.expand(2, -1), see=None)
    both = with_copies(rows, [copy, NOTHING], [held[0], {}], [[2], []])
    assert both.valid is not None and both.valid.tolist() == [[True] * 4, [True] * 3 + [False]]
    assert both.parents.tolist()[0] == [-1, -1, 0, 2]
    alone = with_copies(DraftTree.empty(1, torch.device("cpu")), [copy], [{}], [[4, 0]])
    assert alone.tokens.tolist() == [[5, 4]] and with_copies(TREE, [copy], held, [[]]) is TREE


def test_copies_behind_a_head_are_weighed_by_their_rows() -> None:
    """Catches copied nodes that cost more than they bring, held ones counted, and trust in a copy that the head has
    not drafted though it could have, of which hardly any is right."""
    scales = Scales(costs(0.25))
    for match in (3, 4, 5, 6):
        taught(scales.trust, match, 0.9)
    taught(scales.apart, 3, 0.1)
    taught(scales.apart, 5, 0.8)
    assert scales.beside([CHAIN], [{}], 2, 1) == [[]]  # 0.1 of a token for a quarter of a step
    assert scales.beside([CHAIN], [{0: 0, 1: 1}], 2, 1) == [[2, 3]]  # 0.9 * 0.9 * 0.8, and 0.9 of that
    assert scales.promised == pytest.approx([0, 0.65 + 0.58, 0.5], abs=0.03)
    scales = Scales(costs(0.25))
    for _ in range(100):
        scales.learn(CHAIN, [5, 6, 9], {0: 0})
    assert scales.apart.of(4, 0.5) > 0.9 and scales.apart.of(3, 0.5) == Trust().of(3, 0.5)
    assert scales.trust.of(3, 0.5) > 0.9 and scales.trust.of(5, 0.5) < 0.1


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("kind", ["eagle", "auto", "speculative", "medusa"])
def test_a_head_learns_of_its_own_rows_alone(kind: str, rows: int) -> None:
    """Catches a head that takes an accepted copy for a candidate of its own, or for tokens that its cache holds."""
    target = target_of("llama")
    heads: dict[str, Callable[[], Any]] = {
        "eagle": lambda: eagle(target, None, "static"),
        "auto": lambda: auto_eagle(target, None, costs(0.01)),
        "speculative": lambda: by_length("speculative", target, draft_model=perturbed(target, 0.3)),
        "medusa": lambda: medusa(target, None, "static", nodes=6),
    }
    head = heads[kind]()
    drafter = by_match(target, head, Primed.from_options(target, gamma=4), match=1, one_tree=True)
    observe, beyond = head.observe, []

    def checked(state: DecodeState, draft: DraftTree, output: Any, verdict: Any) -> None:
        observe(state, draft, output, verdict)
        for row, path in enumerate(verdict.rows):
            beyond.append(any(place > draft.size for place in path))
            if kind == "speculative" and not state.finished[row]:
                own, known = verdict.own_rows(row, draft.size), head._cache.lengths[row]
                assert known <= len(state.tokens[row]) - len(path) + len(own) - 1

    with mock.patch.object(head, "observe", checked):
        prompts = [prompt(9 + 4 * row) for row in range(rows)]
        found = generate(target, drafter, prompts, max_new_tokens=24, eos_token_id=NO_EOS)
    assert conformance.rows_of(found) == [conformance.plain_greedy(target, ids, 24) for ids in prompts]
    assert any(beyond)


def costs(row: float, look: float = 0.0, search: float = 0.0) -> Costs:
    line = Curve((1, 2), (1.0, 1.0 + row))
    return Costs(1.0, line, line, look, Curve((1,), (search,)))


CHAIN = Copy([5, 6, 7, 8], [-1, 0, 1, 2], [0.5] * 4, 3)


def taught(trust: Trust, match: int, rate: float, claim: float = 0.5) -> None:
    for number in range(1000):
        trust.learn(match, claim, (number % 10) < 10 * rate)


def test_the_choice_by_hand() -> None:
    """Catches a copy drafted where the head's draft is worth more, one longer than pays, and the other way round."""
    scales = Scales(costs(0.25))
    for match, rate in ((3, 0.9), (4, 0.8), (5, 0.1)):
        taught(scales.trust, match, rate)
    # Against plain decoding, a row costs a quarter: 0.9 and 0.9 * 0.8 are worth it, 0.07 is not.
    assert scales.best_parts([CHAIN], 1)[0].tokens == [5, 6]
    assert scales.promised == pytest.approx([1.0, 1 + 0.9 + 0.9 * 0.8, 1.5], rel=0.03)
    # A head whose drafts give 4 tokens in the time of 1.5 steps: then a token is worth 0.375 steps, at most.
    for number in range(1, 200):
        scales.note_head(Promised(0, 0, 0, ""), Promised(1, 4.0, 1.5, ""))
        assert scales.best_parts([CHAIN], 1)[0].tokens == [] or number < 9
    # A copy that is always right, of rows that cost little, is worth more than that.
    free = Scales(costs(0.01))
    for match in (3, 4, 5):
        taught(free.trust, match, 1.0)
    for _ in range(200):
        free.note_head(Promised(0, 0, 0, ""), Promised(1, 4.0, 1.5, ""))
    assert free.best_parts([CHAIN], 1)[0].tokens == [5, 6, 7, 8]


def test_chances_that_are_too_high() -> None:
    """Catches promises of what was chosen for its chances and never keeps them, and a doubt that never ends."""
    scales = Scales(costs(0.25))
    for match, rate in ((3, 0.9), (4, 0.8), (5, 0.1)):
        taught(scales.trust, match, rate)
    for _ in range(100):  # of 1.62 tokens that the chances promise, one is right
        scales.best_parts([CHAIN], 1)
        scales.settle(1)
    before = list(scales.promised)
    assert scales.best_parts([CHAIN], 1)[0].tokens == [5, 6]
    assert scales.promised[1] - before[1] == pytest.approx(2.0, rel=0.03)
    copied = []
    for _ in range(100):
        copied.append(scales.best_parts([CHAIN], 1) != [NOTHING])
        scales.settle(0)
    assert 3 < sum(copied) < 50
    for _ in range(100):  # of drafts that the head made
        scales.settle(0)
    assert scales.best_parts([CHAIN], 1)[0].tokens == [5, 6]


def test_of_a_tree_the_likeliest_nodes() -> None:
    """Catches nodes kept without their parent, renumbered wrongly, or by their claim and not by their chance."""
    scales, tree = Scales(costs(0.3)), Copy([4, 5, 6, 7], [-1, -1, 1, 2], [0.25, 0.65, 0.75, 0.2], 6)
    for match, claim, rate in ((6, 0.25, 0.2), (6, 0.65, 0.9), (7, 0.75, 0.8), (8, 0.2, 0.1)):
        taught(scales.trust, match, rate, claim)
    assert scales.best_parts([tree], 1)[0] == Copy([5, 6], [-1, 0], [0.65, 0.75], 6)
    taught(scales.trust, 6, 0.9, 0.25)
    taught(scales.trust, 6, 0.1, 0.65)
    assert scales.best_parts([tree], 1)[0] == Copy([4], [-1], [0.25], 6)


def test_looking_rests_while_it_gains_less_than_it_takes() -> None:
    """Catches a tenth of the time spent on looking for what is never there, text that begins to repeat itself and is
    looked at every now and then, looks left out where they take no time, and time that no promise tells of.
    """

    def run(scales: Scales, found: list[Copy], steps: int) -> int:
        looked = 0
        for _ in range(steps):
            looks = scales.looking.step()
            kept = scales.best_parts(found, 1) if looks else [NOTHING]
            scales.settle(len(kept[0].tokens))
            looked += looks
        return looked

    dear, cheap = Scales(costs(0.25, look=0.1 / FRUITLESS)), Scales(costs(0.25, look=0.0002))
    for match, rate in ((3, 0.95), (4, 0.95), (5, 0.95), (6, 0.95)):
        taught(dear.trust, match, rate)
    assert run(cheap, [NOTHING], 200) == 200 and run(dear, [NOTHING], 300) < 200
    run(dear, [NOTHING], 3000)
    before = dear.promised[2]
    assert run(dear, [NOTHING], 300) == pytest.approx(30, abs=4)  # a look takes 0.1 steps, of which 1% may be lost
    assert dear.promised[2] - before == pytest.approx(0.1 * 30, abs=0.4)
    assert run(dear, [CHAIN], 11) >= 1 and run(dear, [CHAIN], 100) == 100  # from the first copy on
    assert run(dear, [NOTHING], 10) == 10  # and it is not given up at once
    run(dear, [NOTHING], 3000)
    dear.looking.begin()
    assert dear.looking.step()  # another text
    searched = Scales(costs(0.25, look=0.01 / FRUITLESS, search=0.09))
    run(searched, [NOTHING], 3000)
    before = searched.promised[2]
    assert run(searched, [NOTHING], 300) == pytest.approx(30, abs=4)
    assert searched.promised[2] - before == pytest.approx(0.1 * 30, abs=0.4)


def test_what_no_second_row_pays_for_is_not_looked_for() -> None:
    """Catches a first row that costs nothing and has everything built that was ever seen, node by node."""
    free = Curve((1, 2, 3), (1.0, 1.0, 1.1))
    scales = Scales(Costs(1.0, free, free, 0.0, Curve((1,), (0.0,))))
    assert scales.least == pytest.approx(3 * 0.1)


def test_what_a_look_gains_beside_a_head_counts() -> None:
    """Catches looks that end where copies pay as parts of a head's draft alone, which a look has to find, too."""
    scales = Scales(costs(0.05, look=0.1))
    for match in (3, 4, 5, 6):
        taught(scales.trust, match, 0.9)
        taught(scales.apart, match, 0.9)
    looked = 0
    for _ in range(400):
        if scales.looking.step():
            looked += 1
            assert scales.best_parts([NOTHING], 1) == [NOTHING]
            scales.beside([CHAIN], [{}], 1, 1)
        scales.note_plain()
    assert looked == 400


def test_a_weighed_copy_is_the_best_there_is() -> None:
    """Catches a search that stops at a node which does not pay before one that does: where rows are cheap again, where
    a tree costs less than a chain, and where a head's draft has to be beaten."""
    draw = random.Random(0)
    kinds = set()
    for _ in range(600):
        rows = (1, 2, 4, 8, 16, 32)
        curves = [Curve.of({n: 1 + draw.choice([0.0, 0.02, 0.1]) * n * draw.random() for n in rows}) for _ in range(2)]
        scales = Scales(Costs(1.0, *curves, 0.0, Curve((1,), (0.0,)), draw.choice([0.0, 0.05])))
        for match in range(1, 12):
            taught(scales.trust, match, draw.choice([0.1, 0.4, 0.7, 1.0]))
        size, straight = draw.randrange(1, 12), draw.randrange(1, 5)
        parents = [
            node - 1 if node < straight or draw.random() < 0.6 else draw.randrange(-1, node) for node in range(size)
        ]
        found = Copy(list(range(size)), parents, [0.5] * size, draw.randrange(1, 4))
        nodes, worth = scales._likeliest(found), 1.0
        values = [(0.0, 0)]
        for count in range(1, size + 1):
            kept = sorted(node for _, node in nodes[:count])
            chain = all(node == place and parents[node] == place - 1 for place, node in enumerate(kept))
            tokens = sum(chance for chance, _ in nodes[:count])
            seconds = curves[1 if chain else 0].at(count + 1) + tokens * scales.costs.accepted
            values.append((1 + tokens * worth - seconds, count))
        best, count = max(values, key=lambda pair: (pair[0], -pair[1]))
        assert len(scales.best_parts([found], 1)[0].tokens) == (count if best > 1e-12 else 0)
        kinds.add((count > 0, count < size))
    assert kinds == {(False, True), (True, True), (True, False)}


def test_a_batch_copies_together() -> None:
    """Catches rows without a match that count for nothing, or finished ones that count, and rows of another's part.

    By hand: a node is right with 0.9, 0.8 and then hardly ever; a row of the draft costs 0.5 steps here. For one row
    0.9 and 0.72 pay, for two of which one has found something, half as much does not.
    """
    scales = Scales(costs(0.5))
    for match, rate in ((3, 0.9), (4, 0.8), (5, 0.1)):
        taught(scales.trust, match, rate)
    assert scales.best_parts([CHAIN, NOTHING], 2) == [NOTHING, NOTHING]
    both = scales.best_parts([CHAIN, CHAIN._replace(tokens=[1, 2, 3, 4])], 2)
    assert [one.tokens for one in both] == [[5, 6], [1, 2]]
    assert scales.promised == pytest.approx([1.0, 1 + 0.9 + 0.9 * 0.8, 2.0], rel=0.03)  # of a row
    scales = Scales(costs(0.5))
    for match, rate in ((3, 0.9), (4, 0.8), (5, 0.1)):
        taught(scales.trust, match, rate)
    assert [one.tokens for one in scales.best_parts([NOTHING, CHAIN], 1)] == [[], [5, 6]]  # the first has finished
    assert _matching([CHAIN, NOTHING, NOTHING], 3, 3) == [NOTHING] * 3
    assert _matching([CHAIN, NOTHING, NOTHING], 2, 3) == [CHAIN, NOTHING, NOTHING]
    assert _matching([CHAIN, CHAIN._replace(match=2)], 2, 3) == [CHAIN, NOTHING]


@pytest.mark.parametrize("match", [3, "auto"])
def test_rows_of_a_batch_come_and_go(match: int | str) -> None:
    """Catches a row that is copied from its neighbour's text, a finished one that drafts, and a joined one for which
    the head or the lookup still has the answer before it."""
    target = target_of("llama")
    prompts = [prompt(4 + 3 * n % 11, n) for n in range(7)]
    expected = [conformance.plain_greedy(target, ids, 20) for ids in prompts]
    eos = [expected[1][4], expected[3][9]]
    ends = [next((place for place, token in enumerate(row) if token in eos), 19) + 1 for row in expected]
    expected = [row[:end] for row, end in zip(expected, ends, strict=True)]
    lookup = make_drafter("suffix", target, alpha=3.0, nodes=6)
    head = auto_eagle(target, 0.4, costs(0.25))
    drafter = hybrid(target, head, lookup, costs(0.25)) if match == "auto" else by_match(target, head, lookup)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": eos}
    waiting = deque(enumerate(prompts))
    propose, copied = drafter.propose, []

    def noted(state: DecodeState) -> DraftTree:
        draft = propose(state)
        copied.append(draft.extra.source == lookup.name)
        return draft

    with mock.patch.object(drafter, "propose", noted):
        for _ in range(2):  # the second time the answers are known
            found = generate(target, drafter, prompts, **options)
            assert conformance.rows_of(found) == expected
        whole = len(copied)
        next_prompt = lambda: waiting.popleft() if waiting else None  # noqa: E731
        many = generate_many(target, drafter, next_prompt, batch=3, longest=20, **options)
        assert [one.tokens for one in sorted(many, key=lambda one: int(str(one.key)))] == expected
    for some in (copied[:whole], copied[whole:]):
        assert True in some and False in some
    assert len({*ends}) > 2


def test_trust_is_counted_whoever_drafts() -> None:
    """Catches copies that are never tried, since nothing is known of them, and that teach nothing, not being tried."""
    scales = Scales(costs(0.25))
    for _ in range(100):
        scales.learn(CHAIN, [5, 6, 9])
    assert scales.trust.of(3, 0.5) > 0.9 and scales.trust.of(4, 0.5) > 0.9 and scales.trust.of(5, 0.5) < 0.1
    assert scales.trust.of(9, 0.5) == Trust().of(9, 0.5)
    branches = Copy([5, 6, 7], [-1, -1, 1], [0.4, 0.6, 0.5], 3)
    scales = Scales(costs(0.25))
    for _ in range(100):
        scales.learn(branches, [6, 7])
    assert scales.trust.of(3, 0.4) < 0.1 and scales.trust.of(3, 0.6) > 0.9 and scales.trust.of(4, 0.5) > 0.9


class Wrong(PromptLookupDrafter):
    """Finds what the model does not say next."""

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        (right,) = conformance.plain_greedy(self.target, state.tokens[row], 1)
        return Copy([(right + 1) % self.target.vocab_size], [-1], [0.5], 4)


def test_what_seldom_follows_is_told_apart() -> None:
    """Catches one kind for all small claims: what is right once in ten times is left out with what never is."""
    scales = Scales(costs(0.03))
    for claim, rate in ((0.15, 0.1), (0.04, 0.0)):
        taught(scales.trust, 1, rate, claim)
    assert scales.best_parts([Copy([5, 6], [-1, -1], [0.04, 0.15], 1)], 1)[0].tokens == [6]


def test_each_where_it_is_right() -> None:
    """Catches a choice that stays with one of the two: for a text that has been read a random head must not draft, and
    what is always wrong must not be copied.
    """
    target = target_of("llama")
    options = {"max_new_tokens": 38, "eos_token_id": NO_EOS}  # as much as the primed ones have read
    for noise, kind, low, high in ((None, Primed, 0.3, 1.0), (0.0, Wrong, 0.0, 0.1)):
        head, lookup = auto_eagle(target, noise, costs(0.25)), kind.from_options(target, gamma=5)
        drafter = hybrid(target, head, lookup, costs(0.25))
        assert isinstance(drafter, HybridDrafter)
        steps, copied = [], []
        for seed in range(4):
            result = generate(target, drafter, [prompt(8, seed)], **options)  # type: ignore[arg-type]
            found = drafter.promised()
            assert found is not None
            steps.append(found.steps)
            copied.append(next(iter(drafter.weighing._scales.values())).promised[0])
            assert steps[-1] - sum(steps[-2:-1]) == len(result.trace.steps)
        assert low <= (copied[-1] - copied[1]) / (steps[-1] - steps[1]) <= high


def test_from_a_config_and_what_is_refused() -> None:
    """Catches a nested entry that cannot be expressed, and heads and lookups that would break in the first step."""
    target = target_of("llama")
    model = {"drafter": "speculative", "draft_model": perturbed(target, 0.1), "gamma": "auto"}
    made = make_drafter("hybrid", target, head=model)
    assert isinstance(made, HybridDrafter) and made.lookup.name == "prompt_lookup" and made.max_draft == 16
    assert made.remembers and not make_drafter("hybrid", target, head=model | {"gamma": 3}, match=4).remembers
    with pytest.raises(ValueError, match="'lookahead', which has to draft every step itself"):
        make_drafter("hybrid", target, head={"drafter": "lookahead"})
    with pytest.raises(ValueError, match="'speculative' promises nothing"):
        make_drafter("hybrid", target, head=model | {"gamma": 3})
    with pytest.raises(ValueError, match="'speculative', which does not copy"):
        make_drafter("hybrid", target, head=model, lookup=model)
    with pytest.raises(ValueError, match="match"):
        make_drafter("hybrid", target, head=model, match=0)
