"""Step costs: seconds of drafting, and of the rest of a step, measured by running the decoding loop itself.

Whether a further draft token is profitable depends on the target, its dtype, the engine and the machine. So a policy
measures once per machine, before the first prompt, and caches the result as JSON in ``DRAFTERS_CACHE`` (by default the
user's cache folder). ``DRAFTERS_MEASURE_AGAIN=1`` ignores what is cached.
"""

import hashlib
import json
import logging
import os
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drafters.common.files import replace_json
from drafters.common.machine import hardware
from drafters.common.paths import user_cache
from drafters.common.wording import dtype_name
from drafters.loop.generate import start, step
from drafters.loop.sampling import Sampling
from drafters.loop.state import DecodeState
from drafters.model import backend
from drafters.model.target import TargetModel

if TYPE_CHECKING:
    from drafters.base import Drafter

CACHE, AGAIN = "DRAFTERS_CACHE", "DRAFTERS_MEASURE_AGAIN"  # environment: the folder; "1" measures again
ROUNDS, SECONDS = 20, 4.0  # measuring stops after these rounds, or after the round that exceeds these seconds
IN_A_ROW = 2  # equal steps in a row; only the last is timed, because a large forward slows the step after it
CONTEXTS = (512, 4096, 32768)  # upper limits of context lengths, in tokens, with costs of their own

_known: dict[str, Any] = {}  # what this process has measured or read, by key


class Curve(NamedTuple):
    """Seconds by number of tokens: linear between measured points, and beyond the last along the last two.

    Attributes:
        rows: numbers of tokens, ascending. seconds: time of a step with this number of tokens, never falling.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: float) -> float:
        """Seconds of a step with ``rows`` tokens."""
        if len(self.rows) == 1:
            return self.seconds[0]
        place = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (x0, x1), (y0, y1) = self.rows[place - 1 : place + 1], self.seconds[place - 1 : place + 1]
        return y0 + (rows - x0) * (y1 - y0) / (x1 - x0)

    @classmethod
    def of(cls, measured: Mapping[int, float]) -> "Curve":
        """The curve through measured points, without noise that makes it fall."""
        rows = sorted(measured)
        return cls(tuple(rows), tuple(accumulate((measured[count] for count in rows), max)))


class PlanTime(NamedTuple):
    """Seconds of a step with one plan: of ``draft``, and of the ``rest`` (forward, verification, commit, observe)."""

    draft: float
    rest: float


def step_times(
    drafter: "Drafter",
    plans: Sequence[Any],
    use: Callable[[Any], None],
    batch: int,
    sampling: Sampling,
    limit: int,
    longest: int,
    key: Mapping[str, Any],
) -> list[PlanTime]:
    """Seconds of a step with each plan on this machine, from the cache or measured now (``time_plans``).

    Args:
        limit: largest context length that the times hold for. longest: tokens of the longest text that is expected.
        key: further things that the time depends on; the target and the machine are added.

    Raises:
        ValueError: the memory does not suffice, even behind a short context.
    """
    context = max(min(limit // 2, longest, drafter.max_context - 8 * (drafter.max_draft + 2)), 1)
    way = {"greedy": sampling.greedy, "top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1}

    def measure() -> list[PlanTime]:
        length = context
        while True:
            try:
                return time_plans(drafter, plans, use, batch, sampling, length)
            except (ValueError, torch.OutOfMemoryError):  # measure behind a shorter context
                if length < 64:
                    raise
                length //= 4

    times = cached(drafter.target, {**key, "plans": plans, "batch": batch, "context": context, **way}, measure)
    return [PlanTime(*time) for time in times]


@torch.inference_mode()
def time_plans(
    drafter: "Drafter", plans: Sequence[Any], use: Callable[[Any], None], batch: int, sampling: Sampling, context: int
) -> list[PlanTime]:
    """Median seconds of real decoding steps behind a random prompt, for each plan in turn.

    Args:
        plans: shapes of drafts. use: sets the plan of the drafter's next step.
        context: tokens of the prompt.
    """
    target = drafter.target
    numbers = random.Random(0)
    prompts = [[numbers.randrange(target.vocab_size) for _ in range(context)] for _ in range(batch)]
    margin = drafter.max_draft + 1  # cache slots that one step may need
    room = max(min(4 * margin, target.max_context - context - margin), 2)
    generator = torch.Generator(device=target.device).manual_seed(0)
    rule, state = drafter.rule(sampling), None
    all_times: list[list[PlanTime]] = [[] for _ in plans]
    began = time.perf_counter()
    for done in range(ROUNDS):
        if done > 1 and time.perf_counter() - began > SECONDS:
            break
        for plan, times in zip(plans, all_times, strict=True):
            use(plan)
            for _ in range(IN_A_ROW):
                if state is None or state.room() <= margin or all(state.finished):
                    rows = [list(prompt) for prompt in prompts]
                    capacity = context + room + margin
                    state = DecodeState(target, rows, capacity, room, sampling, generator, frozenset())
                    start(state, drafter)
                marks = [_now(target.device)]
                step(state, drafter, rule, lambda marks=marks: marks.append(_now(target.device)))  # type: ignore[misc]
            times.append(PlanTime(marks[1] - marks[0], marks[3] - marks[1]))
    # The first round warms up: kernels are chosen, graphs captured.
    return [PlanTime(*(median(part) for part in zip(*times[1:], strict=True))) for times in all_times]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def prepare(drafter: "Drafter", batch: int, sampling: Sampling, longest: int) -> None:
    """Let the policies of a drafter and of its inner drafters measure what they need. Takes seconds, once per machine.

    Args:
        longest: tokens of the longest text, prompt and answer.
    """
    if drafter.policy is not None:
        drafter.policy.prepare(drafter, batch, sampling, longest)
    for part in drafter.parts:
        prepare(part, batch, sampling, longest)


class MeasuredCosts:
    """What policies share that time some plans of their drafter before the first prompt.

    A policy defines ``_plans``, the shapes to time, and ``_costs_of``, what it keeps of their times.
    """

    def __init__(self) -> None:
        self._costs: dict[tuple[int, Sampling, int], Any] = {}  # by batch size, sampling and limit of the context
        self._forced: Any = None  # the plan of the next step, while costs are measured

    def prepare(self, drafter: "Drafter", batch: int, sampling: Sampling, longest: int) -> None:
        """Measure the costs of sequences of up to ``longest`` tokens, unless they are known."""
        if self._forced is not None:
            return
        for limit in context_limits(drafter.target, longest):
            if (batch, sampling, limit) not in self._costs:
                self._costs[batch, sampling, limit] = self._measured(drafter, batch, sampling, limit, longest)

    def _measured(self, drafter: "Drafter", batch: int, sampling: Sampling, limit: int, longest: int) -> Any:
        model = getattr(drafter, "draft_model", None)
        key = {"method": drafter.name, "draft_model": None if model is None else model.fingerprint()}
        key |= {"options": drafter.settings.model_dump(exclude={"draft_model"})}
        plans, use = self._plans(), partial(setattr, self, "_forced")
        try:
            return self._costs_of(plans, step_times(drafter, plans, use, batch, sampling, limit, longest, key))
        finally:
            self._forced = None

    def _plans(self) -> Sequence[Any]:
        raise NotImplementedError

    def _costs_of(self, plans: Sequence[Any], times: Sequence[PlanTime]) -> Any:
        raise NotImplementedError


def context_limit(target: TargetModel, length: int) -> int:
    """The upper limit of the context lengths whose costs hold for ``length`` tokens."""
    return min(next((limit for limit in CONTEXTS if length <= limit), CONTEXTS[-1]), target.max_context)


def context_limits(target: TargetModel, longest: int) -> list[int]:
    """All such limits that a text of ``longest`` tokens passes, ascending."""
    last = context_limit(target, longest)
    return sorted({min(limit, last) for limit in CONTEXTS})


def cached(target: TargetModel, key: Mapping[str, Any], measure: Callable[[], Any]) -> Any:
    """A JSON value: what ``measure`` returned on this machine before, else what it returns now.

    A file that cannot be read counts as none. A file that cannot be written is skipped.
    """
    text = json.dumps({**key, **_machine(target)}, sort_keys=True, default=str)
    if text in _known:
        return _known[text]
    override = os.environ.get(CACHE)
    folder = Path(override).expanduser() if override else user_cache()
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
    value = None
    if os.environ.get(AGAIN) != "1":
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            value = stored["measured"] if stored["key"] == text else None
        except (OSError, ValueError, LookupError, TypeError):
            value = None
    if value is None:
        value = measure()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_json(path, {"key": text, "measured": value})
        except OSError as error:
            logging.getLogger(__name__).info("step costs are not cached: %s", error)
    _known[text] = value
    return value


def _machine(target: TargetModel) -> dict[str, Any]:
    """What the time of a target's forward depends on."""
    switches = {name: value for name, value in os.environ.items() if name.startswith("DRAFTERS_")}
    return {
        "target": target.fingerprint(),
        "dtype": dtype_name(target.dtype),
        "quantize": target.quantize,
        "engine": target.engine,
        "kernels": backend.available(),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "code": _code(),
        "switches": {name: value for name, value in switches.items() if name not in (CACHE, AGAIN)},
        **hardware(target.device),
    }


@lru_cache(maxsize=1)
def _code() -> str:
    """A digest of the code that a step runs through: other kernels have other costs."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    rooms = ("cpu", "drafting", "loop", "methods", "model", "policy")
    for file in sorted(file for room in rooms for file in (package / room).glob("*.[chp]*")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
