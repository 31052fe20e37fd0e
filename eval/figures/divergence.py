"""Greedy outputs that differ from plain decoding's, and whether rounding explains them.

In bf16 and fp16 a block of tokens and a single token give logits that differ in the last bits. A lossless drafter may
therefore leave plain decoding's path where two tokens are almost equally likely. It is accepted only there.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from drafters import TargetModel
from eval.figures.scores import Scores
from eval.measure.runner import Run

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


def exact_share(rounds: list[list[Run]], baseline: list[Run]) -> float:
    """Return the share of prompts whose tokens equal plain decoding's in every round; ``rounds`` are by prompt."""
    equal = [all(run.tokens == plain.tokens for run in runs) for runs, plain in zip(rounds, baseline, strict=True)]
    return sum(equal) / len(equal)


def find_divergences(
    scores: Scores, plain: list[list[int]], names: list[str], rounds: list[list[Run]]
) -> list[Divergence]:
    """Return a divergence for each prompt whose output differs from plain decoding's in some round."""
    found = []
    for number, (name, runs) in enumerate(zip(names, rounds, strict=True)):
        other = next((run.tokens for run in runs if run.tokens != plain[number]), None)
        if other is not None:
            found.append(_divergence(scores, number, name, other, plain[number]))
    return found


def _divergence(scores: Scores, number: int, name: str, tokens: list[int], plain: list[int]) -> Divergence:
    shorter = min(len(tokens), len(plain))
    position = next((n for n in range(shorter) if tokens[n] != plain[n]), shorter)
    if position == shorter:
        return Divergence(name, position, None, None, 0.0, False)
    logits = scores.of(number, plain)[position]
    gap = logits.best - min(logits.own, scores.of(number, tokens)[position].own)
    tolerance = TOLERANCE[scores.target.dtype] * logits.scale
    return Divergence(name, position, logits.best - logits.second, gap, tolerance, gap < tolerance)


def summary(divergences: list[Divergence], prompts: int) -> dict[str, Any]:
    """Return the report's ``divergences``: rate, number that rounding does not explain, and each one."""
    return {
        "count": len(divergences),
        "rate": len(divergences) / prompts,
        "unexplained": sum(not divergence.accepted for divergence in divergences),
        "largest_margin": max((d.margin for d in divergences if d.margin is not None), default=None),
        "each": [asdict(divergence) for divergence in divergences],
    }


def unavailable(rounds: list[list[Run]], baseline: list[Run], error: Exception) -> dict[str, Any]:
    """Return ``summary`` if the target could not be run: the number is known, the explanation is not."""
    count = sum(any(run.tokens != plain.tokens for run in runs) for runs, plain in zip(rounds, baseline, strict=True))
    unknown: dict[str, Any] = {"unexplained": None, "largest_margin": None, "each": None}
    return {"count": count, "rate": count / len(rounds), **unknown, "unavailable": f"{type(error).__name__}: {error}"}


def tolerance_note(target: TargetModel) -> dict[str, Any]:
    """Return the report's ``divergence_tolerance``."""
    return {
        "relative_to_largest_logit": TOLERANCE[target.dtype],
        "rule": "accepted where the logits of both tokens lie less than this share of the largest absolute logit below "
        "the best one",
    }
