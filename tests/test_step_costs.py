"""Step costs: the parts of a step by a clock that the test sets, context lengths, keys of the cache, inner drafters."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from conformance import target_of
from rigged import auto_eagle, perturbed

from drafters import Drafter, TargetModel, make_drafter
from drafters.config import Config
from drafters.loop.sampling import Sampling
from drafters.loop.tree import DraftTree
from drafters.model.cache import KVCache
from drafters.policy import costs as measuring
from drafters.policy.costs import PlanTime, context_limit, context_limits, prepare, step_times, time_plans
from drafters.policy.shape import ShapePolicy

ROUNDS = 6


class Timed(Drafter):
    """Drafts ``size`` tokens, and advances the test's clock. Its seconds are powers of two, so that sums tell parts."""

    name = "timed"
    max_batch = None

    def __init__(self, target: TargetModel) -> None:
        super().__init__(target, Config())
        self.clock, self.size, self.max_draft, self.calls = 0.0, 0, 3, 0

    def propose(self, state: Any) -> DraftTree:
        turn, self.calls = self.calls, self.calls + 1
        plan_turn = turn // measuring.IN_A_ROW // 2  # of two plans: which round it is
        self.clock += {0: 9000.0, 2: 500.0, 3: -0.5, 4: 500.0}.get(plan_turn, 0.0)  # warm-up, slow and fast rounds
        self.clock += 700.0 if turn % measuring.IN_A_ROW == 0 else 1.0 + self.size  # only the last in a row counts
        tokens = torch.zeros(state.batch, self.size, dtype=torch.long)
        return DraftTree.chain(tokens) if self.size else state.nothing

    def rule(self, sampling: Sampling) -> Any:
        verify = super().rule(sampling)

        def timed(*given: Any) -> Any:
            self.clock += 8.0
            return verify(*given)

        return timed

    def observe(self, *given: Any) -> None:
        self.clock += 32.0


def test_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a part of the step that is left out or counted as drafting, the warm-up, a step that is not the last in a
    row, and figures that one slow or fast round changes."""
    target = target_of("llama")
    drafter = Timed(target)
    run, commit = TargetModel.run, KVCache.commit

    def timed_run(*given: Any, **options: Any) -> Any:
        drafter.clock += 4.0
        return run(*given, **options)

    def timed_commit(*given: Any) -> None:
        drafter.clock += 16.0
        commit(*given)

    monkeypatch.setattr(measuring, "ROUNDS", ROUNDS)
    monkeypatch.setattr(measuring, "SECONDS", 1e9)
    monkeypatch.setattr(measuring, "_now", lambda device: drafter.clock)
    monkeypatch.setattr(TargetModel, "run", timed_run)
    monkeypatch.setattr(KVCache, "commit", timed_commit)
    times = time_plans(drafter, [0, 3], lambda size: setattr(drafter, "size", size), 2, Sampling(), 9)
    assert times == [PlanTime(1.0, 4.0 + 8.0 + 16.0 + 32.0), PlanTime(4.0, 4.0 + 8.0 + 16.0 + 32.0)]
    assert drafter.calls == ROUNDS * measuring.IN_A_ROW * 2


def asked(monkeypatch: pytest.MonkeyPatch, longest: int, fits: int = 10**6, **changes: Any) -> tuple[list[int], Any]:
    """The context lengths that ``step_times`` tries where those above ``fits`` need too much memory, and its key."""
    tried, keys = [], []

    def timed(drafter: Any, plans: Any, use: Any, batch: int, sampling: Any, context: int) -> list[PlanTime]:
        tried.append(context)
        if context > fits:
            raise ValueError("no memory")
        return [PlanTime(1.0, 2.0)]

    def uncached(target: Any, key: Any, measure: Any) -> Any:
        keys.append(key)
        return measure()

    monkeypatch.setattr(measuring, "time_plans", timed)
    monkeypatch.setattr(measuring, "cached", uncached)
    drafter: Any = SimpleNamespace(target=None, max_context=2000, max_draft=8)
    given = {"plans": [()], "batch": 1, "sampling": Sampling(1.0), "limit": 4096, "key": {"method": "x"}} | changes
    assert step_times(drafter, use=lambda plan: None, longest=longest, **given) == [PlanTime(1.0, 2.0)]
    return tried, keys[0]


def test_context_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches costs behind a text that is longer than any, that leaves no room for drafts or that does not fit; and
    texts of one length that count to two ranges."""
    assert [asked(monkeypatch, longest)[0] for longest in (100, 9999)] == [[100], [2000 - 8 * 10]]
    assert asked(monkeypatch, 9999, limit=512)[0] == [256]
    assert asked(monkeypatch, 9999, fits=130)[0] == [1920, 480, 120]
    with pytest.raises(ValueError, match="no memory"):
        asked(monkeypatch, 9999, fits=10)
    target: Any = SimpleNamespace(max_context=40_000)
    lengths = (1, 512, 513, 4096, 4097, 32_768, 39_999)
    assert [context_limit(target, length) for length in lengths] == [512, 512, 4096, 4096, *[32_768] * 3]
    assert context_limits(target, 4097) == [512, 4096, 32_768] and context_limits(target, 512) == [512]


def test_what_costs_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches costs of another batch, way of sampling, context, set of plans, draft model or thread count in use."""
    ways: list[dict[str, Any]] = [
        *({"sampling": one} for one in (Sampling(), Sampling(1.0, 5), Sampling(1.0, 0, 0.9))),
        {"batch": 2}, {"plans": [((0,),)]}, {"limit": 512}, {"key": {"method": "y"}}, {},
    ]  # fmt: skip
    keys = [asked(monkeypatch, 9999, **changes)[1] for changes in ways]
    assert all(one != other for place, one in enumerate(keys) for other in keys[:place])
    assert asked(monkeypatch, 9999, sampling=Sampling(0.3))[1] == keys[-1]  # the temperature changes no cost
    target = target_of("llama")
    given: list[Any] = []
    monkeypatch.setattr("drafters.policy.costs.step_times", lambda *rest: given.append(rest[-1]) or [])
    monkeypatch.setattr(ShapePolicy, "_costs_of", lambda *_: None)
    for noise, dtype in ((0.1, None), (0.2, None), (0.1, "int8")):
        model = perturbed(target, noise)
        drafter = make_drafter("speculative", target, draft_model=model, gamma="auto", draft_dtype=dtype)
        prepare(drafter, 1, Sampling(), 99)
    assert given[0] != given[1] and given[0] != given[2] and "draft_model" not in given[0]["options"]
    with mock.patch.object(torch, "get_num_threads", lambda: 77):
        assert measuring._machine(target)["threads"] == 77
    monkeypatch.setenv(measuring.CACHE, "/elsewhere")
    before = measuring._machine(target)
    monkeypatch.setenv("DRAFTERS_KERNELS", "of another kind")
    assert measuring._machine(target) != before and "/elsewhere" not in str(before)


def test_inner_drafters_are_measured_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a server that measures with its first prompt what ``prepare`` was called for."""
    target = target_of("llama")
    drafter = make_drafter("hybrid", target, head=auto_eagle(target, 0.4, None))
    prepare(drafter, 2, Sampling(1.0), 99)
    monkeypatch.setattr(measuring, "time_plans", lambda *given: pytest.fail("measured again"))
    measuring._known.clear()
    prepare(drafter, 2, Sampling(1.0), 99)
    for part in (drafter, *drafter.parts):
        if part.policy is not None:
            part.policy.prepare(part, 2, Sampling(1.0), 99)
