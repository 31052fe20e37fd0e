"""The figures of a report: loops, alternation, paired speedups, exactness, counting."""

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import VOCAB_SIZE, build

from drafters import TargetModel
from drafters.base import Expected
from drafters.loop.generate import Step, Trace
from eval.figures.divergence import TOLERANCE, find_divergences
from eval.figures.metrics import acceptance, ends_in_loop, joules_per_token, paired_speedup, times, typical_run
from eval.figures.scores import Scores
from eval.measure.run_journal import journal_line, run_from_line
from eval.measure.runs import Limits, MeasurementError, Method, Outcome, Run, measure
from eval.prompts.prompts import Prompt
from eval.report.build import make_rows
from eval.report.judged import judge
from eval.report.tables import tail

PROMPTS = [Prompt(f"p{i}", None, [5, 6 + i]) for i in range(6)]


def make_run(prompt: int, tokens: int, seconds: float, commits: tuple[int, ...] = ()) -> Run:
    trace = Trace(steps=[Step(0, 3, 3, commit - 1, commit) for commit in commits])
    return placed(Outcome(list(range(tokens + 1)), 0.1, seconds, trace), prompt, seconds + 0.2)


def placed(made: Outcome, prompt: int, wall_seconds: float, method: str = "m", temperature: float = 0.0) -> Run:
    """A run of round 0."""
    where: dict[str, Any] = {"method": method, "temperature": temperature, "round": 0, "prompt": prompt}
    return Run(**vars(made), **where, wall_seconds=wall_seconds)


def rows_of(
    runs: list[Run], described: dict[str, Any], prompts: list[Prompt]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The baseline and the rows of a report, as a tiny target judges the outputs."""
    judged = judge(runs, described, "plain", prompts, TargetModel(build("llama")))
    return make_rows(runs, described, "plain", prompts, judged, 0)


def trace_of(count: int) -> Trace:
    return Trace([Step(0, 0, 0, 0, 1)] * count, [0.0] * count, [0.1] * count, [0.0] * count)


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([1, 2, 3] + [9] * 24, True),
        ([1, 2, 3] + [9] * 23, False),  # one token short
        (list(range(100, 110)) * 3, True),
        ([7] + list(range(100, 110)) * 2 + list(range(100, 109)), False),  # not quite three turns
        (list(range(32)) * 3, True),
        (list(range(33)) * 3, False),  # a longer cycle than the definition takes
        ([9] * 40 + [1], False),  # it stopped before the limit
        ([4, 5] * 20 + [4], True),  # ends in the middle of a turn
        ([], False),
        (list(range(64)), False),
    ],
)
def test_loop_definition(tokens: list[int], loops: bool) -> None:
    """Catches a detector that calls short repeats loops, or misses cycles cut in the middle of a turn."""
    assert ends_in_loop(tokens) is loops


def test_methods_alternate_within_a_prompt_and_pools_are_emptied() -> None:
    """Catches one method running over all prompts before the next, and drafters kept from one round to the next."""
    calls: list[tuple[str, int]] = []
    builds: list[float] = []

    def method(name: str) -> Method:
        def decode(ids: list[list[int]], seed: int, most: int) -> Outcome:
            calls.append((name, ids[0][1]))
            return Outcome([1, 2], 0.0, 0.1, trace_of(1))

        return decode

    def make(temperature: float, batch: int) -> dict[str, Method]:
        builds.append(temperature)
        return {name: method(name) for name in "abc"}

    runs = list(measure(make, PROMPTS[1:4], PROMPTS[:1], [0.0, 1.0], 2, Limits(8)))
    assert builds == [0.0, 0.0, 1.0, 1.0]
    assert len(runs) == 3 * 3 * 4  # warm-up left out
    for start in range(0, len(calls), 3):
        assert len({name for name, _ in calls[start : start + 3]}) == 3
        assert len({prompt for _, prompt in calls[start : start + 3]}) == 1


def test_the_journal_holds_all_of_every_run() -> None:
    """Catches a journal from which nothing can be computed again: without tokens, steps, forwards or their times."""
    trace = Trace(
        [Step(0, 7, 4, 2, 3, 2), Step(0, 5, 3, 0, 1)], [0.1, 1 / 3], [0.2, 0.4], [0.01, 0.02], [0.2, 0.5], 0.7
    )
    methods: dict[str, Method] = {
        "loop": lambda ids, seed, most: Outcome([4, 5, 6, 7, 8], 0.7, trace.decode_seconds, trace),
        "stock": lambda ids, seed, most: Outcome([4, 5, 6], 0.1, 0.2, first_tokens=2),
    }
    runs = list(measure(lambda *_: methods, PROMPTS[:2], PROMPTS[4:], [0.0, 0.7], 1, Limits(8)))
    runs[0] = replace(runs[0], energy_joules=1 / 7, expected=Expected(2, 3.0, 2.5, "x"))
    lines = [json.dumps(journal_line(run, PROMPTS[run.prompt])) for run in runs]
    assert [run_from_line(json.loads(line)) for line in lines] == runs


@pytest.mark.parametrize(("tokens", "message"), [([4, 1, 5], "after EOS"), ([4] * 9, "9 new tokens"), ([], "0 new")])
def test_overcounting_is_refused(tokens: list[int], message: str) -> None:
    """Catches tokens after EOS, or past the limit, that would count as speed."""

    def decode(ids: list[list[int]], seed: int, most: int) -> Outcome:
        return Outcome(tokens, 0.0, 0.1)

    with pytest.raises(MeasurementError, match=message):
        next(measure(lambda *_: {"m": decode}, PROMPTS[:1], [], [0.0], 1, Limits(8, eos=frozenset([1]))))


def test_tokens_that_the_prefill_gave_are_not_decoded() -> None:
    """Catches an assisted run credited with tokens that it had before its decoding was timed."""
    run = placed(Outcome([1, 2, 3, 4, 5], 1.0, 2.0, first_tokens=3), 0, 3.0)
    assert (run.decoded_tokens, run.seconds_per_token) == (2, 1.0)
    with pytest.raises(MeasurementError, match="cannot have given 4 of 3"):
        wrong = Outcome([1, 2, 3], 0, 1, first_tokens=4)
        next(measure(lambda *_: {"m": lambda ids, seed, most: wrong}, PROMPTS, [], [0.0], 1, Limits(8)))


def test_speedup_is_paired_and_leaves_the_prefill_out() -> None:
    """Catches a ratio over unlike prompts, and prefill or its first token counted; by hand: 60/4 against 60/12."""
    baseline = [make_run(0, 20, 4.0), make_run(1, 40, 8.0), make_run(2, 0, 0.0)]
    faster = [make_run(0, 20, 1.0), make_run(1, 40, 3.0), make_run(2, 0, 0.0)]
    speedup = paired_speedup([[run] for run in faster], [[run] for run in baseline])
    assert speedup.speedup == pytest.approx(3.0)
    assert speedup.speedup_median == pytest.approx((4 + 8 / 3) / 2)
    assert speedup.speedup_ci is not None
    assert speedup.speedup_ci[0] == pytest.approx(8 / 3)
    assert speedup.speedup_ci[1] == pytest.approx(4.0)
    same = paired_speedup([[run] for run in baseline], [[run] for run in baseline])
    assert (same.speedup, same.speedup_ci) == (1.0, (1.0, 1.0))
    unlike = [[make_run(0, 20, 4.0)], [make_run(1, 40, 1.0)]]  # twice as fast on each, however unlike they are
    twice = paired_speedup([[make_run(0, 20, 2.0)], [make_run(1, 40, 0.5)]], unlike)
    assert (twice.speedup, twice.speedup_ci) == (2.0, (2.0, 2.0))


def test_medians_pair_the_rounds() -> None:
    """Catches the median time of each method taken apart: of rounds that were not run side by side.

    By hand, with 10 tokens: seconds of the method 1, 2, 9 and of plain decoding 2, 8, 10; ratios 2, 4, 10/9, so the
    first round is the median one; taken apart it would be 8 / 2 = 4. On the other prompt, with 20 tokens, it is the
    last: 6 / 2. Totals: (10 + 20) tokens in 1 + 2 seconds, over 30 in 2 + 6.
    """

    def rounds(prompt: int, tokens: int, *seconds: float) -> list[Run]:
        return [replace(make_run(prompt, tokens, s), round=number) for number, s in enumerate(seconds)]

    method = [rounds(0, 10, 1.0, 2.0, 9.0), rounds(1, 20, 6.0, 1.0, 2.0)]
    plain = [rounds(0, 10, 2.0, 8.0, 10.0), rounds(1, 20, 6.0, 5.0, 6.0)]
    speedup = paired_speedup(method, plain)
    assert speedup.speedup == pytest.approx(8 / 3)
    assert speedup.speedup_median == pytest.approx(2.5)
    with pytest.raises(AssertionError):
        paired_speedup([method[0][:1]], [plain[0][1:2]])  # of two rounds


def test_every_figure_of_the_steps_by_hand() -> None:
    """Catches a scale, a divisor or a sum that is off in any figure; two prompts, three steps, worked by hand."""
    two = Trace(
        [Step(0, 4, 2, 2, 3, 1), Step(0, 2, 2, 0, 1, 2)], [0.1, 0.3], [0.4, 0.6], [0.02, 0.04], [0.3, 0.5], 0.25
    )
    one = Trace([Step(0, 6, 2, 1, 2, 1)], [0.2], [0.8], [0.06], [0.7], 0.75)
    runs = [
        placed(Outcome([7] * 5, 0.25, two.decode_seconds, two), 0, 2.0),
        placed(Outcome([7] * 3, 0.75, one.decode_seconds, one), 1, 3.0),
    ]
    assert acceptance(runs, set()) == {
        "tau": pytest.approx(6 / 4),  # of forwards, not of steps
        "tau_ci": (pytest.approx(4 / 3), pytest.approx(2)),  # of resampled prompts: twice the one, twice the other
        "tau_by_prompt": pytest.approx((4 / 3 + 2) / 2),  # a long answer counts as a short one
        "tau_without_loops": pytest.approx(6 / 4),
        "ctar": [pytest.approx(2 / 3), pytest.approx(1 / 3)],  # more than 1, more than 2 tokens
        "n_alpha": [pytest.approx(2 / 3), pytest.approx(1 / 2)],
        "joint_alpha": [pytest.approx(2 / 3), pytest.approx(1 / 3)],
        "steps": 3,
        "target_forwards": 4,
        "drafted_per_step": pytest.approx(4),
    }
    assert times(runs) == {
        "tokens_per_second": pytest.approx(6 / 2.52),
        "end_to_end_tokens_per_second": pytest.approx(8 / 5),
        "draft_ms": pytest.approx(200),
        "verify_ms": pytest.approx(600),
        "other_ms": pytest.approx(40),
        "host_ms": pytest.approx((2.52 - 1.5) / 3 * 1e3),
        "overhead": pytest.approx(1 - 1.5 / 2.52),
        "prefill_ms": pytest.approx(500),
    }


def test_energy_is_of_all_tokens_of_all_calls() -> None:
    """Catches a mean of the calls' own figures, the first token left out, and a missing reading taken for zero."""
    runs = [replace(make_run(0, 4, 1.0), energy_joules=10.0), replace(make_run(1, 9, 1.0), energy_joules=5.0)]
    assert joules_per_token(runs) == 1.0
    assert joules_per_token([*runs, make_run(2, 4, 1.0)]) is None


def test_the_median_round_counts() -> None:
    """Catches best-of: the fastest of several rounds."""
    rounds = [make_run(0, 10, seconds) for seconds in (3.0, 1.0, 2.0)]
    assert typical_run(rounds).decode_seconds == 2.0


def test_divergence_is_accepted_only_where_rounding_explains_it() -> None:
    """Catches a wrong token waved through because the target's top two happened to lie close together."""
    target = TargetModel(build("llama").to(torch.bfloat16))
    ids = list(range(3, 13))
    logits = target.lm_head(target.features(torch.tensor([ids])).features[0, -1]).float()
    best, worst = int(logits.argmax()), int(logits.argmin())

    def diverge(token: int) -> tuple[bool, float | None]:
        (found,) = find_divergences(Scores(target, [ids]), [[best, 7]], ["p"], {0: [token, 7]})
        assert found.position == 0
        assert found.margin == pytest.approx((logits.topk(2).values[0] - logits.topk(2).values[1]).item(), abs=0.1)
        return found.accepted, found.gap

    accepted, gap = diverge(worst)
    assert not accepted
    assert gap == pytest.approx((logits.max() - logits.min()).item(), abs=0.1)
    head = target.model.lm_head.weight
    twin = (best + 1) % VOCAB_SIZE
    head.data[twin] = head.data[best]  # now the target cannot tell the two apart
    target = TargetModel(target.model)
    logits = target.lm_head(target.features(torch.tensor([ids])).features[0, -1]).float()
    assert diverge(twin) == (True, 0.0)
    tolerance = TOLERANCE[torch.bfloat16] * logits.abs().max().item()
    for share, explained in ((0.5, True), (2.0, False)):
        head.data[twin] = head.data[best] * (1 - share * tolerance / logits[best].item())
        target = TargetModel(target.model)
        logits = target.lm_head(target.features(torch.tensor([ids])).features[0, -1]).float()
        assert diverge(twin)[0] is explained


def test_only_a_tie_with_the_tokens_taken_explains_a_divergence() -> None:
    """Catches a wrong token that passes for rounding, since two other tokens tie there, or since the other output's is
    the best: of every two tokens taken, the worse one decides."""
    model, ids = build("llama").to(torch.bfloat16), list(range(3, 13))
    target = TargetModel(model)
    feature = target.features(torch.tensor([ids])).features[0, -1]
    ranks = target.lm_head(feature).float().argsort(descending=True).tolist()
    for rank, near in ((1, 0), (2, 0), (6, 5)):  # three tie for the best, two others further down
        model.lm_head.weight.data[ranks[rank]] = model.lm_head.weight.data[ranks[near]]
    target = TargetModel(model)
    logits = target.lm_head(feature).float()
    pairs = list(itertools.permutations([*ranks[:8], ranks[-1]], 2))
    count, others = len(pairs), {n: [other, 7] for n, (_, other) in enumerate(pairs)}
    found = find_divergences(Scores(target, [ids] * count), [[one, 7] for one, _ in pairs], ["p"] * count, others)
    tolerance = TOLERANCE[torch.bfloat16] * logits.abs().max()
    expected = [bool(logits.max() - logits[list(pair)].min() < tolerance) for pair in pairs]
    assert [one.accepted for one in found] == expected and 6 <= sum(expected) < count / 2


def test_a_tail_of_rounding_is_told_from_a_fault() -> None:
    """Catches an alarm over one token of a hundred thousand, and a fault that passes for a tail: one that is frequent,
    is far beyond, ends early, or is in float32."""

    def summary(*gaps: float | None, tolerance: float = 0.3) -> dict[str, Any]:
        return {"each": [{"gap": gap, "tolerance": tolerance, "accepted": gap == 0.1} for gap in gaps]}

    assert tail(summary(0.1, 0.36, 0.42), 560) == pytest.approx(1.4)
    assert tail(summary(0.1, 0.1), 560) is None
    assert tail(summary(0.36, 0.42), 100) is None
    assert tail(summary(0.36, 0.7), 560) is None
    assert tail(summary(0.36, None), 560) is None
    assert tail(summary(0.01, tolerance=0.0), 560) is None
    assert tail({"each": None}, 560) is None


def test_perplexity_is_that_of_the_new_tokens_under_the_target() -> None:
    """Catches a shift by one token, the prompt scored too, and prompts averaged instead of tokens."""
    target = TargetModel(build("llama"))
    ids = [[5, 6, 7], [8, 9, 10, 11]]
    runs = [placed(Outcome(tokens, 0, 1), i, 1) for i, tokens in enumerate([[12, 13, 14, 15], [3]])]
    log_p = []
    for run in runs:
        logits = target.model(torch.tensor([ids[run.prompt] + run.tokens])).logits[0].float().log_softmax(-1)
        log_p += [logits[len(ids[run.prompt]) - 1 + i, token].item() for i, token in enumerate(run.tokens)]
    expected = torch.tensor(log_p).mean().neg().exp().item()
    assert Scores(target, ids).perplexity(runs) == {"perplexity": pytest.approx(expected, rel=1e-4)}
