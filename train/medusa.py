"""Train Medusa heads on a frozen target (Medusa-1): the cross-entropy of the tokens behind the next one.

    deepspeed train/medusa.py --config configs/medusa/stdlib.yaml [--resume] [key=value ...]
    python train/medusa.py --config configs/medusa/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/medusa.py --config configs/medusa/stdlib.yaml --overfit 8    # is the pipeline sound?

Processes and files are as train/eagle.py says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from train.cli import program
from train.config import TrainConfig
from train.task import Ratio, Task

if TYPE_CHECKING:  # torch is imported within functions: see train/task.py
    from collections.abc import Callable

    from torch import Tensor

    from drafters.model.ends import FrozenEnds
    from train.data.packing import Batch


class MedusaConfig(TrainConfig):
    """The keys of a Medusa run beside those of every run.

    ``labels: target`` learns the target's own distribution of the token that a head predicts, ``tokens`` the token that
    the text has, as published. The former says more a token, and is what drafts are verified by, also on text that the
    target did not write. Held-out figures are against the target's distribution either way.
    """

    drafter: ClassVar[str] = "medusa"

    heads: int = Field(4, ge=1, le=64, description="K: head k predicts the token k + 1 ahead")
    layers: int = Field(1, ge=1, le=64, description="residual blocks of a head")
    own_lm_heads: bool = Field(False, description="as published: an LM head each, which begins as the target's")
    labels: Literal["target", "tokens"] = Field("target", description="what a head learns: see above")
    head_decay: float = Field(0.8, gt=0, le=1, description="head k's loss counts lambda_k = head_decay^k")

    @property
    def trains_lm_head(self) -> bool:
        return self.own_lm_heads

    @model_validator(mode="after")
    def _has_such_a_loss(self) -> Self:
        if self.labels == "tokens" and (self.classification_loss != "cross_entropy" or self.top_k_weight):
            raise ValueError(
                f"classification_loss: {self.classification_loss} and top_k_weight: {self.top_k_weight:g} compare "
                "distributions, and labels: tokens has none; set labels=target, or classification_loss=cross_entropy "
                "top_k_weight=0"
            )
        if self.own_lm_heads and (self.precision, self.zero_stage) != ("float32", 0):
            # The loss multiplies with them outside of the module's forward, where ZeRO takes no gradients up.
            raise ValueError(
                f"own_lm_heads are trained with precision: float32 and zero_stage: 0 alone, not {self.precision} and "
                f"{self.zero_stage}; set precision=float32 zero_stage=0 or own_lm_heads=false"
            )
        return self


class MedusaTask(Task):
    """Section 2.2.1 of the paper (Cai et al. 2024), p^(k) of head k, p of the target, K heads:

    L = sum_k lambda_k L_k,  lambda_k = 0.8^k,  L_k = CrossEntropy(token_{i+k+1}, p_i^(k)), or what labels and
    classification_loss say

    Here row j is about the token j + 1, and so about p_j: head k predicts it at i = j - k. All heads have the same
    rows, and a row's p_j is worked out once for all of them.
    """

    schema = MedusaConfig
    config: MedusaConfig
    ahead = 1
    drafts: ClassVar[dict[str, dict[str, Any]]] = {"chain": {"tree": "chain"}, "tree": {"tree": "static"}}

    def __init__(self, config: MedusaConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        self.own = self.module.lm_heads()  # type: ignore[operator, assignment]
        for head in self.own:
            head.weight.data.copy_(ends.lm_head.weight)
        every = range(config.heads)
        self.earliest = config.heads + 1
        self.constant_inputs = tuple(f"{head}.0.linear.weight" for head in every)
        self.lm_heads = tuple(f"{head}.{config.layers}.weight" for head in every) if self.own else ()
        self.lm_head_products = (config.labels == "target") + (3 if self.own else 2) * config.heads

    def rows(self, batch: Batch) -> Tensor:
        """Where the next token belongs to an answer, and all heads have something of the dialogue to read."""
        trained = batch.shifted(batch.loss_mask, 1) & (batch.position_ids >= self.config.heads)
        return trained.flatten().nonzero().squeeze(1)

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        """``[R, L, K, H]``: at j what each head gives for the token j + 1, head k at j - k."""
        import torch

        states = module(batch.features).unbind(2)
        return torch.stack([state.roll(k, dims=1) for k, state in enumerate(states, start=1)], dim=2)

    def ideal(self, target: Tensor) -> Tensor:
        return target[:, None].expand(-1, self.config.heads, -1)

    def loss_sums(self, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None = None) -> dict[str, Tensor]:
        if self.config.labels == "target":
            return super().loss_sums(module, batch, rows, noise_seed)
        tokens = batch.input_ids.roll(-1, dims=1).flatten()[rows]
        predicted = self.pairs(module, batch, rows)[0].transpose(0, 1)
        return self._weighted(self.classification(predicted, self._places(tokens)))

    def losses(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Of ``predicted [n, K, H]``: L, and each L_k; against the target's distribution, whatever ``labels`` says."""
        return self._weighted(self.classification(predicted.transpose(0, 1), target))

    def overlap(self, predicted: Tensor, target: Tensor) -> Tensor:
        """The mean over the heads."""
        import torch

        return torch.stack([overlap for overlap, _ in self._compared(predicted, target)]).mean(0)

    def same_first(self, predicted: Tensor, target: Tensor) -> Tensor:
        """Of the first head, which decides about all others' chances."""
        return self._compared(predicted[:, :1], target)[0][1]

    def heldout(self, module: Any, batch: Batch, predicted: Tensor, target: Tensor) -> dict[str, Ratio]:
        """``head_k_expected_acceptance`` and ``head_k_top1``: as ``Task`` has them, of each head where it is asked."""
        import torch

        count, found = torch.tensor(len(predicted), device=predicted.device), {}
        for k, (overlap, agree) in enumerate(self._compared(predicted, target), start=1):
            found[f"head_{k}_top1"] = Ratio(agree.sum(), count)
            found[f"head_{k}_expected_acceptance"] = Ratio(overlap.sum(), count)
        return found

    def drafter_config(self) -> dict[str, Any]:
        return {key: getattr(self.config, key) for key in ("heads", "layers", "own_lm_heads")}

    # ------------------------------------------------------------------------------------------- parts

    def _weighted(self, each: Tensor) -> dict[str, Tensor]:
        """The losses of ``each`` head ``[K]``."""
        import torch

        weights = self.config.head_decay ** torch.arange(1, len(each) + 1, device=each.device)
        parts = {f"head_{k}_loss": part for k, part in enumerate(each.unbind(), start=1)}
        return {"loss": (weights * each).sum()} | parts

    def _places(self, tokens: Tensor) -> Tensor:
        """``tokens`` among those of ``loss_head``, -1 for others."""
        if self.loss_ids is None:
            return tokens
        places = tokens.new_full((self.ends.lm_head.out_features,), -1)
        ids = self.loss_ids.to(tokens)
        return places.scatter_(0, ids, ids.new_ones(len(ids)).cumsum(0) - 1)[tokens]

    def _compared(self, predicted: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """``overlap_and_agreement`` of each head in ``predicted [n, K, H]``."""
        from train.losses import overlap_and_agreement

        size, lm_head = self.chunk_rows, self.ends.lm_head
        heads = zip(predicted.unbind(1), self.own or [lm_head] * self.config.heads, strict=False)
        return [overlap_and_agreement(states, target, lm_head, size, own) for states, own in heads]


if __name__ == "__main__":
    program("medusa")
