"""The figures every report is made of, worked by hand."""

import pytest
from conformance import NO_EOS, prompt, target_of

from drafters import generate
from drafters.loop.generate import Step, Trace
from drafters.methods.autoregressive import AutoregressiveDrafter


def trace_of(*steps: tuple[int, int, int]) -> Trace:
    """Steps given as (depth, accepted, committed)."""
    made = [
        Step(row=0, drafted=depth, depth=depth, accepted=accepted, committed=kept) for depth, accepted, kept in steps
    ]
    return Trace(made)


def test_tau_counts_the_bonus_and_what_was_kept() -> None:
    """Catches tau without the bonus, over drafted tokens, or over accepted ones that EOS cut off."""
    trace = trace_of((5, 0, 1), (5, 2, 3), (5, 5, 6), (5, 4, 2))
    assert trace.tau == 3.0 and trace.decoded_tokens == 12
    assert Trace().tau == 1.0
    trace.steps[0].forwards = 3  # the drafter asked the target twice
    assert trace.tau == 2.0


def test_ctar() -> None:
    """Catches "at least w" for "more than w" (Kangaroo, section 4.1), by hand on 1, 3, 6, 2 tokens."""
    trace = trace_of((5, 0, 1), (5, 2, 3), (5, 5, 6), (5, 1, 2))
    assert [trace.ctar(w) for w in range(7)] == [1.0, 0.75, 0.5, 0.25, 0.25, 0.25, 0.0]
    assert Trace().ctar(1) == 0.0


def test_n_alpha_is_conditional() -> None:
    """Catches rates over all steps instead of those that got so far (EAGLE, section 4), and short drafts as misses."""
    trace = trace_of((3, 0, 1), (3, 1, 2), (3, 3, 4), (3, 3, 4), (1, 1, 2), (0, 0, 1))
    assert trace.n_alpha(0) == pytest.approx(4 / 5)  # the step without a draft does not count
    assert trace.n_alpha(1) == pytest.approx(2 / 3)  # nor does the draft that ended after one token
    assert trace.n_alpha(2) == 1.0
    assert trace.n_alpha(3) is None


def test_joint_acceptance_is_counted() -> None:
    """Catches n-alphas multiplied (of a draft of one token, none at 2 is certain: 0.53 for 0.4), steps without a draft
    that count, and a sum over depths that is not tau less the bonus.
    """
    trace = trace_of((3, 0, 1), (3, 1, 2), (3, 3, 4), (3, 3, 4), (1, 1, 2))
    assert [trace.joint_alpha(n) for n in range(4)] == [0.8, 0.4, 0.4, None]
    assert pytest.approx(trace.tau) == 1 + 0.8 + 0.4 + 0.4
    assert trace_of((3, 0, 1), (0, 0, 1)).joint_alpha(0) == 0.0 and trace_of((0, 0, 1)).joint_alpha(0) is None


def test_times_are_of_their_own_step() -> None:
    """Catches laps assigned to the wrong phase, and a prefill counted as decoding."""
    target = target_of("llama")
    trace = generate(
        target,
        AutoregressiveDrafter.from_options(target),
        [prompt(6), prompt(4)],
        max_new_tokens=9,
        eos_token_id=NO_EOS,
    ).trace
    assert trace.forwards == len(trace.draft_seconds) == len(trace.other_seconds) == 8
    assert len(trace.steps) == 16 and trace.tau == 1.0 and trace.decoded_tokens == 16
    assert trace.prefill_seconds > 0
    assert sum(trace.verify_seconds) > sum(trace.draft_seconds)  # plain decoding drafts nothing
    assert trace.decode_seconds == pytest.approx(
        sum(trace.draft_seconds) + sum(trace.verify_seconds) + sum(trace.other_seconds)
    )
