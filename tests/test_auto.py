"""Drafts that fit the machine: acceptance that is learnt, and the best shape for it and for what forwards cost."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import conformance
import pytest
import torch
from conformance import NO_EOS, prompt, rows_of, target_of
from drafters.policy.kept_costs import Costs, Curve
from rigged import AUTO_COSTS, Cycling, auto_eagle, goes_by, medusa, perturbed
from test_eagle import from_scratch

from drafters import Drafter, TargetModel, generate, make_drafter
from drafters.loop.refill import Refilled
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.loop.step import step
from drafters.loop.tree import DraftTree
from drafters.methods.eagle import EagleOptions
from drafters.policy import costs as cost
from drafters.policy import shape as auto
from drafters.policy.shape import Chooser, Rates, Shape, best_shape, likeliest, promise
from eval.figures import metrics
from eval.measure.runner import Limits, Run, drafter_method

GREEDY = Sampling()
Paths = tuple[tuple[int, ...], ...]


def line(first: float, row: float) -> Curve:
    return Curve((1, 2), (first, first + row))


def priced(row: float, draft: float, draft_row: float) -> Costs:
    """In times of a forward of one row: of a row more, of a draft pass, and of a row more in it."""
    return Costs(1.0, line(1.0, row), line(1.0, row), draft, line(draft, draft_row))


def trees(nodes: int, depth: int, ranks: int, root: tuple[int, ...] = ()) -> Iterator[frozenset[tuple[int, ...]]]:
    """Every tree of at most so many nodes below ``root`` whose nodes have their elder siblings."""
    yield frozenset()
    if len(root) == depth:
        return
    for children in range(1, min(ranks, nodes) + 1):
        names = [(*root, rank) for rank in range(children)]
        for parts in itertools.product(*([*trees(nodes - children, depth, ranks, name)] for name in names)):
            if children + sum(map(len, parts)) <= nodes:
                yield frozenset(names).union(*parts)


def value(tree: frozenset[tuple[int, ...]], table: list[list[float]], costs: Costs) -> float:
    """Tokens a second, written down from the definition."""
    tokens = 1.0 + sum(math.prod(table[d][rank] for d, rank in enumerate(path)) for path in tree)
    if not tree:
        return 1.0 / costs.plain
    inner = [path for path in tree if any(other[:-1] == path for other in tree)]
    passes = [sum(len(path) == level for path in inner) for level in range(1, max(map(len, tree)))]
    verify = costs.chain if len(tree) == max(map(len, tree)) else costs.verify
    trials = (tokens - 1) * costs.accepted
    return tokens / (verify.at(1 + len(tree)) + trials + costs.first + sum(map(costs.draft.at, passes)))


def test_best_shape_is_that_of_all_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tree that is not the best of its size, and a size or a depth that is not the best of all."""
    monkeypatch.setattr(auto, "RARE", 0.0)
    draw, kinds = random.Random(0), set()
    every = list(trees(6, 4, 3))
    assert len(every) == len(set(every)) > 100
    for number in range(80):
        hazards = [[draw.uniform(0.2, 0.95), draw.uniform(0, 0.6), draw.uniform(0, 0.5)] for _ in range(4)]
        table = [_accepted(row) for row in hazards]
        # Exact where a pass takes its time whatever its rows; where these cost, it may be a little off.
        row, loss = (0.0, 0.0) if number % 2 else (draw.uniform(0.0, 0.03), 0.03)
        verify, chain = draw.choice([0.0, 0.02, 0.1, 0.3]), draw.choice([0.5, 1.0])
        draft = draw.uniform(0, 0.6), line(draw.uniform(0.01, 0.4), row)
        accepted = draw.choice([0.0, 0.0, 0.1])
        costs = Costs(1.0, line(1.0, verify), line(1.0, chain * verify), *draft, accepted)
        best = best_shape(table, costs, most_nodes=6)
        assert best.tokens / best.seconds >= (1 - 1e-9 - loss) * max(value(tree, table, costs) for tree in every)
        assert value(frozenset(best.paths), table, costs) == pytest.approx(best.tokens / best.seconds)
        assert promise(best.paths, table, costs)[1:] == pytest.approx(best[1:])
        drafted = best_shape(table, costs, most_nodes=6, least_nodes=1)
        found = max(value(tree, table, costs) for tree in every if tree)
        assert drafted.paths and drafted.tokens / drafted.seconds >= (1 - 1e-9 - loss) * found
        kinds.add("none" if not best.paths else "chain" if len(best.paths) == len(best.paths[-1]) else "tree")
    assert kinds == {"none", "chain", "tree"}


def _accepted(hazards: list[float]) -> list[float]:
    rates = Rates(1, 3, [hazards])
    return rates.table()[0]


def test_likeliest_paths_come_in_order() -> None:
    """Catches a child before its parent or its elder sibling (no tree), and a likelier path after another one."""
    table = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.05]]
    found = list(likeliest(table, 2))
    assert len(found) == 3 + 9 and sorted(found, key=lambda one: -one[0]) == found
    for place, (probability, path) in enumerate(found):
        assert probability == pytest.approx(math.prod(table[d][rank] for d, rank in enumerate(path)))
        before = [other for _, other in found[:place]]
        assert len(path) == 1 or path[:-1] in before
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in before


def test_rates_become_those_of_the_verdicts() -> None:
    """Catches counts at the wrong depth or rank, elder siblings that count as untried, and a past that never fades."""
    truth = [[0.5, 0.4, 0.3], [0.9, 0.1, 0.5]]
    draw, rates = random.Random(1), Rates(3, 3)

    def verdicts(count: int, first: float) -> None:
        for _ in range(count):
            for depth, row in enumerate([[first, *truth[0][1:]], truth[1]]):
                right = next((rank for rank, p in enumerate(row) if draw.random() < p), None)
                rates.learn(depth, 3, right)
                if right is None:
                    break

    verdicts(3000, truth[0][0])
    for found, expected in zip(rates.hazards(), truth, strict=False):
        assert found == pytest.approx(expected, abs=0.1)
    assert rates.hazards()[2] == pytest.approx([0.95 * p for p in rates.hazards()[1]])  # never seen: as the one before
    assert rates.table()[0] == pytest.approx([0.5, 0.2, 0.09], abs=0.08)
    assert rates.table()[1] == sorted(rates.table()[1], reverse=True)
    verdicts(600, 0.0)
    assert rates.hazards()[0][0] < 0.1


def simulate(
    chooser: Chooser, steps: int, right: float, draw: random.Random, sampling: Sampling = GREEDY
) -> list[Shape]:
    """Steps whose every candidate of rank 0 is right with one probability, and of other ranks never."""
    shapes = []
    for _ in range(steps):
        shape = chooser.shape(1, GREEDY, 9)
        shapes.append(shape)
        depth, path = 0, tuple[int, ...]()
        while (0, *path) in shape.paths:
            children = sum(len(other) == depth + 1 and other[:-1] == path for other in shape.paths)
            ok = draw.random() < right
            chooser.learn(depth, children, 0 if ok else None)
            if not ok:
                break
            depth, path = depth + 1, (0, *path)
    return shapes


def test_what_does_not_pay_is_not_drafted() -> None:
    """Catches drafting on where nothing is accepted, probes that cost more than they may, and none at all."""
    costs = priced(0.05, 0.2, 0.01)
    chooser, draw = Chooser(lambda *given: costs, 20, 6, 4), random.Random(0)
    assert chooser.promised().steps == 0
    assert simulate(chooser, 40, 0.0, draw)[0].paths
    later = simulate(chooser, 1000, 0.0, draw)
    probes = [shape for shape in later if shape.paths]
    assert 3 < len(probes) < 80
    assert sum(shape.seconds for shape in later) < 1.03 * 1000
    # The text has changed: it notices, and then drafts chains as deep as they pay.
    again = simulate(chooser, 1500, 0.9, draw)[-200:]
    assert sum(bool(shape.paths) for shape in again) == 200
    best = best_shape([[0.9, 0.0]] * 6, costs, 20)
    assert (
        max(map(len, again[-1].paths)) >= max(map(len, best.paths)) - 1 and len(again[-1].paths) <= len(best.paths) + 1
    )
    found = chooser.promised()
    assert found.steps == 2540 and found.tokens > found.plain_steps and found.choice.startswith("a chain of")


def test_a_probe_takes_in_what_was_not_drafted() -> None:
    """Catches probes taken for as cheap as a draft that follows another: where nothing pays, a head that has taken in
    nothing for a while has all that to do first, and a small target lost 4% so."""
    found: dict[float, tuple[int, float]] = {}
    for late in (0.0, 0.05):
        costs = priced(0.05, 0.2, 0.01)._replace(late=late)
        chooser, draw = Chooser(lambda *given, costs=costs: costs, 20, 6, 4), random.Random(0)
        simulate(chooser, 500, 0.0, draw)
        places = [place for place, shape in enumerate(simulate(chooser, 2000, 0.0, draw)) if shape.paths]
        seconds = [shape.seconds for shape in simulate(chooser, 2000, 0.0, draw) if shape.paths]
        assert len(places) > 3
        found[late] = len(places), max(seconds)
        assert max(seconds) < 2.0 + late * 256
        if late:
            assert min(seconds) > 1.0 + late * 60 and sum(seconds) < 0.08 * 2000
            chooser.begin(1, GREEDY, 9)  # another text, which is taken in with its prompt
            while not (first := chooser.shape(1, GREEDY, 9)).paths:
                pass
            assert first.seconds < min(seconds)
    assert found[0.05][0] < 0.7 * found[0.0][0]


def test_where_each_row_costs_as_much_as_a_forward_nothing_is_drafted() -> None:
    """Catches a choice that goes by tau alone, and costs of another batch size."""
    dear, cheap = priced(1.0, 0.1, 0.1), priced(0.0, 0.0, 0.0)
    asked: list[tuple[int, Sampling, int]] = []
    chooser = Chooser(lambda *key: asked.append(key) or (dear if key[0] > 4 else cheap), 12, 5, 3)  # type: ignore[func-returns-value]
    assert chooser.shape(8, GREEDY, 9).paths == ()
    assert len(chooser.shape(2, GREEDY, 9).paths) == 12
    chooser.shape(2, Sampling(1.0), 9), chooser.shape(8, GREEDY, 9)
    assert asked == [(8, GREEDY, 0), (2, GREEDY, 0), (2, Sampling(1.0), 0)]


def by_length_of_text(batch: int, sampling: Sampling, length: int) -> Costs:
    """A row more costs the more, the longer the text."""
    return priced(0.02 + length / 8000, 0.1 + length / 40_000, 0.0)


def test_the_length_of_the_text_counts() -> None:
    """Catches a shape or a promise by the costs of another length: behind a long text the first is too large, and the
    second too good.
    """
    chooser, table = Chooser(by_length_of_text, 20, 6, 4), Rates(6, 4).table()
    sizes = []
    for length in (100, 600, 2000, 8000, 100):
        before = chooser.promised()
        shape, after = chooser.shape(1, GREEDY, length), chooser.promised()
        sizes.append(len(shape.paths))
        costs = chooser.costs(1, GREEDY, length)
        exact = by_length_of_text(1, GREEDY, 0 if length <= cost.LONG else length)
        assert costs.verify.at(9) == pytest.approx(exact.verify.at(9), rel=0.12)
        assert shape.paths == () or shape[1:] == pytest.approx(promise(shape.paths, table, costs)[1:])
        assert after.plain_steps - before.plain_steps == pytest.approx(shape.seconds / costs.plain)
    assert sizes[0] == sizes[-1] > sizes[1] > sizes[2] > sizes[3] == 0
    # Within a length's neighbourhood nothing is asked for, and nothing changes.
    assert chooser.costs(1, GREEDY, 2048) is chooser.costs(1, GREEDY, 2200)


@pytest.mark.parametrize("kind", ["grows", "tree", "speculative", "prompt_lookup", "suffix", "medusa", "hybrid"])
def test_a_text_that_grows_long_is_drafted_less(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a method that stays with the costs of the prompt's length, that measures while it decodes, or that lets
    the first prompt wait for what it was told to prepare for."""
    monkeypatch.setattr(cost, "LONG", 40)
    target, asked = target_of("llama"), list[int]()

    def ask(*given: object) -> Costs:
        asked.append(int(given[-1]))  # type: ignore[call-overload]
        return AUTO_COSTS if asked[-1] <= 40 else priced(20.0, 0.1, 0.0)

    drafter: Any = {
        "grows": lambda: auto_eagle(target, 0.0),
        "tree": lambda: auto_eagle(target, 0.0),
        "speculative": lambda: by_length("speculative", target, draft_model=perturbed(target, 0.0)),
        "prompt_lookup": lambda: make_drafter("prompt_lookup", target, gamma="auto"),
        "suffix": lambda: make_drafter("suffix", target, nodes="auto"),
        "medusa": lambda: medusa(target, 0.0, "auto"),
        "hybrid": lambda: make_drafter("hybrid", target, head=auto_eagle(target, 0.0)),
    }[kind]()
    drafter._may_grow = kind == "grows"
    if kind in ("prompt_lookup", "suffix", "hybrid"):
        drafter.weighing.ask = ask
    if kind == "hybrid":
        goes_by(drafter.head, ask)
    elif kind in ("grows", "tree"):
        goes_by(drafter, ask)
    elif kind not in ("prompt_lookup", "suffix"):
        drafter.auto._ask = ask
    given = [5, 6, 7, 8] * 5
    prompts = [given] if kind in ("grows", "hybrid") else [given[:8], given]
    drafter.prepare(len(prompts), GREEDY, 90)
    prepared = list(asked)
    steps = generate(target, drafter, prompts, max_new_tokens=70, eos_token_id=NO_EOS).trace.steps
    begun = [step for step in steps if step.row == 0][:2]
    late = [step.drafted for step in steps][-40:]
    assert kind in ("prompt_lookup", "suffix") or all(step.drafted for step in begun)
    assert late.count(0) > 30
    assert asked[:2] == [0, 88]  # of 90 tokens, which it may come to: measured before it decodes
    assert asked == prepared or set(asked[len(prepared) :]) & set(prepared) == set()  # of lengths on the way alone


def test_acceptance_in_a_checkpoint_is_where_it_starts() -> None:
    """Catches a table that is ignored, or taken for the other way of sampling."""
    costs = priced(0.05, 0.2, 0.01)
    chooser = Chooser(lambda *key: costs, 20, 6, 4, {"greedy": [[0.02, 0.01]], "sampled": [[0.95, 0.0]]})
    assert chooser.shape(1, GREEDY, 9).paths == ()
    assert len(chooser.shape(1, Sampling(0.8), 9).paths) > 2


TestAutoSome = conformance.suite(
    lambda t: auto_eagle(t, 0.4), accepts="some", longest_draft=8, remembers=True, families=("llama", "mistral-sliding")
)
TestAutoChanging = conformance.suite(
    lambda t: auto_eagle(t, 0.3, Cycling()), accepts="some", longest_draft=3, remembers=True
)
TestAutoMeasured = conformance.suite(
    lambda t: auto_eagle(t, None, None), longest_draft=8, remembers=True, families=("qwen3",)
)


def by_length(name: str, target: TargetModel, **options: object) -> Drafter:
    """A drafter of chains, on the machine of AUTO_COSTS."""
    drafter: Any = make_drafter(name, target, gamma="auto", **options)
    drafter.auto._ask = lambda *given: AUTO_COSTS
    return drafter


def weighs(name: str, target: TargetModel, costs: Costs = AUTO_COSTS, **options: object) -> Drafter:
    """A drafter that copies as much as pays, on the machine of ``costs``."""
    drafter: Any = make_drafter(name, target, **options)
    drafter.weighing.ask = lambda *given: costs
    return drafter


TestAutoSpeculative = conformance.suite(
    lambda t: by_length("speculative", t, draft_model=perturbed(t, 0.05)), accepts="some", longest_draft=12,
    remembers=True, families=("llama",),
)  # fmt: skip
TestAutoLookup = conformance.suite(
    lambda t: weighs("prompt_lookup", t, gamma="auto"), longest_draft=16, remembers=True, families=("llama",)
)


def test_a_lookup_promises_what_it_has() -> None:
    """Catches a promise of drafts that were never found, or of their longest: of steps without a match, above all."""
    target = target_of("llama")
    drafter = weighs("prompt_lookup", target, gamma="auto")
    for seed in range(4):
        generate(target, drafter, [prompt(8, seed)], max_new_tokens=100, eos_token_id=NO_EOS)
    before = drafter.promised()
    results = [generate(target, drafter, [prompt(8, s)], max_new_tokens=100, eos_token_id=NO_EOS) for s in range(4, 12)]
    after = drafter.promised()
    assert before is not None and after is not None
    steps = [step for result in results for step in result.trace.steps]
    assert after.steps - before.steps == len(steps) and any(not step.drafted for step in steps)
    tau = sum(step.committed for step in steps) / len(steps)
    assert (after.tokens - before.tokens) / len(steps) == pytest.approx(tau, rel=0.25)


def test_speculative_decoding_drafts_as_long_as_it_is_right() -> None:
    """Catches acceptance that is not learnt (a copy of the target is always right), and learnt from cut drafts."""
    target = target_of("llama")
    for noise, low, high in ((0.0, 8.0, 13.0), (3.0, 1.0, 1.5)):
        drafter = by_length("speculative", target, draft_model=perturbed(target, noise))
        runs = [generate(target, drafter, [prompt(8, s)], max_new_tokens=100, eos_token_id=NO_EOS) for s in range(3)]
        assert low < runs[-1].trace.tau <= high


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_steps_without_a_draft_leave_nothing_out(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches features that plain steps commit and the head never takes in, or one row's taken in by another.

    Only tau suffers: the output is the target's all the same.
    """
    target = target_of("llama")
    drafter = auto_eagle(target, None, Cycling())
    propose, checked = drafter.propose, []

    def forced(state: DecodeState) -> DraftTree:
        draft = propose(state)
        for row, tokens in enumerate(state.tokens):
            if draft.size and not state.finished[row]:
                logits = from_scratch(drafter, tokens, [])
                checked.append(draft.size)
                if temperature == 0:
                    assert int(draft.tokens[row, 0]) == int(logits.argmax())
                else:
                    q = state.sampling.probabilities(logits)
                    assert draft.q is not None
                    torch.testing.assert_close(draft.q[row, 0], q, atol=5e-3, rtol=2e-2)
                # Rows of unequal length: what one accepts, another may not.
                if temperature == 0 and row == len(checked) % 3:
                    draft.tokens = draft.tokens.clone()
                    draft.tokens[row, 0] = int(conformance.plain_greedy(target, tokens, 1)[0])
        return draft

    monkeypatch.setattr(drafter, "propose", forced)
    prompts = [prompt(4), prompt(11), prompt(7)]
    generate(target, drafter, prompts, max_new_tokens=20, temperature=temperature, eos_token_id=NO_EOS)
    assert len(checked) > 12


def unpaid(kind: str, target: TargetModel) -> Drafter:
    """A drafter whose drafts seldom pay."""
    drafter: Any
    if kind == "eagle":
        return auto_eagle(target, None, DEAR)
    if kind == "hybrid":
        parts = unpaid("right", target), unpaid("prompt_lookup", target)
        drafter = make_drafter("hybrid", target, head=parts[0], lookup=parts[1])
        drafter.weighing.ask = lambda *given: DEAR
        return drafter
    if kind in ("speculative", "right"):
        drafter = by_length("speculative", target, draft_model=perturbed(target, 0.3 if kind == "right" else 3.0))
        drafter.auto._ask = lambda *given: DEARER if kind == "right" else DEAR
        return drafter
    if kind == "medusa":
        drafter = medusa(target, None, "auto")
        drafter.auto._ask = lambda *given: DEAR
        return drafter
    return weighs(kind, target, DEAR, **({"gamma": "auto"} if kind == "prompt_lookup" else {"nodes": "auto"}))


DEAR, DEARER = priced(0.4, 0.3, 0.1), priced(1.5, 0.3, 0.5)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "speculative", "right", "prompt_lookup", "suffix", "hybrid"])
@pytest.mark.parametrize(("rows", "temperature"), [(1, 0.0), (1, 1.0), (3, 0.0), (3, 1.0)])
def test_a_drafter_that_rests_does_as_if_it_were_asked(
    kind: str, rows: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rest that lasts longer than nothing pays, what it leaves untaken in, and steps that no promise counts:
    asked every step, which costs a twentieth of one that takes half a millisecond, it drafts the same."""
    target = target_of("llama")
    found = []
    for rests in (True, False):
        drafter, asked = unpaid(kind, target), list[int]()
        if not rests:
            for part in (drafter, getattr(drafter, "head", drafter)):
                monkeypatch.setattr(type(part), "may_rest", lambda self: 0)
        propose = drafter.propose
        monkeypatch.setattr(
            drafter, "propose", lambda state, propose=propose, asked=asked: asked.append(1) or propose(state)
        )
        texts = [prompt(8, 0), prompt(9, 1), [*prompt(6, 2), *prompt(6, 2), *prompt(5, 2)]]
        batches = [[text] for text in texts] if rows == 1 else [texts, texts[::-1], texts]
        options: dict[str, Any] = {"max_new_tokens": 150, "temperature": temperature}
        options["eos_token_id"] = NO_EOS if rows == 1 else [91 if temperature else 21]  # so rows end one after another
        runs = [generate(target, drafter, batch, seed=seed, **options) for seed, batch in enumerate(batches)]
        steps = [step for run in runs for step in run.trace.steps]
        drafted = [(step.drafted, step.accepted, step.source) for step in steps]
        promised = drafter.promised()
        assert promised is not None
        whole = [part.auto for part in (drafter, getattr(drafter, "head", drafter)) if getattr(part, "auto", None)]
        shares = [course.hindsight.share for auto in whole for course in auto._courses.values()]
        found.append((len(asked), [rows_of(run) for run in runs], drafted, promised[:3], promised.choice, shares))
    (asked_rested, *rested), (asked_always, *always) = found
    assert rested == always
    assert asked_always == sum(max(map(len, run)) - 1 for run in always[0]) or any(one[1] for one in always[1])
    if temperature or rows > 1 or kind != "eagle":  # whose trees grow by themselves, and do not rest
        assert asked_rested < 0.6 * asked_always


def test_rests_are_told_of_wherever_a_text_ends() -> None:
    """Catches steps without a draft that nobody counts where a text is given up, and within a cascade, whose draft
    model comes to no end of its own: probes that are due in 250 steps take 250 texts."""
    target = target_of("llama")
    drafter, steps = unpaid("speculative", target), 0

    def enough(row: int, tokens: list[int]) -> None:
        nonlocal steps
        steps += 1
        if steps % 41 == 0:  # the first token is the prefill's
            raise InterruptedError

    for seed in range(2):
        with pytest.raises(InterruptedError):
            generate(target, drafter, [prompt(8, seed)], max_new_tokens=90, eos_token_id=NO_EOS, on_tokens=enough)
    promised = drafter.promised()
    assert promised is not None and promised.steps >= 80
    inner = unpaid("speculative", target)
    whole = make_drafter("cascade", target, draft_model=target, inner=inner, gamma=3)
    with mock.patch("drafters.methods.cascade.step", side_effect=step) as stepped:
        for seed in range(3):
            generate(target, whole, [prompt(8, seed)], max_new_tokens=30, eos_token_id=NO_EOS)
    promised = inner.promised()
    assert promised is not None and promised.steps == stepped.call_count > 40


def test_a_prompt_that_joins_is_looked_at() -> None:
    """Catches a text that repeats itself from its beginning, and for which no copy is looked for because the others of
    its batch did not."""
    target = target_of("llama")
    drafter: Any = unpaid("prompt_lookup", target)
    rows = Refilled(target, drafter, 2, 30, 64, Sampling(), frozenset(), 0)
    rows.take([(0, prompt(8, 0)), (1, prompt(9, 1))])
    rows.step()
    assert rows.state is not None
    rows.state.resting, rows.state.rested, rows.at[1] = 50, 7, None
    drafter.weighing._now.looking._rest = 50
    before = drafter.promised()
    rows.take([(2, prompt(9, 2))])
    assert rows.state.resting == rows.state.rested == drafter.weighing._now.looking.rests == 0
    assert drafter.promised().steps == before.steps + 7


def test_auto_learns_from_what_the_loop_accepts() -> None:
    """Catches verdicts that teach nothing: an oracle's chain grows to its bound, a random head is left alone."""
    target = target_of("llama")
    for (noise, low, high), grows in itertools.product(((0.0, 3.0, 9.5), (None, 0.9, 1.3)), (True, False)):
        drafter = auto_eagle(target, noise, AUTO_COSTS)
        drafter._may_grow = grows
        runs = [generate(target, drafter, [prompt(8, s)], max_new_tokens=100, eos_token_id=NO_EOS) for s in range(2)]
        assert low < runs[-1].trace.tau < high
        drafted = [step.drafted for step in runs[-1].trace.steps]
        assert noise is not None or grows or drafted.count(0) > 0.8 * len(drafted)
    assert rows_of(runs[0])[0] == conformance.plain_greedy(target, prompt(8), 100)


def test_drafter_config_keeps_the_acceptance() -> None:
    """Catches a checkpoint that forgets its table when it is saved again."""
    drafter = auto_eagle(target_of("llama"), None, AUTO_COSTS, acceptance={"greedy": [[0.5, 0.25]]})
    assert drafter.drafter_config()["acceptance"] == {"greedy": [[0.5, 0.25]]}
    assert drafter.drafter_config()["tree"] == "auto"
    with pytest.raises(ValueError, match="less than or equal to 1"):
        EagleOptions(tree="auto", acceptance={"greedy": [[1.5]]})


def test_a_report_shows_what_was_expected() -> None:
    """Catches a promise of other prompts in a prompt's run, and figures that are ratios of sums taken for sums."""
    target = target_of("llama")
    decode = drafter_method(target, auto_eagle(target, 0.0), 0.0, Limits(40))
    outcomes = [decode([prompt(8, seed)], 0) for seed in range(2)]
    for made in outcomes:
        assert made.promised is not None and made.trace is not None
        assert made.promised.steps == len(made.trace.steps)
    runs = [Run(**vars(made), method="a", temperature=0.0, round=0, prompt=0, wall_seconds=1.0) for made in outcomes]
    found = metrics.expected(runs)["expected"]
    assert (
        1.5 < found["tau"] < 9.5
        and 1 < found["speedup"] < 9
        and found["choice"].startswith(("trees that grow", "a tree"))
    )
    assert metrics.expected([replace(run, promised=None) for run in runs]) == {}
