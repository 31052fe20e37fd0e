"""Decode the same prompts with every method, alternating, and keep what each did and how long it took.

No method's prefill, nor the first token, which the prefill gives, counts as decoding.
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
from drafters.loop.sampling import Sampling
from drafters.loop.trace import Trace
from drafters.policy.costs import prepare
from eval.prompts.prompts import Prompt

ROOT = Path(__file__).resolve().parents[2]


class MeasurementError(Failure):
    """A method failed on a prompt. Nothing is reused in its place."""


@dataclass(frozen=True)
class Limits:
    """How every method decodes: at most ``max_new_tokens`` a prompt, cut at the first token of ``eos``."""

    max_new_tokens: int
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Outcome:
    """What a method made of one prompt, or of a batch of them.

    Attributes:
        tokens: new ones; of a batch, each prompt's after those of the prompt before.
        prefill_seconds: until the first new tokens came out. decode_seconds: from there to the end.
        trace: None for stock generate, which tells no steps.
        first_tokens: how many the prefill gave: one a prompt, but assisted generation drafts before its first forward
            and may give several at once.
        promised: of its steps, by a drafter that shapes its drafts by itself.
        failure: of another engine, why there is no output; the row has no figures then, and the others go on.
        lengths: of a batch, each prompt's new tokens; empty where there is one prompt.
    """

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    trace: Trace | None = None
    first_tokens: int = 1
    promised: Expected | None = None
    failure: str | None = None
    lengths: tuple[int, ...] = ()

    @property
    def batch(self) -> int:
        """Prompts that were decoded together."""
        return len(self.lengths) or 1

    def rows(self) -> list[list[int]]:
        """The new tokens of each prompt."""
        ends = itertools.accumulate(self.lengths or (len(self.tokens),), initial=0)
        return [self.tokens[start:end] for start, end in itertools.pairwise(ends)]


@dataclass(frozen=True, kw_only=True)
class Run(Outcome):
    """One prompt, or one batch of them, decoded once by one method.

    Attributes:
        prompt: its index; of a batch, that of its first prompt. The others follow it.
        energy_joules, host_energy_joules: of the whole call, the device's and, beside a GPU, the CPU's; None where they
            are not available.
    """

    method: str
    temperature: float
    round: int
    prompt: int
    wall_seconds: float
    energy_joules: float | None = None
    host_energy_joules: float | None = None

    @property
    def decoded_tokens(self) -> int:
        """Tokens after those that the prefill gave."""
        return len(self.tokens) - self.first_tokens

    @property
    def seconds_per_token(self) -> float:
        """Decoding alone."""
        return self.decode_seconds / max(self.decoded_tokens, 1)

    def outputs(self) -> list["Run"]:
        """What each prompt came to: its own tokens and steps. Of a batch's times and joules none is a prompt's own."""
        if not self.lengths:
            return [self]
        bare = replace(
            self, prefill_seconds=0.0, decode_seconds=0.0, wall_seconds=0.0, energy_joules=None,
            host_energy_joules=None, first_tokens=1, lengths=(),
        )  # fmt: skip
        found = []
        for row, tokens in enumerate(self.rows()):
            trace = Trace([step for step in self.trace.steps if step.row == row]) if self.trace else None
            found.append(replace(bare, prompt=self.prompt + row, tokens=tokens, trace=trace))
        return found


# Of the ids of one prompt or of a batch of them, a seed, and how many new tokens each may have at most.
Method = Callable[[list[list[int]], int, int], Outcome]


def measure(
    build: Callable[[float, int], Mapping[str, Method]],
    prompts: list[Prompt],
    warmup: list[Prompt],
    temperatures: list[float],
    rounds: int,
    limits: Limits,
    on_run: Callable[[str], None] = lambda method: None,
    meter: EnergyMeter | None = None,
    done: Sequence[Run] = (),
    remembering: Collection[str] = (),
    batches: Sequence[int] = (1,),
    numbers: Sequence[int] | None = None,
    needed: Callable[[str], bool] = lambda method: True,
) -> Iterator[Run]:
    """Run every method on every prompt, ``rounds`` times at each temperature; yields each run as soon as it is done.

    Args:
        build: the methods of a temperature and a batch size by label. Called for every round, when those before are
            released, so that a method that remembers has never seen the prompts it is measured on.
        warmup: decoded first by every method of a round; not measured. Those that fill the last batch come again.
        on_run: called before each run with its method's label.
        meter: of the energy; None measures none.
        done: what was measured of this before a kill, whole prompts from the first on, and is not measured again.
        remembering: methods that carry something from prompt to prompt. In a round that goes on, they decode the
            prompts before once more, unmeasured, so that each comes to its next prompt as if nothing had happened.
        batches: sizes, each of which every round goes through: so many prompts are decoded together, the next so many
            after them. Each must divide the number of prompts.
        numbers: of the prompts, where they are a share of more; None: 0, 1, 2, ...
        needed: whether nothing can be said without a method. Of another that fails, or breaks a rule of counting, that
            is the outcome from then on: it is not run any more, and the others go on.

    Raises:
        MeasurementError: a method that is needed failed; names the method and the prompt.
    """
    placed = range(len(prompts)) if numbers is None else numbers
    failed = {(run.temperature, run.batch, run.method): run.failure for run in done if run.failure is not None}
    for temperature, number, batch in itertools.product(temperatures, range(rounds), batches):
        place = temperature, number, batch
        before = len({run.prompt for run in done if (run.temperature, run.round, run.batch) == place})
        if before * batch == len(prompts):
            continue
        methods = build(temperature, batch)
        run = functools.partial(_run, methods, limits, temperature, number, on_run, meter, failed, needed)
        # Warm-up: kernels are chosen, memory pools grow.
        for index, some in enumerate(in_batches(warmup, batch)):
            for method in methods:
                run(method, some, -1 - index)
        together = in_batches(prompts, batch)
        # Of an interrupted round: what a method remembers of the prompts before.
        for index, some in enumerate(together[:before]):
            for method in methods:
                if method in remembering:
                    run(method, some, placed[index * batch])
        # The measurement: on each prompt every method, in an order that changes.
        for index, some in enumerate(together[before:], start=before):
            for method in method_order(list(methods), index, limits.seed + number):
                yield run(method, some, placed[index * batch])
        del methods, run  # the round's drafters, before the next round's are built


def in_batches(prompts: list[Prompt], batch: int) -> list[list[Prompt]]:
    """``batch`` after ``batch`` of them; the first ones again where the last batch would not be full."""
    count = -(-len(prompts) // batch)
    filled = list(itertools.islice(itertools.cycle(prompts), count * batch))
    return [filled[start : start + batch] for start in range(0, len(filled), batch)]


def _run(
    methods: Mapping[str, Method],
    limits: Limits,
    temperature: float,
    number: int,
    on_run: Callable[[str], None],
    meter: EnergyMeter | None,
    failed: dict[tuple[float, int, str], str],
    needed: Callable[[str], bool],
    method: str,
    prompts: list[Prompt],
    index: int,
) -> Run:
    key = temperature, len(prompts), method
    place: dict[str, Any] = {"method": method, "temperature": temperature, "round": number, "prompt": index}
    if key in failed:
        return _failure(failed[key], len(prompts), place)
    on_run(method)
    fit_threads()
    most = min(prompt.max_new_tokens or limits.max_new_tokens for prompt in prompts)
    try:
        with meter.measure() if meter else contextlib.nullcontext(Reading()) as joules:
            start = time.perf_counter()
            # The seed is the prompt's: every method draws from the same numbers, and rounds repeat each other.
            made = methods[method]([prompt.ids for prompt in prompts], limits.seed + index, most)
            wall = time.perf_counter() - start
        if made.failure is None:
            check_tokens(made, replace(limits, max_new_tokens=most))
    except Exception as error:
        told = ", ".join(f"{prompt.id!r} ({len(prompt.ids)} tokens)" for prompt in prompts)
        reason = f"{type(error).__name__}: {error}"
        if needed(method):
            raise MeasurementError(
                f"{method} failed at temperature {temperature:g} on prompt {told}: {reason}"
            ) from error
        failed[key] = f"{'in the warm-up, ' if index < 0 else ''}{reason}{_where(error)}"
        return _failure(failed[key], len(prompts), place)
    place |= {"energy_joules": joules.device, "host_energy_joules": joules.host}
    return Run(**vars(made), **place, wall_seconds=wall)


def _failure(reason: str, batch: int, place: dict[str, Any]) -> Run:
    """No output of a prompt, or of a batch of them."""
    return Run([], 0.0, 0.0, failure=reason, lengths=(0,) * batch if batch > 1 else (), wall_seconds=0.0, **place)


def _where(error: BaseException) -> str:
    """The line of this project that raised it, or that called what did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
    return f" ({Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno})" if own else ""


def method_order(methods: list[str], index: int, seed: int) -> list[str]:
    """The order of methods on prompt ``index``: shuffled once per ``len(methods)`` prompts and rotated in between.

    Within such a block every method stands once in every place, so that none always runs first, when the caches are
    cold; between blocks it changes who runs before whom.
    """
    block, shift = divmod(index, len(methods))
    order = random.Random(f"{seed}/{block}").sample(methods, len(methods))
    return order[shift:] + order[:shift]


def drafter_method(
    target: TargetModel, drafter: Drafter, temperature: float, limits: Limits, longest: int = 0
) -> Method:
    """Decode in the shared loop; a batch until the last of its prompts has ended.

    Args:
        longest: tokens of the longest prompt that will come, for which all is prepared before the first.
    """
    sampled = {"top_k": limits.top_k, "top_p": limits.top_p} if temperature > 0 else {}

    def decode(prompts: list[list[int]], seed: int, most: int = limits.max_new_tokens) -> Outcome:
        text = max(longest, *map(len, prompts)) + limits.max_new_tokens
        prepare(drafter, len(prompts), Sampling(temperature, **sampled), text)  # type: ignore[arg-type]
        before = drafter.policy.expected() if drafter.policy else None
        result = generate(
            target,
            drafter,
            prompts,
            max_new_tokens=most,
            temperature=temperature,
            eos_token_id=sorted(limits.eos),
            seed=seed,
            **sampled,  # type: ignore[arg-type]
        )
        rows = zip(result.tokens.tolist(), result.lengths, strict=True)
        tokens, lengths = joined([row[:length] for row, length in rows])
        trace, decoded = result.trace, len(tokens) - len(prompts)
        if trace.decoded_tokens != decoded:
            raise ValueError(f"the trace counts {trace.decoded_tokens} tokens, the output has {decoded}")
        promised = drafter.policy.expected() if drafter.policy else None
        if promised is not None and before is not None:  # only this prompt's steps
            steps, made, plain = (now - then for now, then in zip(promised[:3], before[:3], strict=True))
            promised = Expected(steps, made, plain, promised.choice)
        seconds = trace.prefill_seconds, trace.decode_seconds
        return Outcome(tokens, *seconds, trace, len(prompts), promised=promised, lengths=lengths)

    return decode


def joined(rows: list[list[int]]) -> tuple[list[int], tuple[int, ...]]:
    """The ``tokens`` and ``lengths`` of an outcome."""
    return list(itertools.chain(*rows)), tuple(map(len, rows)) if len(rows) > 1 else ()


def check_tokens(made: Outcome, limits: Limits) -> None:
    """Every method is counted alike, whatever its own code believes; raises ValueError where its output breaks that."""
    for tokens in made.rows():
        if not 1 <= len(tokens) <= limits.max_new_tokens:
            raise ValueError(f"{len(tokens)} new tokens where there must be 1 to {limits.max_new_tokens}")
        if any(token in limits.eos for token in tokens[:-1]):
            raise ValueError(f"tokens after EOS are counted: {tokens}")
    if not made.batch <= made.first_tokens <= len(made.tokens):
        raise ValueError(f"the prefill cannot have given {made.first_tokens} of {len(made.tokens)} tokens")
