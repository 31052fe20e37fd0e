"""Share the minutes of train.start out over its steps."""

from dataclasses import dataclass

from drafters.hub.declared import Recipe
from train.plan.facts import Data, Model, Rates
from train.plan.rates import CERTIFIED

# Passes over the dialogues. SmolLM2's head still gained at its fifth (docs/smollm2-training.md: 11.6M positions),
# but new dialogues helped most: so the rest of the time goes into new answers.
PASSES = 5
REPORT, CERTIFICATE = 0.08, 0.12  # largest shares of the minutes
PROMPTS, TEXTS = (4, 20), (64, 512)  # fewest and most prompts of the report, sampled texts of the lossless test


@dataclass
class Shares:
    """What fits into the minutes."""

    heldout: int  # dialogues
    prompts: int  # of the report
    begun: int  # greedy texts of the lossless test
    texts: int  # sampled texts of the lossless test
    tokens: float  # of the dialogues to train on
    report: float  # seconds of this step, and of the next ones
    tune: float
    certificate: float
    answering: float
    training: float


def share_out(minutes: float, model: Model, data: Data, rates: Rates, rate: float, recipe: Recipe, rows: int) -> Shares:
    """Share the minutes out; raise ValueError if there are too few.

    Args:
        rate: tokens/s of training. rows: methods in the report.
    """
    total, heldout = 60 * minutes, max(8, min(200, data.dialogues // 10))
    new, greedy, sampled = (min(most, model.answer) for most in (96, 64, 32))
    # The report, and a search before it if the method needs one.
    prompts = min(_within(REPORT * total * rates.one / (rows * new), *PROMPTS), heldout // 2)
    report = rates.start + rows * prompts * new / rates.one
    tried = sum(map(len, recipe.knobs.values())) + 2
    tune = rates.start + tried * prompts * new / rates.one if recipe.knobs else 0.0
    # The lossless test: greedy answers in both precisions, and sampled texts.
    begun, exact = max(1, min(heldout // 2, 8)), rates.exact or 0.0
    texts = _within((CERTIFICATE * total * exact - 2 * begun * greedy) / sampled, *TEXTS)
    texts -= texts % CERTIFIED
    certificate = 2 * rates.start + (2 * begun * greedy + texts * sampled) / exact if exact else 0.0
    fixed = report + tune + certificate + 2 * data.seconds + (4 if data.asking is None else 5) * rates.start
    left = total - fixed
    if left < 0.2 * total:
        raise ValueError(
            f"--minutes {minutes:g}: starting programs and measuring take {fixed / 60:.1f} of them here, which leaves "
            f"too little for training; give at least {fixed / 0.8 / 60:.0f}"
        )
    # The rest: questions and answers, with a tenth more for the held-out ones, features, and ``PASSES`` passes. In
    # seconds per token of a dialogue:
    answering = 0.0 if data.own else data.answers / data.tokens / rates.many
    made = 1.1 * (answering + (data.asking or 0.0) * data.dialogues / data.tokens) + 1 / rates.prefill
    tokens = min(left / (made + PASSES / rate), float(data.tokens))
    return Shares(
        heldout, prompts, begun, texts, tokens, report, tune, certificate, answering * tokens, left - made * tokens
    )


def _within(value: float, least: int, most: int) -> int:
    return max(least, min(most, int(value)))
