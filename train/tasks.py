"""What differs between the drafters' training runs: the module, the positions, the loss and the held-out figures.

The loop (train/loop.py) knows a run only as a ``Task``. Sums and counts leave a task, never means: the loop adds them
up over micro-batches and ranks before it divides.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from drafters.base import LearnedDrafter
from drafters.checkpoint import load_state
from drafters.eagle import EagleDrafter, EagleHead
from drafters.kangaroo import KangarooAdapter, KangarooDrafter
from drafters.model.ends import FrozenEnds
from drafters.model.target import TargetModel
from train.attention import use_dialogue_attention
from train.config import EagleConfig, KangarooConfig, TrainConfig
from train.data.packing import Batch, shift
from train.losses import (
    default_chunk_rows,
    eagle_rows,
    feature_noise,
    kangaroo_rows,
    regression_sum,
    soft_cross_entropy_sum,
)
from train.positions import by_position
from train.ratio import Ratio

CHAIN_DEPTH = 5  # 0-alpha to 4-alpha, as the EAGLE paper reports


class Task(ABC):
    """One drafter's training.

    Attributes:
        name: the drafter's type in checkpoints.
        module: what is trained.
        taps: layers whose hidden states it reads beside the features.
        ahead: row i of the prediction is about token i + ahead.
    """

    name: str
    module: nn.Module
    taps: tuple[int, ...] = ()
    ahead: int

    def __init__(self, config: TrainConfig, ends: FrozenEnds) -> None:
        self.config, self.ends = config, ends

    @abstractmethod
    def rows(self, batch: Batch) -> Tensor:
        """Flat indices int64 ``[n]`` into ``[R * L]`` of the trained positions; ``batch`` is still on the CPU."""

    @abstractmethod
    def loss_sums(self, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None) -> dict[str, Tensor]:
        """Named sums over ``rows``; "loss" can be differentiated. ``noise_seed`` None: no noise (held-out text)."""

    @abstractmethod
    def predict(self, module: Any, batch: Batch, features: Tensor) -> Tensor:
        """What the drafter gives to the LM head, ``[R, L, H]``; ``features`` are the batch's, with or without noise."""

    @abstractmethod
    def targets(self, batch: Batch) -> Tensor:
        """What the target gives to it at the same places ``[R, L, H]``."""

    @abstractmethod
    def losses(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """``loss_sums`` of rows ``[n, H]`` that were picked out already."""

    @abstractmethod
    def heldout(self, module: Any, batch: Batch, rows: Tensor) -> dict[str, Ratio]:
        """Figures of the drafter's quality on held-out text beside the losses."""

    @abstractmethod
    def drafters(self, target: TargetModel, weights: dict[str, Tensor]) -> dict[str, LearnedDrafter]:
        """Drafters with a copy of ``weights`` for the decoding loop, by kind of draft: "chain", "tree"."""

    @abstractmethod
    def drafter_config(self) -> dict[str, Any]:
        """The ``drafter`` section of the checkpoint's config.json."""

    @property
    def chunk_rows(self) -> int:
        """Rows of [rows, vocabulary] logits to hold at once: the config's, or what suits the LM head's device."""
        return self.config.loss_chunk_rows or default_chunk_rows(self.ends.lm_head)

    def _cross_entropy(self, predicted: Tensor, target: Tensor) -> Tensor:
        return soft_cross_entropy_sum(predicted, target, self.ends.lm_head, self.chunk_rows)


class EagleTask(Task):
    """EAGLE: features one step ahead, SmoothL1 + 0.1 cross-entropy (paper, section 3.2)."""

    name = "eagle"
    ahead = 2

    def __init__(self, config: EagleConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        self.eagle = config
        torch.manual_seed(config.seed)
        self.module = EagleHead(ends.config)
        use_dialogue_attention(self.module, ends.config)

    def rows(self, batch: Batch) -> Tensor:
        return eagle_rows(batch, self.eagle.mask_alignment)

    def loss_sums(self, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None) -> dict[str, Tensor]:
        features = batch.features
        if noise_seed is not None and self.eagle.noise != "none":
            features = features + feature_noise(features, batch.spans, self.eagle.noise, noise_seed)
        predicted = self.predict(module, batch, features).flatten(0, 1)[rows]
        return self.losses(predicted, self.targets(batch).flatten(0, 1)[rows])

    def predict(self, module: Any, batch: Batch, features: Tensor) -> Tensor:
        predicted: Tensor = module(features, self._next_embeddings(batch), batch.position_ids, batch.attention())
        return predicted

    def targets(self, batch: Batch) -> Tensor:
        return torch.roll(batch.features, -1, dims=1)

    def losses(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        regression = regression_sum(predicted, target)
        classification = self._cross_entropy(predicted, target)
        loss = regression + self.eagle.classification_weight * classification
        return {"loss": loss, "regression_loss": regression, "classification_loss": classification}

    @torch.no_grad()
    def heldout(self, module: Any, batch: Batch, rows: Tensor) -> dict[str, Ratio]:
        found = {f"{n}-alpha": ratio for n, ratio in enumerate(chain_alpha(module, self.ends, batch))}
        predicted = self.predict(module, batch, batch.features).flatten(0, 1)[rows]
        return found | by_position(self, batch, rows, predicted, self.targets(batch).flatten(0, 1)[rows])

    def drafters(self, target: TargetModel, weights: dict[str, Tensor]) -> dict[str, LearnedDrafter]:
        heads = [EagleHead(target.config) for _ in ("chain", "tree")]
        for head in heads:
            load_state(head, weights)
        return {
            "chain": EagleDrafter(target, heads[0], tree="chain", depth=CHAIN_DEPTH),
            "tree": EagleDrafter(target, heads[1]),
        }

    def drafter_config(self) -> dict[str, Any]:
        return {}

    def _next_embeddings(self, batch: Batch) -> Tensor:
        return self.ends.embed(torch.roll(batch.input_ids, -1, dims=1))  # the last one of a dialogue is never trained


class KangarooTask(Task):
    """Kangaroo: cross-entropy against the target's distribution at the same position (paper, section 3.2)."""

    name = "kangaroo"
    ahead = 1

    def __init__(self, config: KangarooConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        self.kangaroo = config
        torch.manual_seed(config.seed)
        self.module = KangarooAdapter(ends.config)
        use_dialogue_attention(self.module, ends.config)
        self.taps = (config.exit_layer,)

    def rows(self, batch: Batch) -> Tensor:
        return kangaroo_rows(batch)

    def loss_sums(self, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None) -> dict[str, Tensor]:
        predicted = self.predict(module, batch, batch.features).flatten(0, 1)[rows]
        return self.losses(predicted, batch.features.flatten(0, 1)[rows])

    def predict(self, module: Any, batch: Batch, features: Tensor) -> Tensor:
        exit_states = batch.taps[self.kangaroo.exit_layer]
        predicted: Tensor = module(exit_states, batch.position_ids, batch.attention())
        return predicted

    def targets(self, batch: Batch) -> Tensor:
        return batch.features

    def losses(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"loss": self._cross_entropy(predicted, target)}

    @torch.no_grad()
    def heldout(self, module: Any, batch: Batch, rows: Tensor) -> dict[str, Ratio]:
        """``expected_acceptance``: mean of sum_x min(p, q), the acceptance rate of sampled drafting (temperature 1).

        ``top1_agreement``: share of positions where both put the same token first, that of greedy drafting.
        """
        predicted, target = self.predict(module, batch, batch.features), batch.features
        predicted, target = predicted.flatten(0, 1)[rows], target.flatten(0, 1)[rows]
        overlap, agree = predicted.new_zeros((), dtype=torch.float32), rows.new_zeros(())
        for start in range(0, len(rows), self.chunk_rows):
            chunk = slice(start, start + self.chunk_rows)
            q, p = self.ends.lm_head(predicted[chunk]).float(), self.ends.lm_head(target[chunk]).float()
            overlap += torch.minimum(p.softmax(-1), q.softmax(-1)).sum()
            agree += (p.argmax(-1) == q.argmax(-1)).sum()
        count = torch.tensor(len(rows), device=rows.device)
        found = {"expected_acceptance": Ratio(overlap, count), "top1_agreement": Ratio(agree, count)}
        return found | by_position(self, batch, rows, predicted, target)

    def drafters(self, target: TargetModel, weights: dict[str, Tensor]) -> dict[str, LearnedDrafter]:
        adapter = KangarooAdapter(target.config)
        load_state(adapter, weights)
        return {"chain": KangarooDrafter(target, adapter, self.kangaroo.exit_layer)}

    def drafter_config(self) -> dict[str, Any]:
        return {"exit_layer": self.kangaroo.exit_layer}


@torch.no_grad()
def chain_alpha(head: Any, ends: FrozenEnds, batch: Batch, depth: int = CHAIN_DEPTH) -> list[Ratio]:
    """n-alpha for n = 0 .. depth - 1 on fixed text (EAGLE paper, section 4, "Acceptance rate").

    From every index i a chain is drafted: step 0 reads the true features up to feature_i and guesses token_{i+2}; step
    n reads those and the head's own n predictions in the place of feature_{i+1} .. feature_{i+n}, and guesses
    token_{i+n+2}. A guess (argmax) is accepted if it is the target's argmax there. The text is fixed, so a chain goes
    on only while its guess was accepted AND is the token that the text has: only then are the stored features those
    that the target would compute. n-alpha is the share accepted of the guesses made at step n whose token belongs to an
    answer. It is conditional: chains that ended earlier do not count. On text that is not the target's own greedy
    output it is pessimistic for n = 0 and optimistic for the rest: chains that get so far went through easy text.

    All chains run side by side: block n of a sequence of (n + 1) L inputs holds step n of the chains from
    i = 0 .. L - 1, which sees the true inputs up to i and its own earlier steps.
    """
    rows, length = batch.segments.shape
    argmax = _argmax(ends, batch.features)
    features, tokens = [batch.features], [torch.roll(batch.input_ids, -1, dims=1)]
    true_block = batch.attention_mask()
    if true_block is None:
        true_block = torch.ones(1, 1, length, length, dtype=torch.bool, device=argmax.device).tril()
    true_block = true_block.expand(rows, 1, length, length)
    own = torch.eye(length, dtype=torch.bool, device=argmax.device).expand(rows, 1, length, length)
    alive = batch.segments >= 0
    ratios = []
    for n in range(depth):
        mask = _chain_mask(true_block, own, n)
        positions = torch.cat([batch.position_ids + step for step in range(n + 1)], 1)
        predicted = head(torch.cat(features, 1), ends.embed(torch.cat(tokens, 1)), positions, mask)[:, -length:]
        guess = _argmax(ends, predicted)
        counted = alive & shift(batch.loss_mask, n + 2, batch.segments)
        accepted = counted & (guess == shift(argmax, n + 1, batch.segments))
        ratios.append(Ratio(accepted.sum(), counted.sum()))
        text = torch.roll(batch.input_ids, -(n + 2), dims=1)
        alive = accepted & (guess == text)
        features.append(predicted)
        tokens.append(text)
    return ratios


def _chain_mask(true_block: Tensor, own: Tensor, steps: int) -> Tensor:
    """bool ``[R, 1, (steps + 1) L, (steps + 1) L]`` of ``chain_alpha``'s blocks."""
    none = torch.zeros_like(own)
    lines = []
    for step in range(steps + 1):
        seen = [true_block] + [own if 0 < other <= step else none for other in range(1, steps + 1)]
        lines.append(torch.cat(seen, dim=3))
    return torch.cat(lines, dim=2)


def _argmax(ends: FrozenEnds, features: Tensor) -> Tensor:
    """The most likely token ``[R, L]`` after each feature ``[R, L, H]``, a row of logits at a time."""
    return torch.stack([ends.lm_head(row).argmax(-1) for row in features])
