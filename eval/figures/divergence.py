"""Greedy outputs that differ from plain decoding's, and whether rounding explains them.

In bf16 and fp16 a block of tokens and a single one give logits that differ in the last bits, so a lossless drafter may
leave plain decoding's path where the target itself hardly prefers one token. It is accepted there and nowhere else.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from drafters import TargetModel
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
        gap: how far the logit of the worse of the two tokens taken stands below the best; None where one output just
            ends, which no rounding explains.
        tolerance: the gap that rounding explains there.
    """

    prompt: str
    position: int
    margin: float | None
    gap: float | None
    tolerance: float
    accepted: bool


def exact_share(rounds: list[list[Run]], baseline: list[Run]) -> float:
    """Share of prompts whose tokens equal plain decoding's in every round; ``rounds[prompt]`` holds a prompt's runs."""
    equal = [all(run.tokens == plain.tokens for run in runs) for runs, plain in zip(rounds, baseline, strict=True)]
    return sum(equal) / len(equal)


def find_divergences(
    target: TargetModel, prompt_ids: list[list[int]], names: list[str], rounds: list[list[Run]], baseline: list[Run]
) -> list[Divergence]:
    """One for each prompt whose output differs from plain decoding's in some round; runs the target on those only."""
    found = []
    for ids, name, runs, plain in zip(prompt_ids, names, rounds, baseline, strict=True):
        other = next((run.tokens for run in runs if run.tokens != plain.tokens), None)
        if other is not None:
            found.append(_divergence(target, ids, name, other, plain.tokens))
    return found


def summary(divergences: list[Divergence], prompts: int) -> dict[str, Any]:
    """For the report's row: rate, how many rounding explains, and each one."""
    return {
        "count": len(divergences),
        "rate": len(divergences) / prompts,
        "unexplained": sum(not divergence.accepted for divergence in divergences),
        "largest_margin": max((d.margin for d in divergences if d.margin is not None), default=None),
        "each": [asdict(divergence) for divergence in divergences],
    }


def unavailable(rounds: list[list[Run]], baseline: list[Run], error: Exception) -> dict[str, Any]:
    """``summary`` where the target could not be asked: their number is known, what explains them is not."""
    count = sum(any(run.tokens != plain.tokens for run in runs) for runs, plain in zip(rounds, baseline, strict=True))
    unknown: dict[str, Any] = {"unexplained": None, "largest_margin": None, "each": None}
    return {"count": count, "rate": count / len(rounds), **unknown, "unavailable": f"{type(error).__name__}: {error}"}


@torch.inference_mode()
def _divergence(target: TargetModel, ids: list[int], name: str, tokens: list[int], plain: list[int]) -> Divergence:
    common = zip(tokens, plain, strict=False)
    position = next((i for i, (a, b) in enumerate(common) if a != b), min(len(tokens), len(plain)))
    if position >= min(len(tokens), len(plain)):
        return Divergence(name, position, None, None, 0.0, False)
    context = torch.tensor([ids + plain[:position]], device=target.device)
    logits = target.lm_head(target.features(context).features[0, -1]).float()
    best, second = logits.topk(2).values.tolist()
    gap = best - min(logits[tokens[position]].item(), logits[plain[position]].item())
    tolerance = TOLERANCE[target.dtype] * logits.abs().max().item()
    return Divergence(name, position, best - second, gap, tolerance, gap < tolerance)
