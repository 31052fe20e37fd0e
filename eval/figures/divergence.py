"""Greedy outputs that differ from plain decoding's, and whether rounding explains them.

In bf16 and fp16 a block of tokens and a single token give logits that differ in the last bits. A lossless drafter may
therefore leave plain decoding's path where two tokens are almost equally likely. It is accepted only there.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

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


class Logits(NamedTuple):
    """Logits of the target at a divergence: the two best, the worse of the two tokens taken, the largest absolute."""

    best: float
    second: float
    worse: float
    scale: float


class Partings:
    """The target's logits where outputs leave plain decoding's: one forward per prompt.

    Args:
        prompt_ids: of every prompt. plain: plain decoding's tokens after each.
        outputs: (index of the prompt, tokens) of all outputs that will be asked for, as far as known.
    """

    def __init__(
        self,
        target: TargetModel,
        prompt_ids: list[list[int]],
        plain: list[list[int]],
        outputs: Iterable[tuple[int, list[int]]] = (),
    ) -> None:
        self._target, self._prompts, self.plain = target, prompt_ids, plain
        self._waiting: dict[int, set[tuple[int, int]]] = {}
        self._known: dict[tuple[int, int, int], Logits] = {}
        for prompt, tokens in outputs:
            position = _parted(tokens, plain[prompt])
            if position < min(len(tokens), len(plain[prompt])):
                self._waiting.setdefault(prompt, set()).add((position, tokens[position]))

    def divergence(self, prompt: int, name: str, tokens: list[int]) -> Divergence:
        """Return where an output leaves plain decoding's, and whether rounding explains it."""
        plain = self.plain[prompt]
        position = _parted(tokens, plain)
        if position >= min(len(tokens), len(plain)):
            return Divergence(name, position, None, None, 0.0, False)
        key = prompt, position, tokens[position]
        if key not in self._known:
            self._forward(prompt, self._waiting.pop(prompt, set()) | {key[1:]})
        logits = self._known[key]
        gap = logits.best - logits.worse
        tolerance = TOLERANCE[self._target.dtype] * logits.scale
        return Divergence(name, position, logits.best - logits.second, gap, tolerance, gap < tolerance)

    @torch.inference_mode()
    def _forward(self, prompt: int, places: set[tuple[int, int]]) -> None:
        ids, plain = self._prompts[prompt], self.plain[prompt]
        context = torch.tensor([ids + plain[: max(position for position, _ in places)]], device=self._target.device)
        features = self._target.features(context).features[0, len(ids) - 1 :]
        for position, token in places:
            logits = self._target.lm_head(features[position]).float()
            best, second = logits.topk(2).values.tolist()
            worse = min(logits[token].item(), logits[plain[position]].item())
            self._known[prompt, position, token] = Logits(best, second, worse, logits.abs().max().item())


def exact_share(rounds: list[list[Run]], baseline: list[Run]) -> float:
    """Return the share of prompts whose tokens equal plain decoding's in every round; ``rounds`` are by prompt."""
    equal = [all(run.tokens == plain.tokens for run in runs) for runs, plain in zip(rounds, baseline, strict=True)]
    return sum(equal) / len(equal)


def find_divergences(partings: Partings, names: list[str], rounds: list[list[Run]]) -> list[Divergence]:
    """Return a divergence for each prompt whose output differs from plain decoding's in some round."""
    found = []
    for number, (name, runs) in enumerate(zip(names, rounds, strict=True)):
        other = next((run.tokens for run in runs if run.tokens != partings.plain[number]), None)
        if other is not None:
            found.append(partings.divergence(number, name, other))
    return found


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


def _parted(tokens: list[int], plain: list[int]) -> int:
    """Return the first position where they differ; the length of the shorter one if they do not."""
    common = zip(tokens, plain, strict=False)
    return next((i for i, (a, b) in enumerate(common) if a != b), min(len(tokens), len(plain)))
