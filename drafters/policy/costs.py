"""What a step costs on this machine by its rows: measured, and kept on disk; the ground on which drafts are shaped.

Where a step is bound by memory, a row more is nearly free; where it is bound by arithmetic, it is not. No rule of thumb
knows which: it depends on the target, its dtype, the engine, the threads and the machine. And on the context: over a
long one each row's attention takes its time, in proportion. What is timed is the loop's own step, verdict and cache
included, of a draft that is there already: where a forward is short, the host's share decides whether a draft pays.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from drafters.common.provenance import hardware
from drafters.common.wording import dtype_name
from drafters.loop.acceptance import Verdict, rule_for
from drafters.loop.generate import DecodeState, step
from drafters.loop.sampling import Sampling
from drafters.loop.tree import ROOT, DraftTree
from drafters.model import backend
from drafters.model.cache import KVCache
from drafters.model.target import TargetModel
from drafters.policy.kept_costs import Costs, Curve, kept

VERIFIED = (2, 4, 8, 12, 16, 32, 64)  # rows of a verification that are measured; of a batch together at most...
CHAINED, DRAFTED = (4, 8, 16), (1, 2, 4, 8, 16)  # and of one of a chain (two are either), and of a draft pass
MOST_ROWS = 128
CONTEXT, LONGER = 256, 64  # rows that the measured ones attend to, at first, and how many more in the end
LONG = 512  # tokens; longer contexts go by the line through a second one...
FAR = 4096  # ...in a cache of so many rows, of all prompts
SPARE = LONGER + VERIFIED[-1] + 64  # of these, what measuring needs, and what captured forwards leave free
SECONDS, ROUNDS = 10.0, 9  # rounds are measured until either is over...
# ...but for so long at least, and a step without a draft, alone, for so long. Of steps of half a millisecond on a
# shared machine nine rounds said 1.65 to 2.24 steps for what forty said 1.89 to 2.05; what four rows cost, in steps
# without a draft, was 9% more or less every second and a half.
LEAST, GLANCE = 6.0, 0.2
# Forwards of more rows together (but not of twice a step's without a draft) take turns apart from the others, for half
# as long: a core that has just done much arithmetic is slow for some hundredths of a second. Behind 8 forwards of 16
# rows, a step of 0.7 ms took 60% longer, one of 4.6 ms 8%, and one of 8.7 ms no longer.
HEAVY = 4

LEAD, AHEAD, ALIKE = 0.008, 32, 2  # of a turn: seconds that are not timed, in so many runs at most, and runs that are

SELDOM = 8  # steps without a draft before one that is seldom asked for

LIKELY = 1e4  # a logit
SIBLINGS = 3  # in a measured tree: so many are tried in vain
LATE = 48  # tokens without a draft, before one that is measured: fewer than the rows that there is room for
RIGHT = 3  # tokens of a chain that is measured as if all were accepted

Run = Callable[[], object]
Make = Callable[[int], Run]
Drafting = Callable[[int], tuple[Make, Make | None]]
Parts = dict[Any, tuple[Run, Run]]


class CostsByLength:
    """Costs at the present length: those of a length near it, so that they change every now and then alone.

    Args:
        ask: for the costs behind so many tokens; once for each length.
    """

    def __init__(self, ask: Callable[[int], Costs]) -> None:
        self._ask, self._found = ask, dict[int, Costs]()

    def at(self, tokens: int) -> Costs:
        """The costs where so many tokens are committed."""
        step = max(tokens.bit_length() - 3, 0)  # an eighth to a quarter of them
        near = 0 if tokens <= LONG else (tokens >> step << step) + (1 << step >> 1)
        if near not in self._found:
            self._found[near] = self._ask(near)
        return self._found[near]


def step_costs(
    target: TargetModel,
    name: Mapping[str, Any],
    batch: int,
    sampling: Sampling,
    context: int,
    drafting: Drafting | None = None,
    drawn: bool = False,
    seldom: bool = False,
) -> Costs:
    """What steps behind ``context`` tokens cost here and now, or cost when it was measured.

    Args:
        name: what, beside the target, the machine and the way of sampling, the time depends on.
        drafting: behind a number of tokens: drafts one token after a number of steps without a draft; and makes a draft
            pass over a number of rows (None: there are none); both to be run. None: drafting takes no time worth
            mentioning.
        drawn: where tokens are sampled, drafts are, too, and are tried by the q that they were drawn from.
        seldom: a draft's first token is timed as one that is seldom asked for: where a step takes half a millisecond,
            that takes half as long again, and the forward behind it a tenth more.
    """
    near, size = _within(target, CONTEXT), max(FAR // batch, 2 * LONG)
    measured = partial(_costs_behind, target, name, batch, sampling, drafting=drafting, drawn=drawn, seldom=seldom)
    costs = measured(near)
    while context > LONG and (far := _within(target, size - SPARE)) > LONG:
        try:
            other = measured(far)
            return costs.towards(other, (context - near) / (far - near))
        except ValueError:  # the memory does not suffice
            size //= 2
    return costs


def _costs_behind(
    target: TargetModel,
    name: Mapping[str, Any],
    batch: int,
    sampling: Sampling,
    context: int,
    drafting: Drafting | None,
    drawn: bool,
    seldom: bool,
) -> Costs:
    """Measured behind so many tokens, now or before."""

    def steps() -> Callable[..., Run]:  # by rows; a cache is made for them, where something is measured
        cache_behind = behind(target, batch, context)
        return partial(verification, target, batch, sampling, cache_behind, drawn=drawn and not sampling.greedy)

    def plain() -> float:
        one = steps()(1)
        return timed({0: (one, one)}, target.device, GLANCE)[0]

    def measure() -> Costs:
        made = drafting(context) if drafting is not None else None
        parts = _parts(steps(), batch, target.device, sampling, made, seldom)
        return _costs_of(_in_turn(parts, batch, target.device))

    way: dict[str, bool] = {"drawn": drawn} if drawn and not sampling.greedy else {}
    way |= {"greedy": sampling.greedy, "top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1}
    key = {"draft": dict(name), "batch": batch, "context": context} | way | machine_key(target)
    return kept(key, measure, plain)


def _parts(
    step_of: Callable[..., Run],
    batch: int,
    device: torch.device,
    sampling: Sampling,
    drafting: tuple[Make, Make | None] | None,
    seldom: bool,
) -> Parts:
    """What is timed, by kind, or kind and rows: what runs before it, and it."""
    one = step_of(1)
    parts: Parts = {"plain": (one, one)}
    start, make = drafting or (None, None)
    # A cache that holds the target's weights holds less of them after a draft, and the other way round.
    begin = start(0) if start is not None else lambda: None
    verified = [rows for rows in VERIFIED if rows == 2 or rows * batch <= MOST_ROWS]
    chained = [rows for rows in CHAINED if rows in verified]
    parts |= {("verify", rows): (begin, step_of(rows)) for rows in verified}
    parts |= {("chain", rows): (begin, step_of(rows, chain=True)) for rows in chained}
    if start is not None:
        some = repeated(one, SELDOM, device) if seldom else one
        parts |= {"first": (some, begin), ("late", LATE): (one, start(LATE))}
        parts |= {"behind": (both(some, begin), one)} if seldom else {}
    if make is not None:
        parts |= {("draft", rows): (one, make(rows)) for rows in DRAFTED if rows == 1 or rows * batch <= MOST_ROWS}
    if not sampling.greedy:
        right = min(RIGHT, max(chained, default=2) - 1)
        parts["accepted", right] = (begin, step_of(1 + right, chain=True, right=True))
    return parts


def _in_turn(parts: Parts, batch: int, device: torch.device) -> dict[Any, float]:
    """Seconds of each part: those of many rows apart from the others."""
    most = max(HEAVY, 2 * batch)
    heavy = {key: runs for key, runs in parts.items() if isinstance(key, tuple) and key[1] * batch > most}
    found = timed({key: runs for key, runs in parts.items() if key not in heavy}, device, LEAST)
    if heavy:
        # One part is of both groups: the machine may be another by now.
        bridge = max(key for key in found if key[0] == "verify")
        apart = timed({bridge: parts[bridge], **heavy}, device, LEAST / 2)
        found |= {key: took * found[bridge] / apart[bridge] for key, took in apart.items()}
    return found


def _costs_of(found: dict[Any, float]) -> Costs:
    """What was found, as curves and numbers."""
    plain = found["plain"]
    verified, chained, drafted, accepted = (
        {key[1]: took for key, took in found.items() if key[0] == kind}
        for kind in ("verify", "chain", "draft", "accepted")
    )
    # Of more rows, as much less than a tree as of the most: what a chain spares is the host's.
    chained.setdefault(2, verified[2])  # which is either
    last = max(chained)
    longer = {rows: took - verified[last] + chained[last] for rows, took in verified.items() if rows > last}
    verify, chain = Curve.of(verified | {1: plain}), Curve.of(longer | chained | {1: plain})
    each = max([0.0, *((took - chain.at(1 + right)) / right for right, took in accepted.items())])
    first = found.get("first", 0.0)
    late = max((found.get(("late", LATE), first) - first) / LATE, 0.0)
    first += max(found.get("behind", plain) - plain, 0.0)
    return Costs(plain, verify, chain, first, Curve.of(drafted or {1: 0.0}), each, late)


def verification(
    target: TargetModel,
    batch: int,
    sampling: Sampling,
    cache_behind: Callable[[], KVCache],
    rows: int,
    chain: bool = False,
    drawn: bool = False,
    right: bool = False,
) -> Run:
    """A step of the loop whose draft is there: a root and ``rows - 1`` draft tokens, a tree or a chain.

    Where tokens are sampled, all of them are accepted if ``right``, else none; ``drawn``: they come with a q.
    """
    tokens = torch.zeros(batch, rows - 1, dtype=torch.long, device=target.device)
    parents = range(ROOT, rows - 2) if chain else [node // SIBLINGS + ROOT for node in range(rows - 1)]
    q = None
    if drawn and rows > 1:
        q = torch.full((batch, 1, target.vocab_size), 1.0 / target.vocab_size, device=target.device)
    drafter: Any = _Proposing(DraftTree.from_parents(tokens, tuple(parents), q=q, q_row=(0,) * (rows - 1)))
    generator, lossless = torch.Generator(target.device).manual_seed(0), rule_for(sampling)

    def rule(draft: DraftTree, logits: Tensor, *given: Any) -> Verdict:
        if not sampling.greedy:  # where nothing is drawn, what is found takes as long as what is not
            logits[..., 0] = LIKELY if right else -LIKELY  # the draft's token
        return lossless(draft, logits, *given)

    unending = target.max_context  # tokens: no step is a row's last
    nothing = KVCache.nothing()  # until ``once`` has one
    tokens_of_rows: list[list[int]] = [[] for _ in range(batch)]
    finished = [False] * batch
    state = DecodeState(
        target, nothing, tokens_of_rows, [0] * batch, sampling, generator, unending, frozenset(), finished
    )

    def once() -> object:
        state.cache = cache_behind()
        for row, length in enumerate(state.cache.lengths):
            state.replace(row, [0] * (length + 1))
            state.prompt_lengths[row] = length + 1
        return step(state, drafter, rule)

    return once


class _Proposing:
    """In a drafter's place: proposes the same draft in every step, and takes no time."""

    taps: tuple[int, ...] = ()

    def __init__(self, draft: DraftTree) -> None:
        self._draft = draft

    def propose(self, state: DecodeState) -> DraftTree:
        return self._draft

    def while_verifying(self, *given: object) -> None:
        pass

    def observe(self, *given: object) -> None:
        pass

    def may_rest(self) -> int:
        return 0


def both(one: Run, other: Run) -> Run:
    """One after the other."""
    return lambda: (one(), other())


def repeated(run: Run, times: int, device: torch.device) -> Run:
    """So many times, or for as long as the untimed part of a turn."""

    def runs() -> None:
        until = _now(device) + LEAD
        for _ in range(times):
            run()
            if _now(device) >= until:
                break

    return runs


def behind(target: TargetModel, batch: int, context: int, layers: int | None = None) -> Callable[[], KVCache]:
    """A cache with so many committed rows, and with room for more; every time that it is asked for, it is a row longer,
    as in decoding: libraries prepare themselves anew for shapes that they have not met.

    Raises:
        ValueError: the memory does not suffice.
    """
    context = _within(target, context)
    cache = target.new_cache(batch, context + LONGER + VERIFIED[-1], layers)
    for rows in (*cache.views(0, context)[0], *cache.views(0, context)[1]):
        rows.zero_()  # memory that was never written is all one page, which is read in no time
    lengths = itertools.cycle(range(context, context + LONGER))

    def longer() -> KVCache:
        cache.lengths = [next(lengths)] * batch
        return cache

    return longer


def _within(target: TargetModel, context: int) -> int:
    """As much of a context as leaves room for what is measured behind it."""
    return max(min(context, target.max_context - LONGER - VERIFIED[-1]), 0)


@torch.inference_mode()
def timed(parts: Parts, device: torch.device, least: float) -> dict[Any, float]:
    """Median seconds of each part's second run, which follows the first one, untimed; ``least``: seconds in all.

    They take turns: a machine that slows down slows all of them. In its turn a part runs as it does while decoding,
    behind others like it. Not the least seconds: what decides are ratios, and of one part that had a lucky moment and
    another that had none the ratio is wrong.
    """
    found: dict[Any, list[float]] = {key: [] for key in parts}
    for before, run in parts.values():  # warm-up: kernels are chosen, graphs captured
        both(before, run)()
    began = _now(device)
    for done in itertools.count(1):
        for key, (before, run) in parts.items():
            repeated(both(before, run), AHEAD, device)()
            for _ in range(ALIKE):
                before()
                start = _now(device)
                run()
                found[key].append(_now(device) - start)
        if (passed := _now(device) - began) > SECONDS or (done >= ROUNDS and passed >= least):
            break
    return {key: median(seconds) for key, seconds in found.items()}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def machine_key(target: TargetModel) -> dict[str, Any]:
    """All that the time of a target's forward depends on."""
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
        **hardware(target.device),
    }


@lru_cache(maxsize=1)
def _code() -> str:
    """A digest of the code that a step runs through: a faster kernel has other costs."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    rooms = ("cpu", "drafting", "loop", "methods", "model", "policy")
    for file in sorted(file for room in rooms for file in (package / room).glob("*.[chp]*")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
