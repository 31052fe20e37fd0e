"""Decode the same prompts with every method, alternating, and keep each method's tokens, steps and times.

Prefill, and the first token which it gives, never counts as decoding.
"""

import contextlib
import functools
import itertools
import random
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafters import Drafter, TargetModel, generate
from drafters.base import Expected
from drafters.cli.program import Failure
from drafters.common.energy import EnergyMeter, Reading
from drafters.common.threads import fit_threads
from drafters.loop.generate import Trace
from drafters.loop.sampling import Sampling
from drafters.policy import costs
from eval.prompts.prompts import Prompt

ROOT = Path(__file__).resolve().parents[2]


class MeasurementError(Failure):
    """A method failed on a prompt; no figure replaces the missing one."""


@dataclass(frozen=True)
class Limits:
    """How every method decodes: at most ``max_new_tokens`` per prompt, up to the first token in ``eos``."""

    max_new_tokens: int
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """The output of a method for one prompt, or for a batch of prompts.

    Attributes:
        tokens: new tokens of all prompts, in order.
        prefill_seconds: seconds to the first new tokens. decode_seconds: seconds from there to the end.
        trace: None for stock generate, which reports no steps.
        first_tokens: tokens that the prefill gave: one per prompt, but assisted generation drafts before its first
            forward and may give several.
        expected: expected figures of these steps, of a drafter that chooses options itself.
        failure: why there is no output; the row then has no figures.
        lengths: number of new tokens of each prompt of a batch; empty for one prompt.
    """

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    trace: Trace | None = None
    first_tokens: int = 1
    expected: Expected | None = None
    failure: str | None = None
    lengths: tuple[int, ...] = ()

    @property
    def batch(self) -> int:
        """The number of prompts that were decoded together."""
        return len(self.lengths) or 1

    def rows(self) -> list[list[int]]:
        """The new tokens of each prompt."""
        ends = itertools.accumulate(self.lengths or (len(self.tokens),), initial=0)
        return [self.tokens[start:end] for start, end in itertools.pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class Run(Outcome):
    """One prompt, or one batch of prompts, decoded once by one method.

    Attributes:
        prompt: its index; of a batch, the index of its first prompt, the others follow.
        energy_joules: energy of the whole call; None if not available.
    """

    method: str
    temperature: float
    round: int
    prompt: int
    wall_seconds: float
    energy_joules: float | None = None

    @property
    def decoded_tokens(self) -> int:
        """Tokens after those that the prefill gave."""
        return len(self.tokens) - self.first_tokens

    @property
    def seconds_per_token(self) -> float:
        """Seconds per decoded token, without prefill."""
        return self.decode_seconds / max(self.decoded_tokens, 1)

    def outputs(self) -> list["Run"]:
        """Return each prompt's own tokens and steps; of a batch without times and joules, which belong to all."""
        if not self.lengths:
            return [self]
        shared: dict[str, Any] = dict.fromkeys(("prefill_seconds", "decode_seconds", "wall_seconds"), 0.0)
        bare = replace(self, **shared, energy_joules=None, first_tokens=1, lengths=())
        outputs = []
        for row, tokens in enumerate(self.rows()):
            trace = Trace([step for step in self.trace.steps if step.row == row]) if self.trace else None
            outputs.append(replace(bare, prompt=self.prompt + row, tokens=tokens, trace=trace))
        return outputs


# Arguments: ids of one prompt or of a batch of prompts, a seed, and the largest number of new tokens of each.
Method = Callable[[list[list[int]], int, int], Outcome]


def measure(
    build: Callable[[float, int], Mapping[str, Method]],
    prompts: list[Prompt],
    warmup: list[Prompt],
    temperatures: list[float],
    rounds: int,
    limits: Limits,
    meter: EnergyMeter | None = None,
    done: Sequence[Run] = (),
    remembering: Collection[str] = (),
    batches: Sequence[int] = (1,),
    numbers: Sequence[int] | None = None,
    needed: Callable[[str], bool] = lambda method: True,
) -> Iterator[Run]:
    """Run every method on every prompt, ``rounds`` times at each temperature; yield each run when it is done.

    Args:
        build: the methods of a temperature and a batch size, by label. Called for every round after the previous
            methods are freed, so that a method that remembers prompts starts without them.
        warmup: prompts that every method of a round decodes first, unmeasured; repeated to fill the last batch.
        meter: energy meter, or None.
        done: runs of an earlier start, complete prompts from the first on; not measured again.
        remembering: methods that remember earlier prompts. In a resumed round they decode the earlier prompts again,
            unmeasured, so that they have the same memory as in an uninterrupted round.
        batches: batch sizes; every round goes through all. Each must divide the number of prompts.
        numbers: indices of the prompts, if they are a share of more (default: 0, 1, 2, ...).
        needed: whether the report needs a method. Any other method that fails is not run again, and the rest continue.

    Raises:
        MeasurementError: a needed method failed; names the method and the prompt.
    """
    placed = range(len(prompts)) if numbers is None else numbers
    failed = {(run.temperature, run.batch, run.method): run.failure for run in done if run.failure is not None}
    for temperature, number, batch in itertools.product(temperatures, range(rounds), batches):
        place = temperature, number, batch
        before = len({run.prompt for run in done if (run.temperature, run.round, run.batch) == place})
        if before * batch == len(prompts):
            continue
        methods = build(temperature, batch)
        run = functools.partial(_run, methods, limits, temperature, number, meter, failed, needed)
        # Warm up: kernels are chosen, memory pools grow.
        for index, some in enumerate(in_batches(warmup, batch)):
            for method in methods:
                run(method, some, -1 - index)
        # Restore the memory of methods in a resumed round.
        together = in_batches(prompts, batch)
        for index, some in enumerate(together[:before]):
            for method in methods:
                if method in remembering:
                    run(method, some, placed[index * batch])
        # Measure: every method on each prompt, in a changing order.
        for index, some in enumerate(together[before:], start=before):
            for method in method_order(list(methods), index, limits.seed + number):
                yield run(method, some, placed[index * batch])
        del methods, run  # free this round's drafters before the next ones are built


def in_batches(prompts: list[Prompt], batch: int) -> list[list[Prompt]]:
    """Return the prompts in batches; the first ones fill the last batch."""
    count = -(-len(prompts) // batch)
    filled = list(itertools.islice(itertools.cycle(prompts), count * batch))
    return [filled[start : start + batch] for start in range(0, len(filled), batch)]


def _run(
    methods: Mapping[str, Method],
    limits: Limits,
    temperature: float,
    number: int,
    meter: EnergyMeter | None,
    failed: dict[tuple[float, int, str], str],
    needed: Callable[[str], bool],
    method: str,
    prompts: list[Prompt],
    index: int,
) -> Run:
    key = temperature, len(prompts), method
    place: dict[str, Any] = {"method": method, "temperature": temperature, "round": number, "prompt": index}
    lengths = (0,) * len(prompts) if len(prompts) > 1 else ()
    if key in failed:
        return Run([], 0.0, 0.0, failure=failed[key], lengths=lengths, wall_seconds=0.0, **place)
    fit_threads()
    most = min(prompt.max_new_tokens or limits.max_new_tokens for prompt in prompts)
    try:
        with meter.measure() if meter else contextlib.nullcontext(Reading()) as joules:
            start = time.perf_counter()
            # The seed depends on the prompt only: all methods draw the same numbers, and rounds repeat each other.
            outcome = methods[method]([prompt.ids for prompt in prompts], limits.seed + index, most)
            wall = time.perf_counter() - start
        if outcome.failure is None:
            check_tokens(outcome, replace(limits, max_new_tokens=most))
    except Exception as error:
        listed = ", ".join(f"{prompt.id!r} ({len(prompt.ids)} tokens)" for prompt in prompts)
        reason = f"{type(error).__name__}: {error}"
        if needed(method):
            raise MeasurementError(
                f"{method} failed at temperature {temperature:g} on prompt {listed}: {reason}"
            ) from error
        failed[key] = f"{'in the warm-up, ' if index < 0 else ''}{reason}{_where(error)}"
        return Run([], 0.0, 0.0, failure=failed[key], lengths=lengths, wall_seconds=0.0, **place)
    return Run(**vars(outcome), **place, energy_joules=joules.device, wall_seconds=wall)


def _where(error: BaseException) -> str:
    """Return the innermost line of this project in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
    return f" ({Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno})" if ours else ""


def method_order(methods: list[str], index: int, seed: int) -> list[str]:
    """Return the order of methods on prompt ``index``: shuffled every ``len(methods)`` prompts, rotated in between.

    Within such a block every method has every place once, so that none is always first, when caches are cold; between
    blocks the neighbours change.
    """
    block, shift = divmod(index, len(methods))
    order = random.Random(f"{seed}/{block}").sample(methods, len(methods))
    return order[shift:] + order[:shift]


def drafter_method(
    target: TargetModel, drafter: Drafter, temperature: float, limits: Limits, longest: int = 0
) -> Method:
    """Return the method that decodes in our loop; a batch until its last prompt has ended.

    Args:
        longest: tokens of the longest prompt; costs are measured for this length before the first prompt.
    """
    sampled: dict[str, Any] = {"top_k": limits.top_k, "top_p": limits.top_p} if temperature > 0 else {}

    def decode(prompts: list[list[int]], seed: int, most: int = limits.max_new_tokens) -> Outcome:
        text = max(longest, *map(len, prompts)) + limits.max_new_tokens
        costs.prepare(drafter, len(prompts), Sampling(temperature, **sampled), text)  # outside of any prompt's time
        before = expected_of(drafter)
        settings = sampled | {"max_new_tokens": most, "temperature": temperature, "eos_token_id": sorted(limits.eos)}
        result = generate(target, drafter, prompts, seed=seed, **settings)
        rows = zip(result.tokens.tolist(), result.lengths, strict=True)
        tokens, lengths = joined([row[:length] for row, length in rows])
        trace, decoded = result.trace, len(tokens) - len(prompts)
        if trace.decoded_tokens != decoded:
            raise ValueError(f"the trace counts {trace.decoded_tokens} tokens, the output has {decoded}")
        seconds = trace.prefill_seconds, trace.decode_seconds
        return Outcome(tokens, *seconds, trace, len(prompts), expected_of(drafter, before), lengths=lengths)

    return decode


def expected_of(drafter: Drafter, before: Expected | None = None) -> Expected | None:
    """Return what a drafter that chooses options itself (``auto``) has expected, so far or since ``before``."""
    expected = drafter.policy.expected() if drafter.policy else None
    if expected is None or before is None:
        return expected
    steps, tokens, plain = (now - then for now, then in zip(expected[:3], before[:3], strict=True))
    return Expected(steps, tokens, plain, expected.choice)


def joined(rows: list[list[int]]) -> tuple[list[int], tuple[int, ...]]:
    """Return the ``tokens`` and ``lengths`` of an outcome."""
    return list(itertools.chain(*rows)), tuple(map(len, rows)) if len(rows) > 1 else ()


def check_tokens(outcome: Outcome, limits: Limits) -> None:
    """Raise ValueError if an output breaks the rules of counting, which are the same for all methods."""
    for tokens in outcome.rows():
        if not 1 <= len(tokens) <= limits.max_new_tokens:
            raise ValueError(f"{len(tokens)} new tokens, expected 1 to {limits.max_new_tokens}")
        if any(token in limits.eos for token in tokens[:-1]):
            raise ValueError(f"tokens after EOS are counted: {tokens}")
    if not outcome.batch <= outcome.first_tokens <= len(outcome.tokens):
        raise ValueError(f"the prefill cannot have given {outcome.first_tokens} of {len(outcome.tokens)} tokens")
