"""Share the minutes of train.start out over its steps."""

import math
from dataclasses import dataclass
from typing import Any

from drafters.methods import drafter_class
from train.configs import StartConfig
from train.plan.facts import Data, Model, Rates

# Passes over the dialogues. SmolLM2's head still gained at its fifth (docs/smollm2-training.md: 11.6M positions),
# but new dialogues helped most: so the rest of the time goes into new answers.
PASSES = 5
REPORT, CERTIFICATE = 0.08, 0.12  # largest shares of the minutes
FIXED = 0.8  # largest share of all steps but answers, features and training
PROMPTS, TEXTS = (4, 20), (64, 512)  # fewest and most prompts of the report, sampled texts of the lossless test
HELDOUT = (8, 200)  # fewest and most held-out dialogues
CERTIFIED = 16  # texts in a batch of eval.lossless, half of which are in batches of FEW_ROWS


@dataclass
class Fixed:
    """The steps whose time does not depend on the number of dialogues."""

    prompts: int  # of the report
    begun: int  # greedy texts of the lossless test
    texts: int  # sampled texts of the lossless test
    report: float  # seconds of this step, and of the next ones
    tune: float
    certificate: float
    others: float  # starts of the other programs, and reading the dialogues

    @property
    def seconds(self) -> float:
        """Of all of them."""
        return self.report + self.tune + self.certificate + self.others


@dataclass
class Shares(Fixed):
    """What fits into the minutes."""

    heldout: int  # dialogues
    tokens: float  # of the dialogues to train on
    answering: float  # seconds of this step, and of the next one
    training: float


def compared_methods(kind: Any) -> int:
    """Rows of the report: plain decoding, prompt lookup, the drafter's own rows, and its hybrid with lookup."""
    return 2 + len(kind.recipe.rows) + bool(kind.follows)


def fixed_steps(total: float, method: str, model: Model, data: Data | None, rates: Rates) -> Fixed:
    """The fixed steps of ``total`` seconds; ``data``: None if not known yet, then their number is the lowest."""
    kind: Any = drafter_class(method)
    rows, knobs = compared_methods(kind), kind.recipe.knobs
    heldout = HELDOUT[0] if data is None else _within(data.dialogues // 10, *HELDOUT)
    new, greedy, sampled = (min(most, model.answer) for most in (96, 64, 32))
    # The report, and a search before it if the method needs one.
    prompts = min(_within(REPORT * total * rates.one / (rows * new), *PROMPTS), heldout // 2)
    report = rates.start + rows * prompts * new / rates.one
    tried = sum(map(len, knobs.values())) + 2
    tune = rates.start + tried * prompts * new / rates.one if knobs else 0.0
    # The lossless test: greedy answers in both precisions, and sampled texts.
    begun, exact = max(1, min(heldout // 2, 8)), rates.exact or 0.0
    texts = _within((CERTIFICATE * total * exact - 2 * begun * greedy) / sampled, *TEXTS)
    texts -= texts % CERTIFIED
    certificate = 2 * rates.start + (2 * begun * greedy + texts * sampled) / exact if exact else 0.0
    asks = data is None or data.asking is not None
    others = 2 * (0.0 if data is None else data.seconds) + (5 if asks else 4) * rates.start
    return Fixed(prompts, begun, texts, report, tune, certificate, others)


def check_minutes(start: StartConfig, model: Model, data: Data | None, rates: Rates, so_far: bool = False) -> Fixed:
    """Return the fixed steps; raise ValueError if they leave too little of the minutes of ``start``.

    ``so_far``: not all of ``rates`` is measured yet, and the unknown ones are infinite, so that this is a lower bound.
    """
    total = 60 * start.minutes
    given = start.method, model, data, rates
    found = fixed_steps(total, *given)
    if found.seconds <= FIXED * total:
        return found
    needed = math.ceil(start.minutes)
    while (seconds := fixed_steps(60 * needed, *given).seconds) > FIXED * 60 * needed:  # its report is longer, too
        needed = math.ceil(seconds / FIXED / 60)
    known = ", by what is known before all is measured" if so_far else ""
    raise ValueError(
        f"--minutes {start.minutes:g}: starting programs and measuring take {found.seconds / 60:.1f} of them "
        f"here{known}, which leaves too little for training; give at least {needed}"
    )


def share_out(start: StartConfig, model: Model, data: Data, rates: Rates, rate: float) -> Shares:
    """Share the minutes of ``start`` out; raise ValueError if there are too few. ``rate``: tokens/s of training."""
    fixed = check_minutes(start, model, data, rates)
    left = 60 * start.minutes - fixed.seconds
    # The rest: questions and answers, with a tenth more for the held-out ones, features, and ``PASSES`` passes. In
    # seconds per token of a dialogue:
    answering = 0.0 if data.own else data.answers / data.tokens / rates.many
    made = 1.1 * (answering + (data.asking or 0.0) * data.dialogues / data.tokens) + 1 / rates.prefill
    tokens = min(left / (made + PASSES / rate), float(data.tokens))
    heldout = _within(data.dialogues // 10, *HELDOUT)
    training = left - made * tokens
    return Shares(**vars(fixed), heldout=heldout, tokens=tokens, answering=answering * tokens, training=training)


def _within(value: float, least: int, most: int) -> int:
    return int(max(least, min(most, value)))  # infinite if it is not measured yet
