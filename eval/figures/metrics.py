"""From runs to the figures of the report. tau, CTAR and n-alpha are the trace's own; nothing is defined twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafters.loop.trace import Trace
from eval.measure.journal import TIME_FIELDS
from eval.measure.runner import Run

BOOTSTRAP_SAMPLES = 2000
MAX_LOOP_PERIOD = 32
MIN_LOOP_TOKENS = 24
MIN_LOOP_REPEATS = 3


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Whether an output ends in a loop: its end repeats one cycle.

    Precisely: for some period p of 1 to 32 tokens, the last max(3 p, 24) tokens each equal the token p before them (but
    for the first p of them), so that they are at least three turns of one cycle. Longer cycles go unseen. An output
    that stopped by itself, at EOS, never counts: EOS stands nowhere in a cycle.
    """
    for period in range(1, MAX_LOOP_PERIOD + 1):
        length = max(MIN_LOOP_REPEATS * period, MIN_LOOP_TOKENS)
        end = list(tokens[-length:])
        if len(end) == length and end[period:] == end[:-period]:
            return True
    return False


def typical_run(rounds: list[Run]) -> Run:
    """Of one prompt's rounds, an odd number of them, the one with the median time a token."""
    assert len(rounds) % 2, f"{len(rounds)} rounds have no middle one"
    return sorted(rounds, key=lambda run: run.seconds_per_token)[len(rounds) // 2]


def merged_trace(runs: Sequence[Run]) -> Trace:
    """One trace over all runs that tell their steps, so that tau and its kin weigh every step alike."""
    merged = Trace()
    for run in runs:
        for name in ("steps", *TIME_FIELDS):
            getattr(merged, name).extend(getattr(run.trace, name, ()))
    return merged


def tokens_per_second(runs: Sequence[Run]) -> float | None:
    """Decoded tokens over decoding seconds, both in total; None where nothing had to be decoded."""
    seconds = sum(run.decode_seconds for run in runs)
    tokens = sum(run.decoded_tokens for run in runs)
    return tokens / seconds if tokens and seconds > 0 else None


@dataclass(frozen=True)
class Speedup:
    """Over the baseline, from the same prompts: ratio of totals, and the median prompt's, with 95% intervals."""

    speedup: float | None
    speedup_ci: tuple[float, float] | None
    speedup_median: float | None
    speedup_median_ci: tuple[float, float] | None


Pair = tuple[Run, Run]  # of one prompt in one round: a method's run, and the baseline's


def typical_pair(rounds: list[Run], baseline: list[Run]) -> Pair | None:
    """Of one prompt's rounds, the one with the median speedup: what slows one round down slows both of its runs.

    The rounds are an odd number; None where either method had nothing to decode.
    """
    assert [(run.prompt, run.round) for run in rounds] == [(run.prompt, run.round) for run in baseline]
    pairs = [(a, b) for a, b in zip(rounds, baseline, strict=True) if a.decoded_tokens and b.decoded_tokens]
    if not pairs:
        return None
    return sorted(pairs, key=lambda pair: pair[1].seconds_per_token / pair[0].seconds_per_token)[len(pairs) // 2]


def paired_speedup(rounds: Sequence[list[Run]], baseline: Sequence[list[Run]], seed: int = 0) -> Speedup:
    """Speedup over ``baseline``; both hold the rounds of each prompt, in the same order.

    Of every prompt its ``typical_pair`` counts. The interval is the paired bootstrap's: prompts are drawn with
    replacement, and with each its runs of both methods. Prompts where either had nothing to decode are left out. No
    interval below two prompts.
    """
    found = (typical_pair(runs, plain) for runs, plain in zip(rounds, baseline, strict=True))
    pairs = [pair for pair in found if pair is not None]
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
    """tau over all steps with its 95% interval, as the mean of the prompts' own, and over all steps without the prompts
    of ``looping`` (indices of these runs' loops), CTAR(1..), n-alpha and joint acceptance by depth.

    All None for stock generate, which tells no steps.
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
    """The bootstrap's, which draws prompts with replacement; None below two of them with steps."""
    traces = [run.trace for run in runs if run.trace is not None and run.trace.steps]
    if len(traces) < 2:
        return None
    committed = np.array([sum(step.committed for step in trace.steps) for trace in traces])
    forwards = np.array([sum(step.forwards for step in trace.steps) for trace in traces])
    drawn = np.random.default_rng(seed).integers(len(traces), size=(BOOTSTRAP_SAMPLES, len(traces)))
    return _interval(committed[drawn].sum(1) / forwards[drawn].sum(1))


def expected(runs: Sequence[Run]) -> dict[str, Any]:
    """tau and speedup as a drafter that shapes its drafts by itself promised them, and its latest choice.

    Nothing of drafters that promise nothing.
    """
    made = [run.promised for run in runs if run.promised is not None]
    steps, tokens, plain = (sum(float(one[place]) for one in made) for place in range(3))
    if not steps or not plain:
        return {}
    return {"expected": {"tau": tokens / steps, "speedup": tokens / plain, "choice": made[-1].choice}}


def times(runs: Sequence[Run]) -> dict[str, Any]:
    """Speeds, milliseconds of a step's parts and of a prefill, and the share of decoding outside forward passes.

    What steps would tell is None for stock generate.
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
    """Of a step, outside forward passes."""
    if trace.overhead is None or not trace.draft_seconds:
        return None
    return 1e3 * trace.overhead * trace.decode_seconds / len(trace.draft_seconds)


FEWEST_STEPS = 20  # of a line of ``by_context``


def by_context(runs: Sequence[Run], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """tau by the tokens that stood before a step, in bins from one power of two to the next, of enough steps each.

    Args:
        runs: of one prompt each. lengths: of all prompts, in tokens.
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


def joules_per_token(runs: Sequence[Run]) -> dict[str, float | None]:
    """Energy of whole calls, prefill included, over all their new tokens, both in total; None where one is unknown.

    A single call may be shorter than the counter's resolution: so give the runs of all prompts and rounds.
    """
    tokens = sum(len(run.tokens) for run in runs)
    device = [run.energy_joules for run in runs if run.energy_joules is not None]
    host = [run.host_energy_joules for run in runs if run.host_energy_joules is not None]
    return {
        "joules_per_token": sum(device) / tokens if len(device) == len(runs) else None,
        "host_joules_per_token": sum(host) / tokens if len(host) == len(runs) else None,
    }


def _mean(values: Sequence[float], scale: float = 1.0) -> float | None:
    return scale * sum(values) / len(values) if values else None
