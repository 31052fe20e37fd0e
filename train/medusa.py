"""Train Medusa heads on a frozen target (Medusa-1): the cross-entropy of the tokens behind the next one.

    deepspeed train/medusa.py --config configs/medusa/stdlib.yaml [--resume] [key=value ...]
    deepspeed train/medusa.py --config configs/medusa/stdlib-joint.yaml      # and the target with them (Medusa-2)
    python train/medusa.py --config configs/medusa/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/medusa.py --config configs/medusa/stdlib.yaml --overfit 8    # can it learn 8 dialogues?

Processes and files are those of train/eagle.py.
"""

import sys
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from drafters.config import Amount, Config
from drafters.heads.medusa.shape import MedusaShape
from train.core.config import Decay, Lora, TrainConfig, Weight
from train.preflight.command import program


class Joint(Config):
    """``joint:``: tune the target together with the heads (Medusa-2), which makes another target."""

    lora: Lora | None = Field(
        Lora(r=32, alpha=16, dropout=0.05, targets="all-linear"),
        description="of the target's layers, by peft; null: train all layers and the norm",
    )
    lambda_0: Weight = Field(0.2, gt=0, description="weight of the heads' losses beside the target's own")
    rate: float = Field(0.25, gt=0, le=1000, description="the target's learning rate, as a share of the heads'")
    heads_first: Amount = Field(0, ge=0, description="steps without updates of the target; then its rate warms up, too")


class MedusaConfig(TrainConfig):
    """The keys of a Medusa run.

    ``labels: target`` learns the target's distribution of the token that a head predicts, ``tokens`` the text's token,
    as published. The distribution has more information per token, and verifies drafts, also on text that the target did
    not write. Held-out figures compare with the target's distribution in both cases.
    """

    drafter: ClassVar[str] = "medusa"

    head: MedusaShape
    labels: Literal["target", "tokens"] = Field("target", description="what a head learns: see above")
    head_decay: Decay = Field(0.8, description="weight of head k's loss: lambda_k = head_decay^k")
    joint: Joint | None = None

    @property
    def tuned_folder(self) -> Path:
        """The folder of the tuned target, with ``joint``."""
        return self.out / "target"

    @property
    def measured_target(self) -> dict[str, Any]:
        return super().measured_target if self.joint is None else {"path": str(self.tuned_folder)}

    @property
    def trains_lm_head(self) -> bool:
        return self.head.own_lm_heads

    @property
    def computes_in(self) -> str:
        return "float32" if self.head.own_lm_heads else self.precision

    @model_validator(mode="after")
    def _has_such_a_loss(self) -> Self:
        if self.labels == "tokens" and (self.classification_loss != "cross_entropy" or self.top_k_weight):
            raise ValueError("labels: tokens needs classification_loss: cross_entropy and top_k_weight: 0; set them")
        if self.head.own_lm_heads and not (self.precision in ("auto", "float32") and self.zero_stage == 0):
            # The loss multiplies with them outside of the module's forward, where ZeRO collects no gradients.
            raise ValueError("with own_lm_heads, set precision=float32 zero_stage=0 or own_lm_heads=false")
        for key in ("own_lm_heads", "lora", "loss_vocab", "top_k_weight") if self.joint else ():
            if value := getattr(self.head if key == "own_lm_heads" else self, key):
                raise ValueError(f"{key} is {value}, and joint tunes the whole target (or by joint.lora); leave it out")
        if self.joint and self.classification_loss != "cross_entropy":
            raise ValueError(f"joint needs classification_loss: cross_entropy, found {self.classification_loss}")
        if self.joint and self.zero_stage == 3:
            raise ValueError("zero_stage is 3, and joint trains at 0, 1 or 2; set one of these")
        return self


if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(MedusaConfig, __doc__)

from collections.abc import Callable

import torch
from torch import Tensor, nn

from drafters.base import Drafter
from drafters.hub.checkpoint import TargetIdentity
from drafters.model.ends import FrozenEnds
from drafters.model.target import TargetModel
from train.core.config import TrainConfig
from train.core.losses import Pairs
from train.core.task import Ratio, Task, mean
from train.data.packing import Batch
from train.draft.joint import HEADS, TARGET, JointModule, export_tuned, of_part, tuned_target
from train.draft.module import causal_module, check_attention, load_weights, names_of


class MedusaTask(Task):
    """Section 2.2.1 of the paper (Cai et al. 2024), p^(k) of head k, p of the target, K heads:

    L = sum_k lambda_k L_k,  lambda_k = 0.8^k,  L_k = CrossEntropy(token_{i+k+1}, p_i^(k)), or as labels and
    classification_loss say

    Here row j is about the token j + 1, so about p_j: head k predicts it at i = j - k. All heads have the same rows, so
    a row's p_j is computed once for all of them.
    """

    schema = MedusaConfig
    config: MedusaConfig
    ahead = 1
    drafts: ClassVar[dict[str, dict[str, Any]]] = {"chain": {"tree": "chain"}, "tree": {"tree": "static"}}

    @classmethod
    def of(cls, config: TrainConfig) -> type[Task]:
        return JointTask if isinstance(config, MedusaConfig) and config.joint else cls

    def __init__(self, config: MedusaConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        module: Any = self.module
        self.heads.drafter_heads = module.lm_heads() if config.head.own_lm_heads else []
        for head in self.heads.drafter_heads:
            head.weight.data.copy_(ends.lm_head.scaled)
        every = range(config.head.heads)
        self.predictions, self.earliest = config.head.heads, config.head.heads + 1
        self.constant_inputs = tuple(f"{head}.0.linear.weight" for head in every)
        self.lm_heads = (
            tuple(f"{head}.{config.head.layers}.weight" for head in every) if self.heads.drafter_heads else ()
        )
        self.against_logits = config.labels == "target"

    def rows(self, batch: Batch, seed: int | None = None) -> Tensor:
        """The positions whose next token belongs to an answer, and from which all heads read their own dialogue."""
        trained = batch.shifted(batch.loss_mask, 1) & (batch.position_ids >= self.config.head.heads)
        return trained.flatten().nonzero().squeeze(1)

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        """``[K, R, L, H]``: at j each head's output for the token j + 1, head k's from j - k."""
        return aligned(module(batch.features), nearest=1)

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """L, and each L_k."""
        each = self.heads.classification(pairs)
        return {"loss": (self.decay(each) * each).sum()} | head_losses(each)

    def decay(self, each: Tensor) -> Tensor:
        """lambda_1, lambda_2, ... for the losses ``each``."""
        return self.config.head_decay ** torch.arange(1, len(each) + 1, device=each.device)

    def heldout(self, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
        """``head_k_expected_acceptance`` and ``head_k_top1`` of each head, as the base class has them."""
        ratios: dict[str, Ratio] = {}
        for k, (overlap, agree) in enumerate(zip(*self.heads.compare(self.judged(pairs)), strict=True), start=1):
            ratios |= {f"head_{k}_top1": mean(agree), f"head_{k}_expected_acceptance": mean(overlap)}
        return ratios


class JointTask(MedusaTask):
    """Section 2.2.2, p^(0) of the target as it is now:

    L = L_0 + lambda_0 sum_k lambda_k L_k

    L_0 is the cross-entropy of p^(0), like that of the heads. With ``labels: target`` it is against the distribution of
    the untuned target, from the features: the self-distillation of section 2.3.2, which keeps the target near to what
    it was. With ``labels: tokens`` it is against the text. The target has its own learning rate, and may begin later
    (the section's differential rates and heads' warm-up).

    Prediction 0 is the tuned target's own, predictions 1 to K are the heads'. Held-out acceptance is by the tuned
    target, because it verifies.
    """

    module: JointModule

    def __init__(self, config: MedusaConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        self.drafting_module = self.module.heads
        self.lm_heads = names_of(self.module, self.module.target.ends())
        self.constant_inputs = ()
        self.predictions += 1

    def build(self) -> nn.Module:
        assert self.config.joint is not None
        target = causal_module("target", self.config.target, self.ends.config, self.config.joint.lora)
        return JointModule(target, self.drafter.build_module(self.ends.config, self.head))

    def check_attention(self) -> None:
        check_attention(self.module.target, f"target: {self.config.target}")

    def load(self) -> None:
        load_weights(self.module.target, self.config.target, self.config.revision)

    def rate_factors(self, step: int) -> dict[str, float]:
        joint, warmup = self.config.joint, self.config.warmup_steps
        assert joint is not None
        late = step - joint.heads_first
        warm = min(1.0, (late + 1) / warmup) if joint.heads_first and warmup else 1.0
        return {TARGET: joint.rate * warm if late >= 0 else 0.0}

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        """``[1 + K, R, L, H]``: at j the outputs of target and heads for the token j + 1, head k's from j - k."""
        return aligned(module(batch.input_ids, batch.position_ids, batch.attention()), nearest=0)

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        assert self.config.joint is not None
        every = self.heads.classification(pairs)
        first, each = every[0], every[1:]
        loss = first + self.config.joint.lambda_0 * (self.decay(each) * each).sum()
        return {"loss": loss, "target_loss": first} | head_losses(each)

    def judged(self, pairs: Pairs) -> Pairs:
        return Pairs(pairs.predictions[1:], pairs.predictions[0])

    def heldout(self, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
        """Also ``target_expected_acceptance`` and ``target_top1``: how near the tuned target is to the untuned one."""
        ratios = super().heldout(module, batch, pairs)
        overlap, agree = self.heads.compare(Pairs(pairs.predictions[:1], pairs.targets))
        return ratios | {"target_expected_acceptance": mean(overlap), "target_top1": mean(agree)}

    def drafters(self, target: TargetModel, weights: dict[str, Tensor]) -> dict[str, Drafter]:
        model: Any = tuned_target(self.config, self.ends.config, weights).merged()
        tuned = TargetModel(model.to(target.device, target.dtype), name=str(self.config.tuned_folder))
        return super().drafters(tuned, of_part(weights, HEADS))

    def export(self, weights: dict[str, Tensor], target: TargetIdentity, training: dict[str, Any]) -> None:
        """The tuned target first, because the heads' checkpoint names its fingerprint."""
        base = target.model_dump()
        tuned = export_tuned(self.config, self.ends.config, weights, {"target": base, "training": training})
        super().export(of_part(weights, HEADS), tuned, training | {"tuned_from": base})


def aligned(states: Tensor, nearest: int) -> Tensor:
    """Outputs ``[R, L, K, H]``, the k-th about the token ``nearest`` + k behind the next one -> ``[K, R, L, H]``, all
    outputs about one token in its row."""
    each = enumerate(states.unbind(2), start=nearest)
    return torch.stack([state.roll(k, dims=1) for k, state in each])


def head_losses(each: Tensor) -> dict[str, Tensor]:
    """By name, the loss of each head ``[K]``."""
    return {f"head_{k}_loss": part for k, part in enumerate(each.unbind(), start=1)}


TASK = MedusaTask
