"""Greedy outputs that differ from plain decoding's, and whether rounding explains them.

In bf16 and fp16 a block of tokens and a single one give logits that differ in the last bits, so a lossless drafter may
leave plain decoding's path where the target itself hardly prefers one token. It is accepted there and nowhere else.
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
# Of many thousand tokens some have more rounding than that: of no more than this share of the outputs, nor by so much.
RARE, FAR = 0.01, 2.0


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


class Logits(NamedTuple):
    """Of the target where an output leaves plain decoding's: the two best, the worse of the two tokens taken, and the
    scale, which is the largest absolute one."""

    best: float
    second: float
    worse: float
    scale: float


class Partings:
    """What the target thinks where outputs leave plain decoding's: one forward for all of a prompt's.

    Args:
        prompt_ids: of every prompt. plain: plain decoding's tokens after each.
        outputs: all that will be asked about, as far as they are known: a prompt's number, and tokens.
    """

    def __init__(
        self,
        target: TargetModel,
        prompt_ids: list[list[int]],
        plain: list[list[int]],
        outputs: Iterable[tuple[int, list[int]]] = (),
    ) -> None:
        self._target, self._prompts, self._plain = target, prompt_ids, plain
        self._waiting: dict[int, set[tuple[int, int]]] = {}
        self._known: dict[tuple[int, int, int], Logits] = {}
        for prompt, tokens in outputs:
            position = _parted(tokens, plain[prompt])
            if position < min(len(tokens), len(plain[prompt])):
                self._waiting.setdefault(prompt, set()).add((position, tokens[position]))

    def at(self, prompt: int, position: int, token: int) -> Logits:
        """Where an output of ``prompt`` took ``token`` in the place of plain decoding's."""
        if (prompt, position, token) not in self._known:
            self._look(prompt, self._waiting.pop(prompt, set()) | {(position, token)})
        return self._known[prompt, position, token]

    @torch.inference_mode()
    def _look(self, prompt: int, places: set[tuple[int, int]]) -> None:
        ids, plain = self._prompts[prompt], self._plain[prompt]
        context = torch.tensor([ids + plain[: max(position for position, _ in places)]], device=self._target.device)
        features = self._target.features(context).features[0, len(ids) - 1 :]
        for position, token in places:
            logits = self._target.lm_head(features[position]).float()
            best, second = logits.topk(2).values.tolist()
            worse = min(logits[token].item(), logits[plain[position]].item())
            self._known[prompt, position, token] = Logits(best, second, worse, logits.abs().max().item())


def find_divergences(
    target: TargetModel,
    prompt_ids: list[list[int]],
    names: list[str],
    rounds: list[list[Run]],
    baseline: list[Run],
    partings: Partings | None = None,
) -> list[Divergence]:
    """One for each prompt whose output differs from plain decoding's in some round; runs the target on those only.

    ``partings``: of the same prompts and plain outputs, where other methods are asked about, too.
    """
    plain = [run.tokens for run in baseline]
    partings = partings or Partings(target, prompt_ids, plain)
    found = []
    for number, (name, runs) in enumerate(zip(names, rounds, strict=True)):
        other = next((run.tokens for run in runs if run.tokens != plain[number]), None)
        if other is not None:
            found.append(_divergence(target, partings, number, name, other, plain[number]))
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


def tail(found: dict[str, Any], prompts: int) -> float | None:
    """By how many times the worst of a ``summary``'s unexplained divergences exceeds what rounding explains, if they
    are few and none does by far: the tolerance is four roundings, and of very many tokens some have more. Else None.
    """
    beyond = [each for each in found["each"] or () if not each["accepted"]]
    # One output that just ends has no gap, and float32 no tolerance: nothing is beyond either by a little.
    if not beyond or len(beyond) > RARE * prompts or not all(each["gap"] and each["tolerance"] for each in beyond):
        return None
    most: float = max(each["gap"] / each["tolerance"] for each in beyond)
    return most if most <= FAR else None


def unavailable(rounds: list[list[Run]], baseline: list[Run], error: Exception) -> dict[str, Any]:
    """``summary`` where the target could not be asked: their number is known, what explains them is not."""
    count = sum(any(run.tokens != plain.tokens for run in runs) for runs, plain in zip(rounds, baseline, strict=True))
    unknown: dict[str, Any] = {"unexplained": None, "largest_margin": None, "each": None}
    return {"count": count, "rate": count / len(rounds), **unknown, "unavailable": f"{type(error).__name__}: {error}"}


def _divergence(
    target: TargetModel, partings: Partings, number: int, name: str, tokens: list[int], plain: list[int]
) -> Divergence:
    position = _parted(tokens, plain)
    if position >= min(len(tokens), len(plain)):
        return Divergence(name, position, None, None, 0.0, False)
    logits = partings.at(number, position, tokens[position])
    gap = logits.best - logits.worse
    tolerance = TOLERANCE[target.dtype] * logits.scale
    return Divergence(name, position, logits.best - logits.second, gap, tolerance, gap < tolerance)


def _parted(tokens: list[int], plain: list[int]) -> int:
    """The first position where they differ; the length of the shorter one where they do not."""
    common = zip(tokens, plain, strict=False)
    return next((i for i, (a, b) in enumerate(common) if a != b), min(len(tokens), len(plain)))
