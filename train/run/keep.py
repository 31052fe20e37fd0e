"""Which weights a run exports, the best by tau or the last (``keep``), and when it stops early (``patience``).

A measurement is judged by the mean of its tau and the tau before it, so that noise in one of them does not choose. The
measurement before the first step counts only with ``init_from``: a training that makes a drafter worse exports it
unchanged. ``state/best.safetensors`` holds the best weights, with their provenance as metadata. It is replaced as a
whole, so a kill leaves the old best or the new one.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from drafters.common.files import replacing, save_tensors
from train.core.config import TrainConfig
from train.core.runtime import Ranks
from train.run.files import BEST, StateFolder
from train.run.limits import Progress

TAU = "heldout_tau"  # the figure that chooses: tau of the chain, the draft that every method has
TRAINING = "training"  # key of the metadata


class Keeper:
    """The best measurement so far, the same on every rank.

    A resumed run may find a best of a later step than its state: its weights were measured before the kill.

    Raises:
        ValueError: the file with the best weights is damaged.
    """

    def __init__(
        self, config: TrainConfig, progress: Progress, ranks: Ranks, device: torch.device, resumed: bool
    ) -> None:
        self.config, self.progress = config, progress
        self.path = best_path(config.out)
        stored = read_best(config) if resumed and ranks.is_first else None
        best = [1 + stored["best"]["step"], stored["best"]["tau"]] if stored else [0, 0.0]
        count, self.tau = ranks.total(torch.tensor(best, dtype=torch.float64, device=device)).tolist()
        self.step = int(count) - 1 if count else None  # a step of 0 is a best, too

    def judge(self, tau: float) -> bool:
        """Take in the ``tau`` of the current step; return True if it is the best, so that its weights are kept."""
        if not self.progress.step and self.config.init_from is None:
            return False
        taus = self.progress.taus
        taus.append((self.progress.step, tau))
        mean = fmean(tau for _, tau in taus[-2:])
        if not self.config.keeps_best or (self.step is not None and mean <= self.tau):
            return False
        self.step, self.tau = self.progress.step, mean
        return True

    def out_of_patience(self) -> bool:
        """Whether the last ``patience`` measurements brought no gain."""
        return out_of_patience(self.config, self.progress.taus, self.step)

    def figures(self) -> dict[str, float]:
        """For metrics.jsonl: the best step and its tau, or nothing."""
        return {"kept_step": self.step, "kept_tau": self.tau} if self.step is not None else {}

    def save(self, weights: dict[str, Tensor], training: dict[str, Any]) -> None:
        """Write the best weights and their provenance; raises OSError, and the old file stays."""
        self.path.parent.mkdir(exist_ok=True)
        provenance = training | {"best": {"step": self.step, "tau": self.tau}}
        with replacing(self.path) as temporary:
            save_tensors(weights, temporary, {TRAINING: json.dumps(provenance)})

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The best weights, and their provenance."""
        training = read_best(self.config)
        assert training is not None
        return load_file(self.path), training


def best_path(run: Path) -> Path:
    """The file of the best weights of the run in ``run``."""
    return StateFolder(run).path / BEST


def read_best(config: TrainConfig) -> dict[str, Any] | None:
    """The provenance of the best weights of a run; None if it has none, or keeps the last ones.

    Raises:
        ValueError: the file is damaged.
    """
    path = best_path(config.out)
    if not config.keeps_best or not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            return dict(json.loads(file.metadata()[TRAINING]))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); restore it, or delete it and resume: the next measurement chooses again"
        ) from error


def out_of_patience(config: TrainConfig, taus: list[tuple[int, float]], best_step: int | None) -> bool:
    """Whether ``config.patience`` measurements (step, tau) or more follow the one of ``best_step``, if it is known."""
    if config.patience is None or best_step is None:
        return False
    return sum(step > best_step for step, _ in taus) >= config.patience
