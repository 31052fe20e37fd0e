"""Calibration of the acceptance that a block drafter estimates: sequential temperature scaling, as DSpark has it.

DeepSeek 2026 (arXiv 2607.05147, section 3.2.1): from the first position on, a grid search finds the temperature with
the smallest error of the cumulative acceptance, with the temperatures before it fixed. Each draft is a chain of the
whole block, verified in full by the decoding loop.
"""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from data_prep.common.progress import Bar
from data_prep.store.reader import FeatureStore
from drafters.common.files import replace_json
from drafters.common.threads import set_threads
from drafters.drafting.tree_plan import TreePlan
from drafters.hub import checkpoint
from drafters.loading import load_drafter
from drafters.loop.acceptance import Verdict
from drafters.loop.generate import generate
from drafters.loop.state import DecodeState
from drafters.methods import drafter_class
from drafters.methods.block import BlockDrafter
from drafters.model.target import TargetModel
from drafters.policy.truncation import MOST, Truncation
from train.watch.tau import held_out_prompts, room

BINS = 15  # of equal width, for the calibration error; as many as SGLang's tool has
GRID = sorted((10 ** (k / 40) for k in range(-40, 41)), key=lambda one: abs(math.log(one)))  # on a tie, nearest to 1
FEWEST = 100  # drafts that must reach a position for a temperature of its own
BATCH = 8  # prompts decoded at once


@dataclass
class Drafts:
    """Verified drafts of a whole block: ``logits [N, D]`` of estimated acceptance, ``accepted [N]`` tokens of each."""

    logits: Tensor
    accepted: Tensor

    @property
    def survived(self) -> Tensor:
        """bool ``[N, D]``: a position and all before it are accepted."""
        return self.accepted[:, None] > torch.arange(self.logits.shape[1])

    @property
    def reached(self) -> list[int]:
        """By position, the drafts whose positions before it are all accepted."""
        return (self.accepted[:, None] >= torch.arange(self.logits.shape[1])).sum(0).tolist()


class Watched(Truncation):
    """Cuts no draft, and keeps the estimates and the outcome of each."""

    def __init__(self, depth: int, trained: bool) -> None:
        super().__init__(depth, trained)
        self.logits: list[list[float]] = []
        self.accepted: list[int] = []

    def prepare(self, *arguments: object) -> None:
        """Nothing is measured."""

    def length(self, certainty: Tensor, state: DecodeState) -> int:
        self._latest = certainty.tolist()
        return certainty.shape[1]

    def learn(self, plan: TreePlan, size: int, state: DecodeState, verdict: Verdict) -> None:
        for row, logits in enumerate(self._latest):
            if not state.finished[row] and size == self.depth:  # neither cut short
                self.logits.append(logits)
                self.accepted.append(len(verdict.rows[row]) - 1)


def calibrate(options: argparse.Namespace) -> None:
    """The steps of train.tools.calibrate.

    Raises:
        ValueError: another kind of drafter, another target, no store, or too few drafts.
    """
    method = checkpoint.read_config(options.checkpoint).drafter_type
    if not issubclass(drafter_class(method), BlockDrafter):
        raise ValueError(
            f"--checkpoint: {options.checkpoint} holds a drafter of type {method!r}, which estimates no acceptance; "
            "give a dflash, a dflash2 or a dspark"
        )
    store = FeatureStore.open(options.features / "heldout")
    drafter = load(options)
    if (there := store.manifest.vocab_size) != drafter.target.vocab_size:
        raise ValueError(
            f"--features: {store.path} was made for a vocabulary of {there:,} tokens, and {drafter.target.name} has "
            f"{drafter.target.vocab_size:,}; give features of the drafter's own target"
        )
    longest = room("--new-tokens", options.new_tokens, drafter.max_context)
    prompts = held_out_prompts(store, options.prompts, longest, "--features", "lower --new-tokens")
    fitted, judged = (decode(drafter, prompts[half::2], options) for half in (0, 1))
    if (least := min(len(fitted.accepted), len(judged.accepted))) < FEWEST:
        raise ValueError(
            f"half of the {len(prompts)} prompts of {options.features / 'heldout'} gave {least} drafts of a whole "
            f"block, and a temperature needs {FEWEST}; raise --prompts or --new-tokens, or store more dialogues"
        )
    trained = drafter.policy.trained
    temperatures = fit(fitted, trained)
    report = figures(judged, trained, temperatures)
    print(table(report, fitted.reached))
    before, after = report["pooled"]["ece_before"], report["pooled"]["ece_after"]
    if after >= before:
        print(f"{options.checkpoint} is as it was: the pooled error does not fall, it was {before:.4f}")
        return
    report |= {"dataset": str(options.features / "heldout"), "num_samples": len(judged.accepted)}
    save(options, report)
    file = checkpoint.CONFIDENCE_FILE
    print(f"{options.checkpoint}: config.json has these temperatures, {file} these figures in SGLang's format")


def load(options: argparse.Namespace) -> Any:
    """The drafter, with its target; its drafts are chains that may be truncated."""
    set_threads(None)
    disable_progress_bar()  # transformers' own
    config = checkpoint.read_config(options.checkpoint).target
    name, revision = (options.target, None) if options.target else (config.name, config.revision)
    target = TargetModel.from_pretrained(name, revision=revision)
    return load_drafter(str(options.checkpoint), target, tree="chain", truncate=True, depth=None)


def decode(drafter: Any, prompts: list[list[int]], options: argparse.Namespace) -> Drafts:
    """Answer the prompts, and return the drafts of their steps."""
    drafter.policy = policy = Watched(drafter.shaper.depth, drafter.policy.trained)
    with Bar(total=len(prompts), unit=" prompts", leave=False) as bar:
        for start in range(0, len(prompts), BATCH):
            some = prompts[start : start + BATCH]
            settings: dict[str, Any] = {"max_new_tokens": options.new_tokens, "temperature": options.temperature}
            generate(drafter.target, drafter, some, prompt_lengths=[*map(len, some)], seed=start, **settings)
            bar.update(len(some))
    return Drafts(
        torch.tensor(policy.logits).view(len(policy.accepted), drafter.shaper.depth), torch.tensor(policy.accepted)
    )


def fit(drafts: Drafts, trained: bool) -> list[float]:
    """A temperature for each position; one that less than ``FEWEST`` drafts reach has that of the position before.

    ``trained``: the logits are a confidence head's. Otherwise they are bounded, as the online estimate reads them.
    """
    bounded = drafts.logits if trained else drafts.logits.clamp(-MOST, MOST)
    chances, survived, temperatures = torch.ones(len(bounded)), drafts.survived, list[float]()
    for place, reached in enumerate(drafts.reached):
        logits = bounded[:, place]
        if reached >= FEWEST:
            errors = {one: calibration_error(chances * (logits / one).sigmoid(), survived[:, place]) for one in GRID}
            temperatures.append(min(errors, key=errors.__getitem__))
        else:
            temperatures.append(temperatures[-1] if temperatures else 1.0)
        chances = chances * (logits / temperatures[-1]).sigmoid()
    return [round(one, 4) for one in temperatures]


def figures(drafts: Drafts, trained: bool, temperatures: list[float]) -> dict[str, Any]:
    """ECE and AUC of the cumulative acceptance by position, and over all positions, before and after.

    Before: as ``truncate`` estimates it without temperatures.
    """
    report: dict[str, Any] = {"temperatures": temperatures, "pooled": {}}
    depth, survived = len(temperatures), drafts.survived
    for when, scales in (("before", None), ("after", temperatures)):
        policy = Truncation(depth, trained, scales)
        each = [policy.acceptance(row) for row in drafts.logits.tolist()]
        chances = torch.tensor(each).cumprod(1)
        for name, measure in (("ece", calibration_error), ("auc", area_under_curve)):
            by_position = [measure(chances[:, k], survived[:, k]) for k in range(depth)]
            report[f"{name}_{when}"] = by_position
            report["pooled"][f"{name}_{when}"] = measure(chances.flatten(), survived.flatten())
    return report


def calibration_error(chances: Tensor, right: Tensor) -> float:
    """ECE: mean distance of estimate and share that is ``right``, over bins of equal width; ``[N]`` each."""
    places = (chances * BINS).long().clamp(0, BINS - 1)
    apart = torch.zeros(BINS, dtype=torch.float64).index_add_(0, places, chances.double() - right.double())
    return float(apart.abs().sum() / len(right))


def area_under_curve(chances: Tensor, right: Tensor) -> float | None:
    """AUC: how often a right one has the larger estimate than a wrong one, ties as one half; None without both."""
    _, places, counts = chances.unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[places].double()
    ours, others = int(right.sum()), int((~right).sum())
    if not ours or not others:
        return None
    return float((ranks[right].sum() - ours * (ours + 1) / 2) / (ours * others))


def table(report: dict[str, Any], reached: list[int]) -> str:
    """The figures in lines: of each position, and pooled."""
    keys = ("ece_before", "ece_after", "auc_before", "auc_after")
    lines = ["position  fitted on  temperature  ECE before   after  AUC before   after"]
    rows = [(str(k + 1), f"{reached[k]:,}", f"{one:.3f}", k) for k, one in enumerate(report["temperatures"])]
    for name, count, temperature, place in [*rows, ("pooled", "", "", None)]:
        values = [report["pooled"][key] if place is None else report[key][place] for key in keys]
        shown = ["-" if value is None else f"{value:.4f}" for value in values]
        lines.append("{:>8}{:>11}{:>13}{:>12}{:>8}{:>12}{:>8}".format(name, count, temperature, *shown))
    return "\n".join(lines)


def save(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write the temperatures into config.json, and all figures beside it."""
    config = checkpoint.read_config(options.checkpoint)
    config.drafter["confidence_temperatures"] = report["temperatures"]
    replace_json(options.checkpoint / checkpoint.CONFIDENCE_FILE, report | {"temperature": options.temperature})
    replace_json(options.checkpoint / checkpoint.CONFIG_FILE, config.model_dump())
