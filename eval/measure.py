"""Decode the same prompts with every method, alternating, and keep what each did and how long it took.

Of stock ``generate`` a streamer notes when the first token comes out, so that its prefill is taken apart just as the
loop takes its own: neither side's prefill, nor the first token, which the prefill gives, counts as decoding.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from drafters import Drafter, TargetModel, generate
from drafters.decoding.trace import Trace
from eval.energy import Meter, Reading
from eval.prompts import Prompt

STOCK = "stock generate"


class MeasurementError(RuntimeError):
    """A method failed on a prompt. Nothing is reused in its place: the run ends."""


@dataclass(frozen=True)
class Limits:
    """How every method decodes: at most ``max_new_tokens``, cut at the first token of ``eos``; batch 1."""

    max_new_tokens: int
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Run:
    """One prompt decoded once by one method.

    ``prompt`` is its index; ``trace`` is None for stock generate; the joules are the whole call's, of the device and,
    beside a GPU, of the host, and None where they are not available.
    """

    method: str
    temperature: float
    round: int
    prompt: int
    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    wall_seconds: float
    trace: Trace | None
    energy_joules: float | None = None
    host_energy_joules: float | None = None

    @property
    def decoded_tokens(self) -> int:
        """Tokens after the first, which the prefill gives."""
        return len(self.tokens) - 1

    @property
    def seconds_per_token(self) -> float:
        """Decoding alone."""
        return self.decode_seconds / max(self.decoded_tokens, 1)


# (prompt ids, seed) -> tokens, prefill seconds, decode seconds, trace
Outcome = tuple[list[int], float, float, Trace | None]
Method = Callable[[list[int], int], Outcome]


def measure(
    build: Callable[[float], Mapping[str, Method]],
    prompts: list[Prompt],
    warmup: list[Prompt],
    temperatures: list[float],
    rounds: int,
    limits: Limits,
    keep: Callable[[Run], None] = lambda run: None,
    on_run: Callable[[str], None] = lambda method: None,
    meter: Meter | None = None,
) -> list[Run]:
    """Run every method on every prompt, ``rounds`` times at each temperature.

    Args:
        build: the methods of a temperature by label. Called anew for every round, so that a method that remembers
            (a pool that outlives a prompt) has never seen the prompts it is measured on; the round's before are
            released first.
        warmup: decoded first by every method of a round; not measured.
        keep: gets each run as soon as it is done.
        on_run: called before each run with its method's label.
        meter: of the energy; None measures none.

    Raises:
        MeasurementError: a method failed, or broke a rule of counting; names the method and the prompt.
    """
    runs = []
    for temperature in temperatures:
        for round_ in range(rounds):
            one_round = _Round(build(temperature), limits, temperature, round_, on_run, meter)
            for run in one_round.runs(prompts, warmup):
                runs.append(run)
                keep(run)
            del one_round  # its drafters, before the next round's are built
    return runs


@dataclass(frozen=True)
class _Round:
    methods: Mapping[str, Method]
    limits: Limits
    temperature: float
    number: int
    on_run: Callable[[str], None]
    meter: Meter | None

    def runs(self, prompts: list[Prompt], warmup: list[Prompt]) -> Iterator[Run]:
        for number, prompt in enumerate(warmup):
            for method in self.methods:
                self._run(method, prompt, -1 - number)
        for index, prompt in enumerate(prompts):
            for method in method_order(list(self.methods), index, self.limits.seed + self.number):
                yield self._run(method, prompt, index)

    def _run(self, method: str, prompt: Prompt, index: int) -> Run:
        self.on_run(method)
        try:
            with self.meter.measure() if self.meter else contextlib.nullcontext(Reading()) as joules:
                start = time.perf_counter()
                # The seed is the prompt's: every method draws from the same numbers, and rounds repeat each other.
                tokens, prefill, decode, trace = self.methods[method](prompt.ids, self.limits.seed + index)
                wall = time.perf_counter() - start
            _check_tokens(tokens, self.limits)
        except Exception as error:
            raise MeasurementError(
                f"{method} failed at temperature {self.temperature:g} on prompt {prompt.id!r} ({len(prompt.ids)} "
                f"tokens): {type(error).__name__}: {error}"
            ) from error
        return Run(
            method,
            self.temperature,
            self.number,
            index,
            tokens,
            prefill,
            decode,
            wall,
            trace,
            joules.device,
            joules.host,
        )


def method_order(methods: list[str], index: int, seed: int) -> list[str]:
    """The order of methods on prompt ``index``: shuffled once per ``len(methods)`` prompts and rotated in between.

    Within such a block every method stands once in every place, so that none always runs first, when the caches are
    cold; between blocks it changes who runs before whom.
    """
    block, shift = divmod(index, len(methods))
    order = random.Random(f"{seed}/{block}").sample(methods, len(methods))
    return order[shift:] + order[:shift]


def drafter_method(target: TargetModel, drafter: Drafter, temperature: float, limits: Limits) -> Method:
    """Decode in the shared loop."""
    sampled = {"top_k": limits.top_k, "top_p": limits.top_p} if temperature > 0 else {}

    def decode(ids: list[int], seed: int) -> Outcome:
        result = generate(
            target,
            drafter,
            [ids],
            max_new_tokens=limits.max_new_tokens,
            temperature=temperature,
            eos_token_id=sorted(limits.eos),
            seed=seed,
            **sampled,  # type: ignore[arg-type]
        )
        tokens = result.tokens[0, : result.lengths[0]].tolist()
        trace = result.trace
        if trace.decoded_tokens != len(tokens) - 1:
            raise ValueError(f"the trace counts {trace.decoded_tokens} tokens, the output has {len(tokens) - 1}")
        return tokens, trace.prefill_seconds, trace.decode_seconds, trace

    return decode


def stock_method(target: TargetModel, temperature: float, limits: Limits) -> Method:
    """Decode with transformers' own ``generate``: greedily, or sampling with the same temperature, top-k and top-p.

    Its settings are the limits' and no others. A model's own generation config may hold more, a repetition penalty
    say, which changes the output and costs time; the loop does nothing of the kind. Sampled tokens come from PyTorch's
    global generator, so they are others than the loop's, from the same distribution.
    """
    warped = {"temperature": temperature, "top_k": limits.top_k, "top_p": limits.top_p} if temperature > 0 else {}
    settings = GenerationConfig(
        max_new_tokens=limits.max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=sorted(limits.eos) or None,
        pad_token_id=min(limits.eos, default=0),
        **warped,
    )

    def decode(ids: list[int], seed: int) -> Outcome:
        input_ids = torch.tensor([ids], device=target.device)
        streamer = _Timestamps()
        torch.manual_seed(seed)
        with _only(target.model, settings):
            start = time.perf_counter()
            output = target.model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=settings,
                streamer=streamer,
            )
            tokens = output[0, len(ids) :].tolist()  # waits for the device
            end = time.perf_counter()
        return tokens, streamer.first_token - start, end - streamer.first_token, None

    return decode


@contextlib.contextmanager
def _only(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """``generate`` fills what a given config leaves open from the model's own: put the given one in its place."""
    own, model.generation_config = model.generation_config, settings
    try:
        yield
    finally:
        model.generation_config = own


class _Timestamps:
    """A streamer that keeps the time of the first new token.

    ``generate`` hands it the prompt, then each token, on the host.
    """

    def __init__(self) -> None:
        self._calls = 0
        self.first_token = 0.0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 2:
            self.first_token = time.perf_counter()

    def end(self) -> None:
        pass


def _check_tokens(tokens: list[int], limits: Limits) -> None:
    """Every method is counted alike, whatever its own code believes."""
    if not 1 <= len(tokens) <= limits.max_new_tokens:
        raise ValueError(f"{len(tokens)} new tokens where there must be 1 to {limits.max_new_tokens}")
    if any(token in limits.eos for token in tokens[:-1]):
        raise ValueError(f"tokens after EOS are counted: {tokens}")
