"""Compute the report's figures from runs; tau, CTAR and n-alpha are defined in ``drafters.loop.generate`` only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafters.loop.generate import Trace
from eval.measure.run_journal import TIME_FIELDS
from eval.measure.runs import Run

BOOTSTRAP_SAMPLES = 2000
MAX_LOOP_PERIOD = 32
MIN_LOOP_TOKENS = 24
MIN_LOOP_REPEATS = 3


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Return whether an output ends in a loop: for a period p of 1 to 32, the last max(3 p, 24) tokens repeat p tokens.

    Longer cycles are not detected. An output that ends at EOS never counts, because no cycle contains EOS.
    """
    for period in range(1, MAX_LOOP_PERIOD + 1):
        length = max(MIN_LOOP_REPEATS * period, MIN_LOOP_TOKENS)
        end = list(tokens[-length:])
        if len(end) == length and end[period:] == end[:-period]:
            return True
    return False


def typical_run(rounds: list[Run]) -> Run:
    """Return the run with the median time per token, of one prompt's rounds (an odd number)."""
    assert len(rounds) % 2, f"{len(rounds)} rounds have no middle one"
    return sorted(rounds, key=lambda run: run.seconds_per_token)[len(rounds) // 2]


def merged_trace(runs: Sequence[Run]) -> Trace:
    """Return one trace of all runs that report steps, so that tau gives every step the same weight."""
    merged = Trace()
    for run in runs:
        for name in ("steps", *TIME_FIELDS):
            getattr(merged, name).extend(getattr(run.trace, name, ()))
    return merged


def tokens_per_second(runs: Sequence[Run]) -> float | None:
    """Return total decoded tokens over total decoding seconds; None if nothing was decoded."""
    seconds = sum(run.decode_seconds for run in runs)
    tokens = sum(run.decoded_tokens for run in runs)
    return tokens / seconds if tokens and seconds > 0 else None


@dataclass(frozen=True)
class Speedup:
    """Speedup over the baseline on the same prompts: ratio of totals, and median over prompts, with 95% intervals."""

    speedup: float | None
    speedup_ci: tuple[float, float] | None
    speedup_median: float | None
    speedup_median_ci: tuple[float, float] | None


Pair = tuple[Run, Run]  # of one prompt in one round: a method's run, and the baseline's


def typical_pair(rounds: list[Run], baseline: list[Run]) -> Pair | None:
    """Return the round with the median speedup, of one prompt's rounds (an odd number); None if nothing was decoded.

    A slow phase of the machine affects both runs of a round.
    """
    assert [(run.prompt, run.round) for run in rounds] == [(run.prompt, run.round) for run in baseline]
    pairs = [(a, b) for a, b in zip(rounds, baseline, strict=True) if a.decoded_tokens and b.decoded_tokens]
    if not pairs:
        return None
    return sorted(pairs, key=lambda pair: pair[1].seconds_per_token / pair[0].seconds_per_token)[len(pairs) // 2]


def paired_speedup(rounds: Sequence[list[Run]], baseline: Sequence[list[Run]], seed: int = 0) -> Speedup:
    """Return the speedup over ``baseline``; both have the rounds of each prompt, in the same order.

    Every prompt counts with its ``typical_pair``; prompts without decoded tokens are left out. The interval is of the
    paired bootstrap: it draws prompts with replacement. No interval below two prompts.
    """
    typical = (typical_pair(runs, plain) for runs, plain in zip(rounds, baseline, strict=True))
    pairs = [pair for pair in typical if pair is not None]
    if not pairs:
        return Speedup(None, None, None, None)
    figures = [(a.decoded_tokens, a.decode_seconds, b.decoded_tokens, b.decode_seconds) for a, b in pairs]
    tokens, seconds, base_tokens, base_seconds = np.array(figures, dtype=float).T
    ratios = (tokens / seconds) / (base_tokens / base_seconds)
    total = (tokens.sum() / seconds.sum()) / (base_tokens.sum() / base_seconds.sum())
    if len(pairs) < 2:
        return Speedup(float(total), None, float(np.median(ratios)), None)
    drawn = np.random.default_rng(seed).integers(len(pairs), size=(BOOTSTRAP_SAMPLES, len(pairs)))
    totals = (tokens[drawn].sum(1) / seconds[drawn].sum(1)) / (base_tokens[drawn].sum(1) / base_seconds[drawn].sum(1))
    medians = np.median(ratios[drawn], axis=1)
    return Speedup(float(total), _interval(totals), float(np.median(ratios)), _interval(medians))


def _interval(samples: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(samples, [2.5, 97.5])
    return float(low), float(high)


def acceptance(runs: Sequence[Run], looping: set[int]) -> dict[str, Any]:
    """Return tau (over all steps, as mean over prompts, without the prompts in ``looping``), CTAR, n-alpha and joint.

    All are None for stock generate, which reports no steps.
    """
    trace = merged_trace(runs)
    rest = merged_trace([run for run in runs if run.prompt not in looping])
    longest = max((step.committed for step in trace.steps), default=1)
    n_alpha: list[float] = []
    while (rate := trace.n_alpha(len(n_alpha))) is not None:
        n_alpha.append(rate)
    joint: list[float] = []
    while (rate := trace.joint_alpha(len(joint))) is not None:
        joint.append(rate)
    figures = {
        "tau": trace.tau,
        "tau_ci": _tau_interval(runs),
        "tau_by_prompt": _mean([run.trace.tau for run in runs if run.trace is not None and run.trace.steps]),
        "tau_without_loops": rest.tau if rest.steps else None,
        "ctar": [trace.ctar(w) for w in range(1, max(longest, 2))],
        "n_alpha": n_alpha,
        "joint_alpha": joint,
        "steps": len(trace.steps),
        "target_forwards": sum(step.forwards for step in trace.steps),
        "drafted_per_step": _mean([step.drafted for step in trace.steps]),
    }
    return dict.fromkeys(figures) if any(run.trace is None for run in runs) else figures


def _tau_interval(runs: Sequence[Run], seed: int = 0) -> tuple[float, float] | None:
    """Return the 95% interval of the bootstrap over prompts; None below two prompts with steps."""
    traces = [run.trace for run in runs if run.trace is not None and run.trace.steps]
    if len(traces) < 2:
        return None
    committed = np.array([sum(step.committed for step in trace.steps) for trace in traces])
    forwards = np.array([sum(step.forwards for step in trace.steps) for trace in traces])
    drawn = np.random.default_rng(seed).integers(len(traces), size=(BOOTSTRAP_SAMPLES, len(traces)))
    return _interval(committed[drawn].sum(1) / forwards[drawn].sum(1))


def expected(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the expected tau and speedup of a drafter that chooses options itself, and its latest choice; else {}."""
    expectations = [run.expected for run in runs if run.expected is not None]
    steps, tokens, plain = (sum(float(one[place]) for one in expectations) for place in range(3))
    if not steps or not plain:
        return {}
    return {"expected": {"tau": tokens / steps, "speedup": tokens / plain, "choice": expectations[-1].choice}}


def times(runs: Sequence[Run]) -> dict[str, Any]:
    """Return speeds, milliseconds of a step's parts and of a prefill, and the share of time outside forward passes.

    Figures of steps are None for stock generate.
    """
    trace = merged_trace(runs)
    wall = sum(run.wall_seconds for run in runs)
    return {
        "tokens_per_second": tokens_per_second(runs),
        "end_to_end_tokens_per_second": sum(len(run.tokens) for run in runs) / wall,
        "draft_ms": _mean(trace.draft_seconds, 1e3),
        "verify_ms": _mean(trace.verify_seconds, 1e3),
        "other_ms": _mean(trace.other_seconds, 1e3),
        "host_ms": _host_ms(trace),
        "overhead": trace.overhead,
        "prefill_ms": _mean([run.prefill_seconds for run in runs], 1e3),
    }


def _host_ms(trace: Trace) -> float | None:
    """Return milliseconds per step outside forward passes."""
    if trace.overhead is None or not trace.draft_seconds:
        return None
    return 1e3 * trace.overhead * trace.decode_seconds / len(trace.draft_seconds)


FEWEST_STEPS = 20  # of a bin of ``by_context``


def by_context(runs: Sequence[Run], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Return tau by the number of tokens before a step, in bins by power of two with at least FEWEST_STEPS steps.

    Args:
        runs: runs of one prompt each. lengths: tokens of all prompts.
    """
    bins: dict[int, Trace] = {}
    for run in runs:
        if run.trace is None:
            return []
        context = lengths[run.prompt] + run.first_tokens
        for step in run.trace.steps:
            bins.setdefault(context.bit_length() - 1, Trace()).steps.append(step)
            context += step.committed
    return [
        {"from": 2**power, "to": 2 ** (power + 1) - 1, "steps": len(bins[power].steps), "tau": bins[power].tau}
        for power in sorted(bins)
        if len(bins[power].steps) >= FEWEST_STEPS
    ]


def joules_per_token(runs: Sequence[Run]) -> float | None:
    """Return the energy of whole calls, prefill included, over all new tokens; None if one is unknown.

    A call may be shorter than the counter's resolution, so give the runs of all prompts and rounds.
    """
    joules = [run.energy_joules for run in runs if run.energy_joules is not None]
    return sum(joules) / sum(len(run.tokens) for run in runs) if len(joules) == len(runs) else None


def _mean(values: Sequence[float], scale: float = 1.0) -> float | None:
    return scale * sum(values) / len(values) if values else None
