"""What forwards cost by their rows and by the context: measured, kept, and put on a line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conformance import target_of
from drafters.policy.growth import Paying
from drafters.policy.kept_costs import Costs, Curve
from rigged import auto_eagle, perturbed
from torch import Tensor

from drafters import make_drafter
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.model.cache import KVCache
from drafters.policy import costs as cost
from drafters.policy import kept_costs
from drafters.policy.costs import CostsByLength

GREEDY = Sampling()


def linear(context: int, batch: int = 1) -> Costs:
    """Of a machine whose attention takes its time: by the context, and by the rows."""
    line = Curve((1, 2), (1.0 + context / 1000, 1.5 + context / 400))
    return Costs(
        1.0 + context / 1000,
        line,
        line,
        0.1 + context / 9000,
        Curve((1, 2), (0.1 + context / 9000, 0.2 + context / 9000)),
        0.2 + context / 7000,
    )


def test_curve() -> None:
    """Catches an index that is off by one between two measured counts, and noise that makes more rows cheaper."""
    curve = Curve.of({4: 2.0, 1: 1.0, 8: 1.9, 16: 4.0})
    assert [curve.at(rows) for rows in (1, 2.5, 4, 6, 8, 12, 16, 24)] == [1.0, 1.5, 2.0, 2.0, 2.0, 3.0, 4.0, 6.0]
    assert Curve((1,), (3.0,)).at(7) == 3.0


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(kept_costs.CACHE, str(tmp_path / "kept"))
    monkeypatch.setattr(kept_costs, "_known", {})
    return tmp_path / "kept"


def test_costs_are_kept_on_disk(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a measurement in every process, one taken for another's, and a damaged file that ends the run."""
    measured: list[int] = []

    def measure() -> Costs:
        measured.append(1)
        return linear(0)

    def get(name: str = "a", now: float = 1.0) -> Costs:
        kept_costs._known.clear()
        return kept_costs.kept({"name": name}, measure, lambda: now)

    first = get()
    assert get() == first and len(measured) == 1
    assert get("b") == first and len(measured) == 2
    empty = {"plain": 1, "first": 1, "accepted": 0, "verify": {}, "chain": {}, "draft": {}}
    lacking = [json.dumps({"key": {"name": "a"}} | more) for more in ({}, {"moments": [empty]}, {"moments": []})]
    whole = json.loads(next(store.iterdir()).read_text())
    negative = json.dumps(whole | {"moments": [whole["moments"][0] | {"plain": -1.0}]})
    for damage in ("", "[]", *lacking, negative):
        for file in store.iterdir():
            file.write_text(damage)
        before = len(measured)
        assert get() == first and len(measured) == before + 1 and get() == first
    before = len(measured)
    assert get(now=0.5) == first and get(now=4.0) == first
    monkeypatch.setenv(kept_costs.AGAIN, "1")
    get()
    assert len(measured) == before + 2
    monkeypatch.setenv(kept_costs.CACHE, "/proc/nowhere")
    assert get() == first
    assert all(file.suffix == ".json" for file in store.iterdir())


def test_a_machine_that_is_another_by_the_hour(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches auto that goes by the one moment in which it was measured, a moment more with every process, and one that
    was taken of a machine at work on something else."""
    measured: list[float] = []

    def costs_of(plain: float, row: float) -> Costs:
        line = Curve((1, 8), (plain, plain + row))
        return Costs(plain, line, line, plain / 10, Curve((1, 2), (row, 2 * row)), plain / 100)

    def get(now: float, row: float = 1.0) -> Costs:
        kept_costs._known.clear()

        def measure() -> Costs:
            measured.append(now)
            return costs_of(now, row)

        return kept_costs.kept({"name": "a"}, measure, lambda: now)

    slow_memory = costs_of(9.0, 5.0)
    assert get(9.0, 5.0) == slow_memory and get(8.6) == slow_memory and get(9.4) == slow_memory
    both = get(7.0, 9.0)
    assert (both.plain, both.first, both.accepted) == pytest.approx((8.0, 0.8, 0.08))
    assert both.verify == both.chain == Curve((1, 8), (8.0, 15.0)) and both.draft == Curve((1, 2), (7.0, 14.0))
    assert get(9.0) == both and get(7.2) == both and get(14.0) == get(30.0) == both  # busy
    assert measured == [9.0, 7.0]
    monkeypatch.setattr(kept_costs, "MOMENTS", 2)
    assert get(6.0) == both and get(10.2) == both
    monkeypatch.setattr(kept_costs, "MOMENTS", 3)
    assert get(6.0).plain == pytest.approx(22 / 3) and get(10.2) == get(6.0) and measured == [9.0, 7.0, 6.0]
    assert get(5.0).plain == pytest.approx(6.0) and measured[3:] == [5.0]  # the first one was of a busy machine, then


class Watched:
    """A drafter whose passes do nothing, and how long the contexts were that it and the target met."""

    def __init__(self) -> None:
        self.contexts: list[int] = []
        self.rows: set[int] = set()
        self.late: set[int] = set()

    def drafting(self, context: int) -> tuple[Callable[[int], cost.Run], Callable[[int], cost.Run]]:
        self.contexts.append(context)
        return lambda late: lambda: self.late.add(late), lambda rows: lambda: self.rows.add(rows)


def test_measured_costs(store: Path) -> None:
    """Catches a part that is not measured or timed as another, and a draft of nothing that costs something."""
    target, watched = target_of("llama"), Watched()
    found = cost.step_costs(target, {"n": 1}, 2, GREEDY, 9, watched.drafting)
    assert found.plain > 0 and found.verify.rows[0] == 1 and found.verify.rows[-1] == 64
    assert {1, 2, 16} <= watched.rows and found.first < found.plain and len(list(store.iterdir())) == 1
    free = cost.step_costs(target, {"n": 2}, 1, GREEDY, 9)
    assert free.first == 0 and free.draft.at(5) == 0 and free.verify.at(64) >= free.plain


@pytest.mark.parametrize(("batch", "largest"), [(1, 4), (4, 2)])
def test_small_steps_are_not_timed_among_large_ones(
    batch: int, largest: int, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a step without a draft that is timed between forwards of many rows, behind which a core is slower, and
    those taken for dearer, or cheaper, than they are because the machine was another when they were timed."""
    groups: list[list[Any]] = []
    timed = cost.timed
    monkeypatch.setattr(cost, "timed", lambda parts, *given: groups.append(list(parts)) or timed(parts, *given))  # type: ignore[func-returns-value]
    monkeypatch.setattr(cost, "SECONDS", 0.0)
    watched = Watched()
    cost.step_costs(target_of("llama"), {}, batch, GREEDY, 9, watched.drafting)
    light, heavy = ({key[1] for key in group if key[0] in ("verify", "chain", "draft")} for group in groups)
    assert max(light) == largest == min(heavy) and "plain" in groups[0] and "plain" not in groups[1]
    monkeypatch.setattr(kept_costs, "_known", {})
    slowness = iter((1.0, 3.0))

    def slower(parts: dict[Any, Any], *given: Any) -> dict[Any, float]:
        slow = next(slowness)
        return {key: slow * (key[1] if isinstance(key, tuple) else 1.0) for key in parts}

    monkeypatch.setattr(cost, "timed", slower)
    found = cost.step_costs(target_of("llama"), {}, batch, Sampling(1.0), 9)
    assert (found.plain, found.verify.at(largest), found.verify.at(16)) == (1, largest, 16)


def test_a_part_is_timed_behind_others_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a step without a draft that is taken for half as long again as it is while nothing is drafted."""
    seconds, light = [0.0], [0]
    monkeypatch.setattr(cost, "_now", lambda device: seconds[0])

    def few() -> None:
        light[0] += 1
        seconds[0] += 2.0**-10 if light[0] > 4 else 2.0**-9

    def many() -> None:
        light[0] = 0
        seconds[0] += 2.0**-8

    found = cost.timed({"few": (few, few), "many": (many, many)}, torch.device("cpu"), 0.1)
    assert found == {"few": 2.0**-10, "many": 2.0**-8}


def test_a_draft_that_is_seldom_asked_for(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one that is timed as if it were asked for in every step: by then nothing of it is in a cache, nor of the
    step behind it."""
    for name, value in {"CONTEXT": 8, "SECONDS": 0.0, "VERIFIED": (2, 4), "CHAINED": (4,), "LATE": 2}.items():
        monkeypatch.setattr(cost, name, value)
    seconds, steps, rule = [1.0], [0], cost.rule_for(GREEDY)

    def slow_rule(*given: Any) -> Any:
        seconds[0] += (1.125 if steps[0] == 0 else 1.0) * 2.0**-11
        steps[0] += 1
        return rule(*given)

    def draft() -> None:
        seconds[0] += (0.5 if steps[0] >= cost.SELDOM else 0.25) * 2.0**-11
        steps[0] = 0

    monkeypatch.setattr(cost, "_now", lambda device: seconds[0])
    monkeypatch.setattr(cost, "rule_for", lambda sampling: slow_rule)
    for seldom, first in ((False, 0.25), (True, 0.625)):
        kept_costs._known.clear()
        found = cost.step_costs(
            target_of("llama"), {"": seldom}, 1, GREEDY, 9, lambda _: (lambda late: draft, None), seldom=seldom
        )
        assert (found.plain, found.first) == (2.0**-11, first * 2.0**-11)


def test_what_is_known_takes_no_memory(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache of thousands of rows that is made, and that the memory may not suffice for, to read a file."""
    monkeypatch.setattr(cost, "SECONDS", 0.0)
    target = target_of("llama")
    found = cost.step_costs(target, {}, 1, GREEDY, 9)
    with mock.patch.object(target, "new_cache", side_effect=ValueError("no memory")):
        assert cost.step_costs(target, {}, 1, GREEDY, 9) == found


@pytest.mark.parametrize("batch", [33, 200])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_large_batches(batch: int, temperature: float, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a measurement that asks for a chain of four tokens where two are as many as it has room for."""
    monkeypatch.setattr(cost, "SECONDS", 0.0)
    monkeypatch.setattr(cost, "AHEAD", 1)
    found = cost.step_costs(target_of("llama"), {}, batch, Sampling(temperature), 9, Watched().drafting, drawn=True)
    assert found.chain == found.verify and found.verify.rows == (1, 2)


def test_slow_steps_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches minutes of a slow target's steps before one draft is timed."""
    seconds = [0.0]
    monkeypatch.setattr(cost, "_now", lambda device: seconds[0])

    def runs(took: float) -> int:
        count = 0

        def run() -> None:
            nonlocal count
            seconds[0] += took
            count += 1

        cost.repeated(run, cost.SELDOM, torch.device("cpu"))()
        return count

    assert (runs(2.0**-10), runs(0.25)) == (cost.SELDOM, 1)


def test_short_steps_are_timed_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a tenth of a second of a shared machine that decides for hours, and minutes spent on long steps."""
    seconds = [0.0]
    for name, value in {"_now": lambda device: seconds[0], "LEAD": 0.0, "ALIKE": 1}.items():
        monkeypatch.setattr(cost, name, value)

    def rounds(step: float, least: float) -> int:
        runs: list[float] = []

        def run() -> None:
            seconds[0] += step
            runs.append(step)

        assert cost.timed({"a": (run, run)}, torch.device("cpu"), least)["a"] == pytest.approx(step)
        return (len(runs) - 2) // 4

    assert rounds(2.0**-10, 1.5) == 384 and rounds(2.0**-10, 0.0) == 9
    assert rounds(0.125, 1.5) == 9 and rounds(1.0, 1.5) == 3


def test_the_loops_own_share_is_in_it(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches costs of forwards alone: where those are short, what the host does decides whether a draft pays. And
    long chains on the line through short ones: from where arithmetic binds, a row costs much more."""
    rows = {"VERIFIED": (2, 4, 8), "CHAINED": (2, 4), "DRAFTED": (1, 2), "AHEAD": 1, "ALIKE": 1, "LATE": 32}
    for name, value in {"CONTEXT": 8, "SECONDS": 0.0, **rows}.items():
        monkeypatch.setattr(cost, name, value)
    target = target_of("llama")
    rule, judge, seconds = cost.rule_for(GREEDY), Paying._worth_a_pass, [1.0]  # a clock that these two alone move

    def slow_rule(draft: DraftTree, *given: Any) -> Any:
        seconds[0] += 0.5 + draft.size**2 - 0.25 * (draft.is_chain and draft.size > 1)
        return rule(draft, *given)

    def slow_judge(*given: Any) -> Any:
        seconds[0] += 20
        return judge(*given)

    monkeypatch.setattr(cost, "_now", lambda device: seconds[0])
    monkeypatch.setattr(cost, "rule_for", lambda sampling: slow_rule)
    monkeypatch.setattr(Paying, "_worth_a_pass", slow_judge)
    drafter: Any = auto_eagle(target, None, None)
    with torch.inference_mode():
        found = drafter._step_costs(1, GREEDY, 9, grows=True)
    print(found)
    assert found.plain == 0.5 and found.verify.at(4) == 9.5 and found.verify.at(8) == 49.5
    assert found.chain.at(4) == 9.25 and found.chain.at(8) == 49.25
    assert found.draft.at(1) == 20 and found.first == 0


@pytest.mark.parametrize("kind", ["eagle", "speculative"])
def test_what_is_taken_in_late_costs(kind: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a draft after many steps without one that is taken for as cheap as one that follows another."""
    for name, value in {
        "CONTEXT": 8,
        "SECONDS": 0.0,
        "VERIFIED": (2, 4),
        "CHAINED": (2,),
        "DRAFTED": (1,),
        "LATE": 2,
    }.items():
        monkeypatch.setattr(cost, name, value)
    target, seconds, rule = target_of("llama"), [1.0], cost.rule_for(Sampling(1.0))

    def slow_rule(*given: Any) -> Any:
        seconds[0] += 1.0
        return rule(*given)

    monkeypatch.setattr(cost, "_now", lambda device: seconds[0])
    monkeypatch.setattr(cost, "rule_for", lambda sampling: slow_rule)
    drafter: Any = auto_eagle(target, None, None) if kind == "eagle" else None
    if drafter is None:
        drafter = make_drafter(kind, target, draft_model=perturbed(target, 0.1), gamma="auto")
    reads, place = (drafter, "_extend") if kind == "eagle" else (drafter.draft_model, "run")
    run = getattr(reads, place)

    def timed_run(rows: Tensor, *given: Any) -> Any:
        seconds[0] += rows.shape[1]
        return run(rows, *given)

    with mock.patch.object(reads, place, timed_run), torch.inference_mode():
        found = drafter._step_costs(1, Sampling(1.0), 9)
    first = 2 if kind == "eagle" else 1  # a draft that follows another takes in what was committed with it
    assert (found.late, found.first) == (1.0, first) and kept_costs.mean([found, found]).late == 1.0
    kept_costs._known.clear()
    assert drafter._step_costs(1, Sampling(1.0), 9).late == 1.0
    assert found.towards(found._replace(late=3.0), 0.5).late == 2.0


def test_what_is_accepted_costs_where_tokens_are_sampled(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches trials that are not counted: each accepted token makes a distribution and is tried, and a promise
    without that was a tenth too high."""
    for name, value in {"CONTEXT": 8, "SECONDS": 0.0, "VERIFIED": (2, 4), "CHAINED": (2, 4), "DRAFTED": (1,)}.items():
        monkeypatch.setattr(cost, name, value)
    target, sampled, seconds, tried = target_of("llama"), Sampling(1.0), [1.0], set[tuple[bool, int]]()
    rule = cost.rule_for(sampled)

    def slow_rule(draft: DraftTree, *given: Any) -> Any:
        verdict = rule(draft, *given)
        accepted = len(verdict.rows[0]) - 1
        tried.add((draft.q is not None, accepted))
        seconds[0] += 1.0 + 0.25 * accepted + 0.5 * (draft.q is not None)
        return verdict

    monkeypatch.setattr(cost, "_now", lambda device: seconds[0])
    monkeypatch.setattr(cost, "rule_for", lambda sampling: slow_rule)
    found = cost.step_costs(target, {}, 1, sampled, 9, drawn=True)
    assert tried == {(False, 0), (True, 0), (True, 3)}
    assert (found.plain, found.chain.at(4), found.accepted) == (1.0, 1.5, 0.25)
    kept_costs._known.clear()
    assert cost.step_costs(target, {}, 1, sampled, 9, drawn=True) == found
    tried.clear()
    copied = cost.step_costs(target, {}, 1, sampled, 9)
    assert tried == {(False, 0), (False, 3)} and copied.chain.at(4) == 1.0
    assert cost.step_costs(target, {}, 1, GREEDY, 9).accepted == 0


def test_long_contexts_are_measured_when_they_are_met(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches forwards behind another context than is said, long ones measured for nothing or again and again, and a
    file without a context (as they were once) taken for one of any.
    """
    for name, value in {"CONTEXT": 8, "LONG": 12, "FAR": 300, "SECONDS": 0.0, "VERIFIED": (2, 4)}.items():
        monkeypatch.setattr(cost, name, value)
    target, watched, lengths = target_of("llama"), Watched(), set[int]()
    run = target.run

    def noted(tokens: object, cache: KVCache, *given: object, **more: object) -> object:
        lengths.update(cache.lengths)
        return run(tokens, cache, *given, **more)  # type: ignore[arg-type]

    with mock.patch.object(target, "run", noted):
        cost.step_costs(target, {}, 1, GREEDY, 12, watched.drafting)
        assert watched.contexts == [8] and min(lengths) == 8 and max(lengths) < 8 + cost.LONGER
        lengths.clear()
        near, far = (cost.step_costs(target, {}, 1, GREEDY, length, watched.drafting) for length in (13, 200))
        assert watched.contexts == [8, 108] and min(lengths) == 108 and max(lengths) < 108 + cost.LONGER
    assert near.plain <= far.plain and len(list(store.iterdir())) == 2
    kept_costs._known.clear()
    monkeypatch.setattr(kept_costs, "MOMENTS", 1)
    monkeypatch.setattr(kept_costs, "BUSY", 0.0)  # as a machine at work on something else may be, while it is tested
    assert cost.step_costs(target, {}, 1, GREEDY, 200, watched.drafting) == far and watched.contexts == [8, 108]
    for file in store.iterdir():
        kept = json.loads(file.read_text())
        assert kept["key"].pop("context") in (8, 108)
        file.write_text(json.dumps(kept))
    kept_costs._known.clear()
    cost.step_costs(target, {}, 1, GREEDY, 200, watched.drafting)
    assert watched.contexts == [8, 108, 8, 108]


def test_costs_lie_on_the_line_through_two_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one part that stays what it was or goes by another's slope, and a cache that is too long for the memory
    or the model."""
    target, asked, memory = target_of("llama"), list[int](), 10_000

    def measured(target: object, name: object, batch: int, sampling: object, context: int, **how: object) -> Costs:
        asked.append(context)
        if batch * context > memory:
            raise ValueError("less memory than it needs")
        return linear(context)

    monkeypatch.setattr(cost, "_costs_behind", measured)
    monkeypatch.setattr(type(target), "max_context", 8192)
    for length in (100, 512, 2000, 8000):
        found, exact = cost.step_costs(target, {}, 1, GREEDY, length), linear(max(length, 256) if length > 512 else 256)
        assert (found.plain, found.first) == pytest.approx((exact.plain, exact.first))
        assert found.accepted == pytest.approx(exact.accepted)
        for one, other in zip(found[1:3], exact[1:3], strict=True):
            assert isinstance(one, Curve) and one.seconds == pytest.approx(other.seconds)  # type: ignore[union-attr]
        assert found.draft.seconds[0] == pytest.approx(exact.draft.seconds[0])
    assert asked == [256, 256, 256, 3904, 256, 3904]
    for rows, memory, contexts in (
        (4, 10_000, [256, 832]),
        (1, 3000, [256, 3904, 1856]),
        (1, 500, [256, 3904, 1856, 832]),
    ):
        asked.clear()
        assert cost.step_costs(target, {}, rows, GREEDY, 2000).plain == pytest.approx(1.256 if memory == 500 else 3.0)
        assert asked == contexts
    # Noise must not make a long context cheaper.
    assert linear(3000).towards(linear(256), 2.0) == linear(3000)


def test_a_length_is_asked_for_once() -> None:
    """Catches costs that are worked out in every step, or of a length that is far from the one at hand."""
    asked: list[int] = []
    costs = CostsByLength(lambda length: asked.append(length) or linear(length))  # type: ignore[func-returns-value]
    found = [costs.at(length) for length in range(1, 8193)]
    assert len(asked) < 20 and len(set(map(id, found))) == len(asked) and asked[0] == 0
    for length, one in enumerate(found, start=1):
        if length > cost.LONG:
            assert one.plain == pytest.approx(linear(length).plain, rel=0.13)
    assert costs.at(100) is found[0] and len(asked) < 20
