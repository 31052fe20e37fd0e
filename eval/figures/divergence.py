"""Greedy outputs that differ from plain decoding's, and whether rounding explains them.

In bf16 and fp16 a block of tokens and a single token give logits that differ in the last bits. A lossless drafter may
therefore leave plain decoding's path where two tokens are almost equally likely. It is accepted only there.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from drafters import TargetModel
from eval.figures.scores import Scores
from eval.measure.runs import Run

# Largest accepted gap between the best logit and that of the token taken, in units of the logit scale (the largest
# absolute logit at that position). bf16 has 8 bits of mantissa, so one rounding is up to 1/256 of the scale, and
# the layers together are allowed four times that; fp16 has 3 bits more. float32 has to be exact.
TOLERANCE = {torch.bfloat16: 4 / 256, torch.float16: 4 / 2048, torch.float32: 0.0}


@dataclass(frozen=True)
class Divergence:
    """The first position where an output differs from plain decoding's.

    Attributes:
        position: index among the new tokens.
        margin: the target's top-2 margin there, in logits.
        gap: difference of the best logit and that of the worse of the two tokens taken; None if one output only ends
            earlier, which no rounding explains.
        tolerance: the gap that rounding explains there.
    """

    prompt: str
    position: int
    margin: float | None
    gap: float | None
    tolerance: float
    accepted: bool


def differing(rounds: list[list[Run]], plain: list[Run]) -> dict[int, list[int]]:
    """Return by prompt the first output, of its ``rounds``, that differs from plain decoding's."""
    outputs: dict[int, list[int]] = {}
    for number, (runs, base) in enumerate(zip(rounds, plain, strict=True)):
        for run in runs:
            if run.tokens != base.tokens:
                outputs.setdefault(number, run.tokens)
    return outputs


def find_divergences(
    scores: Scores, plain: list[list[int]], names: list[str], others: dict[int, list[int]]
) -> list[Divergence]:
    """Return the divergence of each of ``others``, the outputs of ``differing``, from the tokens of ``plain``."""
    return [_divergence(scores, number, names[number], tokens, plain[number]) for number, tokens in others.items()]


def _divergence(scores: Scores, number: int, name: str, tokens: list[int], plain: list[int]) -> Divergence:
    shorter = min(len(tokens), len(plain))
    position = next((n for n in range(shorter) if tokens[n] != plain[n]), shorter)
    if position == shorter:
        return Divergence(name, position, None, None, 0.0, False)
    logits = scores.of(number, plain)[position]
    gap = logits.best - min(logits.chosen, scores.of(number, tokens)[position].chosen)
    tolerance = TOLERANCE[scores.target.dtype] * logits.scale
    return Divergence(name, position, logits.best - logits.second, gap, tolerance, gap < tolerance)


def exactness(rounds: list[list[Run]], plain: list[Run], names: list[str], scores: Scores) -> dict[str, Any]:
    """Return the report's ``exact_match`` and ``divergences``: number, share, those unexplained, and each one.

    If the target cannot be run, the number is known and the explanation is not, so that no measurement is lost.
    """
    others = differing(rounds, plain)
    row: dict[str, Any] = {"exact_match": (len(names) - len(others)) / len(names)}
    about: dict[str, Any] = {"count": len(others), "rate": len(others) / len(names)}
    try:
        each = find_divergences(scores, [run.tokens for run in plain], names, others)
    except Exception as error:  # for example out of memory
        unknown = dict.fromkeys(("unexplained", "largest_margin", "each"))
        return row | {"divergences": about | unknown | {"unavailable": f"{type(error).__name__}: {error}"}}
    about["unexplained"] = sum(not one.accepted for one in each)
    about["largest_margin"] = max((one.margin for one in each if one.margin is not None), default=None)
    return row | {"divergences": about | {"each": [asdict(one) for one in each]}}


def tolerance_note(target: TargetModel) -> dict[str, Any]:
    """Return the report's ``divergence_tolerance``."""
    return {
        "relative_to_largest_logit": TOLERANCE[target.dtype],
        "rule": "accepted where the logits of both tokens lie less than this share of the largest absolute logit below "
        "the best one",
    }
