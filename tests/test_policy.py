"""Policy: shapes against all small trees, rates, costs and copies by hand, and drafts of changing shape in the loop."""

import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conformance
import pytest
from conformance import NO_EOS, prompt, rows_of, target_of
from rigged import Cycling, auto_eagle, block_costs, by_length, dflash, dspark, goes_by, medusa, perturbed
from test_prompt_lookup import Primed as PrimedLookup
from test_suffix import Primed as PrimedSuffix

from drafters import generate, generate_many, make_drafter
from drafters.drafting.retrieval import NOTHING, Copy
from drafters.drafting.tree_plan import TreePlan
from drafters.loop.sampling import Sampling
from drafters.methods.papers.cascade import CascadeDrafter
from drafters.policy import costs as measuring
from drafters.policy.copies import CopyPolicy, CopyRates
from drafters.policy.costs import Curve, cached, context_limits, time_plans
from drafters.policy.shape import EXPLORE, WINDOW, Costs, Rates, Shape, ShapePolicy, acceptance_of, best_shape, costs_of

Node = tuple[int, ...]


MEASURED: dict[Any, Any] = {}  # costs by sampling and context: two drafters that measured apart draft differently


def measured_cascade(target: Any) -> CascadeDrafter:
    inner = {"drafter": "speculative", "draft_model": perturbed(target, 0.1), "gamma": "auto"}
    made = CascadeDrafter.from_options(target, draft_model=perturbed(target, 0.05), inner=inner, gamma=4)
    policy: Any = made.inner.policy
    measure = policy._measured

    def measured_once(drafter: Any, batch: int, sampling: Sampling, limit: int, longest: int) -> Any:
        key = batch, sampling, limit
        if key not in MEASURED:
            MEASURED[key] = measure(drafter, batch, sampling, limit, longest)
        return MEASURED[key]

    policy._measured = measured_once
    return made


MAKERS: dict[str, Any] = {
    "eagle": lambda t: auto_eagle(t, 0.4),
    "speculative": lambda t: by_length("speculative", t, draft_model=perturbed(t, 0.05)),
}
LLAMA: Any = {"families": ("llama",)}
TestEagleAuto = conformance.suite(MAKERS["eagle"], accepts="some", longest_draft=8)
TestEagleCycling = conformance.brief(lambda t: auto_eagle(t, 0.4, Cycling()), **LLAMA)
TestSpeculativeAuto = conformance.brief(MAKERS["speculative"], accepts="some", longest_draft=12, **LLAMA)
TestPromptLookupAuto = conformance.brief(
    lambda t: goes_by(PrimedLookup.from_options(t, gamma="auto")), accepts="some", longest_draft=16, **LLAMA
)
TestSuffixAuto = conformance.brief(
    lambda t: goes_by(PrimedSuffix.from_options(t, nodes="auto", memory=0)), accepts="some", longest_draft=24, **LLAMA
)
TestMeasuredInCascade = conformance.brief(measured_cascade, longest_draft=16, **LLAMA)


def trees(nodes: int, depth: int, ranks: int, root: Node = ()) -> Iterator[frozenset[Node]]:
    """Every tree of at most ``nodes`` nodes below ``root``."""
    yield frozenset()
    if len(root) == depth:
        return
    for children in range(1, min(ranks, nodes) + 1):
        names = [(*root, rank) for rank in range(children)]
        for parts in itertools.product(*([*trees(nodes - children, depth, ranks, name)] for name in names)):
            if children + sum(map(len, parts)) <= nodes:
                yield frozenset(names).union(*parts)


def speed(tree: frozenset[Node], table: list[list[float]], costs: Costs) -> float:
    """Tokens per second, written down from the definition."""
    tokens = 1.0 + sum(math.prod(table[depth][rank] for depth, rank in enumerate(path)) for path in tree)
    passes = [sum(any(o[:-1] == p for o in tree) for p in tree if len(p) == d) for d in range(1, max(map(len, tree)))]
    draft = costs.first + sum(costs.level + costs.row * (count - 1) for count in passes)
    return tokens / (costs.rest.at(1 + len(tree)) + draft)


def test_best_shape_is_that_of_all_trees() -> None:
    """Catches a tree that is not the best of its size, and a size or a depth that is not the best of all."""
    draw, kinds = random.Random(0), set()
    every = [tree for tree in trees(6, 4, 3) if tree]
    for number in range(60):
        table = [acceptance_of([draw.uniform(0.3, 0.95), draw.uniform(0, 0.6), draw.uniform(0, 0.5)]) for _ in range(4)]
        # Exact where rows of a pass are free; else 3% may be lost.
        row, loss = (0.0, 0.01) if number % 2 else (draw.uniform(0.0, 0.03), 0.03)
        rest = Curve((1, 2), (1.0, 1.0 + draw.choice([0.0, 0.02, 0.1, 0.3])))
        costs = Costs(rest, draw.uniform(0, 0.6), draw.uniform(0.01, 0.4), row)
        best = best_shape(table, costs, most_nodes=6)
        assert best.speedup >= (1 - loss) * max(speed(tree, table, costs) for tree in every)
        assert speed(frozenset(best.paths), table, costs) == pytest.approx(best.speedup)
        kinds.add(best.name[:8])
    assert kinds == {"a chain ", "a tree o"} and Shape().name == "no draft"


def test_rates_by_hand() -> None:
    """Catches counts at the wrong depth or rank, untried siblings that count, and a past that never fades."""
    rates = Rates(3, 2, [[0.5, 0.4], [0.2, 0.1]])
    assert rates.hazards() == [[0.5, 0.4], [0.2, 0.1], pytest.approx([0.19, 0.095])]
    # Of the first candidate only; of the second; neither of both; not the only one; beyond the depths.
    for depth, count, right in ((0, 2, 0), (0, 2, 1), (0, 2, None), (0, 1, None), (3, 2, 0)):
        rates.learn(depth, count, right)
    assert rates.hazards()[0] == pytest.approx([(4 + 1) / (8 + 4), (3.2 + 1) / (8 + 2)])
    rates.learn(1, 2, 0)
    assert rates.hazards()[2] == pytest.approx([0.95 * value for value in rates.hazards()[1]])
    for right in [*[0] * int(WINDOW), *[None] * int(WINDOW)]:
        rates.learn(1, 1, right)
    assert rates.hazards()[1][0] == pytest.approx(0.36, abs=0.03)  # 1 / e, and the prior
    assert acceptance_of([0.5, 0.4, 0.9]) == pytest.approx([0.5, 0.2, 0.2])  # never rising


def test_costs_by_hand() -> None:
    """Catches a level's price that counts the first, rows counted twice, and noise that makes more rows cheaper."""
    plans: list[tuple[Node, ...]] = [(), ((0,),), ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))]
    plans.append(((0,), (1,), (0, 0), (0, 1), (1, 0)))
    costs = costs_of(plans, [(0.0, 1.0), (0.1, 1.1), (0.4, 1.4), (0.25, 1.3)])
    assert costs[1:] == pytest.approx((0.1, 0.1, 0.05)) and costs.plain == 1.0
    assert costs.rest == Curve((1, 2, 5, 6), (1.0, 1.1, 1.4, 1.4))
    assert costs.step(5, 2, 2) == pytest.approx(1.4 + 0.1 + 0.1 + 0.05) and costs.step(0, 0, 0) == 1.0
    assert costs.rest.at(3) == pytest.approx(1.2) and Curve((1, 3), (1.0, 2.0)).at(5) == pytest.approx(3.0)
    assert [context_limits(SimpleNamespace(max_context=2048), n) for n in (100, 700)] == [[512], [512, 2048]]  # type: ignore


def test_costs_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches costs measured again though they are known, those of another key, and a file or folder that ends it."""
    target, made = target_of("llama"), []

    def ask(key: str) -> Any:
        measuring._known.clear()  # as a new process
        return cached(target, {"key": key}, lambda: made.append(key) or [[len(made), 0.5]])

    monkeypatch.setenv(measuring.CACHE, str(tmp_path / "cache"))
    assert ask("a") == ask("a") == [[1, 0.5]] and ask("b") == [[2, 0.5]]
    files = sorted((tmp_path / "cache").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    files[0].write_text("{")
    assert ask("a") == [[3, 0.5]] == ask("a")
    files[0].write_text(files[1].read_text())  # another key's
    assert ask("a") == [[4, 0.5]]
    monkeypatch.setenv(measuring.AGAIN, "1")
    assert ask("a") == [[5, 0.5]]
    monkeypatch.setenv(measuring.CACHE, str(files[0] / "no folder"))
    assert ask("a") == [[6, 0.5]] and made == ["a", "b", "a", "a", "a", "a"]


@pytest.mark.parametrize("kind", MAKERS)
def test_measuring_leaves_the_drafter_usable(kind: str) -> None:
    """Catches caches, features and chosen shapes of measured steps that stay in the drafter, and negative times."""
    target, plans, runs, used = target_of("llama"), [(), ((0,),), ((0,), (0, 0))], [], []
    for measures in (False, True):
        drafter: Any = MAKERS[kind](target)
        drafter.policy = policy = Cycling()
        runs.append([])
        for seed in (0, 1):
            found = generate(target, drafter, [prompt(9, seed)], max_new_tokens=24, eos_token_id=NO_EOS)
            assert rows_of(found)[0] == conformance.plain_greedy(target, prompt(9, seed), 24)
            runs[-1].append([(step.drafted, step.accepted) for step in found.trace.steps])
            if measures:
                ways = {"prepare": lambda *_: 0, "begin": lambda: 0, "learn": lambda *_: 0}
                drafter.policy = SimpleNamespace(**ways, paths=lambda _: used[-1])
                times = time_plans(drafter, plans, used.append, 2, Sampling(1.0), 8)
                assert len(times) == 3 and min(map(min, times)) > 0 and [*dict.fromkeys(used)] == plans
                drafter.policy = policy
    assert runs[0] == runs[1]


def test_equal_seeds_and_costs_give_equal_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches random numbers taken by a measurement, and a choice that reads the clock."""
    monkeypatch.setenv(measuring.CACHE, str(tmp_path))
    target, runs = target_of("llama"), []
    options: Any = {"max_new_tokens": 60, "eos_token_id": NO_EOS, "temperature": 1.0, "seed": 3}
    for _ in range(3):  # the first run measures, the others read its file
        measuring._known.clear()
        found = generate(target, auto_eagle(target, 0.4, None), [prompt(9), prompt(5)], **options)
        runs.append((found.tokens.tolist(), found.trace.steps))
    assert runs[0] == runs[1] == runs[2] and len([*tmp_path.iterdir()]) == 1


DEAR = Costs(Curve((1, 2), (1.0, 1.1)), first=0.1, level=0.1, row=0.001)  # few copies are profitable
AUTO: dict[str, Any] = {
    **MAKERS,
    "medusa": lambda t: goes_by(medusa(t, 0.3, "auto")),
    "truncated by confidence": lambda t: block_costs(dspark(t, 0.3, "chain", truncate=True)),
    "truncated by q": lambda t: block_costs(dflash(t, 0.3, "chain", truncate=True)),
    "prompt_lookup": lambda t: goes_by(make_drafter("prompt_lookup", t, gamma="auto"), DEAR),
    "suffix": lambda t: goes_by(make_drafter("suffix", t, nodes="auto", memory=0), DEAR),
    "hybrid": lambda t: goes_by(make_drafter("hybrid", t, head=auto_eagle(t, 0.4))),
    "cascade": measured_cascade,
}


@pytest.mark.parametrize("kind", AUTO)
def test_the_same_call_gives_the_same_text(kind: str) -> None:
    """Catches counts of earlier calls that choose other drafts, and so take other random numbers."""
    target, repeats = target_of("llama"), [5, 9, 4] * 3
    drafter = AUTO[kind](target)
    batch = 1 if drafter.max_batch == 1 else 2
    runs = []
    for seed in (1, 2, 1):
        options: Any = {"temperature": 1.0, "seed": seed, "eos_token_id": NO_EOS}
        prompts = [prompt(9, seed) + repeats, prompt(5, seed) + repeats][:batch]
        found = generate(target, drafter, prompts, max_new_tokens=40, **options)
        runs.append((found.tokens.tolist(), found.trace.steps))
    assert runs[0] == runs[2] != runs[1] and not drafter.remembers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_shapes_change_in_a_batch(temperature: float) -> None:
    """Catches rows whose head misses features of steps without a draft, and padding that a change of shape shows."""
    target, prompts = target_of("llama"), [prompt(4), prompt(11), prompt(7)]
    options: Any = {"max_new_tokens": 24, "eos_token_id": NO_EOS, "temperature": temperature}
    found = generate(target, auto_eagle(target, 0.4, Cycling()), prompts, **options)
    assert {step.drafted for step in found.trace.steps} >= {0, 1, 3, 4}
    assert temperature or rows_of(found) == [conformance.plain_greedy(target, ids, 24) for ids in prompts]


def test_a_joined_prompt_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches costs that are known at the context lengths of a batch's first prompts only."""
    monkeypatch.setattr(measuring, "CONTEXTS", (24, 999))
    target = target_of("llama")
    answers = [conformance.plain_greedy(target, prompt(length), 9) for length in (4, 5, 40)]
    for make in (lambda: auto_eagle(target, 0.4), lambda: make_drafter("prompt_lookup", target, gamma="auto")):
        prompts = deque([(0, prompt(4)), (1, prompt(5)), (2, prompt(40))])
        give = lambda prompts=prompts: prompts.popleft() if prompts else None  # noqa: E731
        options: Any = {"batch": 2, "longest": 40, "max_new_tokens": 9, "eos_token_id": answers[0][1]}
        tokens = {one.key: one.tokens for one in generate_many(target, make(), give, **options)}
        assert len(tokens[0]) == 2 < len(tokens[1])
        assert [row[: len(tokens[key])] for key, row in enumerate(answers)] == [tokens[key] for key in range(3)]


def prepared(two_rows: float) -> ShapePolicy:
    """A policy on a machine where a step of two rows takes ``two_rows`` plain steps."""
    policy = ShapePolicy(8, 4, 2)
    costs = Costs(Curve((1, 2), (1.0, two_rows)), first=0.2, level=0.1, row=0.0)
    drafter = goes_by(SimpleNamespace(policy=policy, target=target_of("llama")), costs)
    policy.prepare(drafter, 1, Sampling(), 99)
    return policy


def run_policy(policy: ShapePolicy, steps: int, right: float, draw: random.Random) -> list[int]:
    """Sizes of the drafts of ``steps`` steps in which the first candidate is right with probability ``right``."""
    state: Any = SimpleNamespace(batch=1, sampling=Sampling(), target=target_of("llama"), length=9, finished=[False])
    sizes = []
    for _ in range(steps):
        plan = TreePlan([list(path) for path in policy.paths(state)], state.target.device)
        path, at = [0], 0
        while plan.children[at] and draw.random() < right:
            at = 1 + plan.parents.index(at - 1)
            path.append(at)
        policy.learn(plan, plan.size, state, SimpleNamespace(rows=[path]))
        sizes.append(plan.size)
    return sizes


def test_drafting_stops_and_returns() -> None:
    """Catches drafts where none is profitable, a policy that never drafts again, and expectations of other steps."""
    draw, policy = random.Random(0), prepared(1.2)
    assert 2 <= sum(size > 0 for size in run_policy(policy, 500, 0.0, draw)[-4 * EXPLORE :]) <= 4
    expected = policy.expected()
    assert expected is not None and expected.steps == 500 and expected.choice == "no draft"
    assert run_policy(policy, 80 * EXPLORE, 1.0, draw)[-50:] == [4] * 50
    assert sum(run_policy(prepared(2.5), EXPLORE - 1, 1.0, draw)) == 0


def copies(row: float) -> CopyPolicy:
    """A policy where each row costs ``row`` plain steps, and copies after matches of 3, 4, 5 are right with these."""
    policy = CopyPolicy()
    policy._curve = lambda state: Curve((1, 2), (1.0, 1.0 + row))  # type: ignore[method-assign]
    for match, rate in ((3, 0.9), (4, 0.8), (5, 0.1)):
        taught(policy.rates, match, rate)
    return policy


def taught(rates: CopyRates, match: int, rate: float, claim: float = 0.5) -> None:
    for number in range(1000):
        rates.learn(match, claim, (number % 10) < 10 * rate)


def going(rows: int, finished: int = 0) -> Any:
    return SimpleNamespace(finished=[True] * finished + [False] * (rows - finished))


CHAIN = Copy([5, 6, 7, 8], [-1, 0, 1, 2], [0.5] * 4, 3)


def test_copy_rates_by_hand() -> None:
    """Catches a prior that a longer match does not raise, counts of another kind, and a past that never fades."""
    rates = CopyRates()
    assert rates.of(1, 0.5) == pytest.approx(0.5**1.8) and rates.of(8, 0.5) == pytest.approx(0.5 ** (1.8 / 8))
    rates.learn(3, 0.5, True)
    assert rates.of(3, 0.5) == pytest.approx((1 + 8 * 0.5**0.6) / 9) and rates.of(4, 0.5) > 0.7
    taught(rates, 3, 1.0)
    taught(rates, 3, 0.0)
    assert rates.of(3, 0.5) < 0.05
    (first, one), (second, two), _ = rates.chances(Copy([4, 5, 6], [-1, -1, 1], [0.3, 0.8, 0.6], 3))
    assert (one, two) == (1, 2) and second == pytest.approx(first * rates.of(4, 0.6)) and first == rates.of(3, 0.8)


def test_copies_are_cut_to_what_is_profitable() -> None:
    """Catches a copy drafted where the head's draft gains more, one that is too long, and rows that do not count."""
    policy = copies(0.25)
    assert policy.select([CHAIN], going(1))[0].tokens == [5, 6]  # 0.9 and 0.72 are worth 0.25 steps, 0.07 is not
    found = policy.expected()
    assert found is not None and found[:3] == pytest.approx((1, 1 + 0.9 + 0.72, 1.5), rel=0.03)
    assert policy.select([CHAIN], going(1), Shape((), 4.0, 1.5)) == [NOTHING]
    assert [one.tokens for one in policy.select([NOTHING, CHAIN], going(2, finished=1))] == [[], [5, 6]]
    dear = copies(0.5)
    assert dear.select([CHAIN, NOTHING], going(2)) == [NOTHING] * 2  # 0.45 tokens of a row for 0.5 steps
    both = dear.select([CHAIN, CHAIN._replace(tokens=[1, 2, 3, 4])], going(2))
    assert [one.tokens for one in both] == [[5, 6], [1, 2]]


def test_of_a_tree_the_likeliest_nodes_are_copied() -> None:
    """Catches nodes kept without their parent, renumbered wrongly, or by their claim and not by their chance."""
    policy, tree = copies(0.3), Copy([4, 5, 6, 7], [-1, -1, 1, 2], [0.25, 0.65, 0.75, 0.2], 6)
    for match, claim, rate in ((6, 0.25, 0.2), (6, 0.65, 0.9), (7, 0.75, 0.8), (8, 0.2, 0.1)):
        taught(policy.rates, match, rate, claim)
    assert policy.select([tree], going(1))[0] == Copy([5, 6], [-1, 0], [0.65, 0.75], 6)


def test_copies_are_learnt_by_hand() -> None:
    """Catches siblings and tokens behind a wrong one that are counted, and rows whose tokens are mixed up."""
    policy, tree = CopyPolicy(), Copy([5, 6, 7], [-1, -1, 1], [0.4, 0.6, 0.5], 3)
    verdict: Any = SimpleNamespace(tokens=[[6, 7], [5, 6, 9], []])
    for _ in range(100):
        policy.learn([tree, CHAIN._replace(match=8), CHAIN], verdict)
    of = policy.rates.of
    assert of(3, 0.4) < 0.1 and of(3, 0.6) > 0.9 and of(4, 0.5) > 0.9 and of(8, 0.5) > 0.9
