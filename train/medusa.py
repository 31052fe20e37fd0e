"""Train Medusa heads on a frozen target (Medusa-1): the cross-entropy of the tokens behind the next one.

    deepspeed train/medusa.py --config configs/medusa/stdlib.yaml [--resume] [key=value ...]
    deepspeed train/medusa.py --config configs/medusa/stdlib-joint.yaml      # and the target with them (Medusa-2)
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

from drafters.config import Amount, Config
from train.cli import program
from train.core.config import Lora, TrainConfig
from train.core.task import Ratio, Task

if TYPE_CHECKING:  # torch is imported within functions: see train/core/task.py
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn

    from drafters.base import Drafter
    from drafters.hub.checkpoint import TargetIdentity
    from drafters.model.ends import FrozenEnds
    from drafters.model.target import TargetModel
    from train.data.packing import Batch
    from train.draft.joint import JointModule


class Joint(Config):
    """``joint:``: tune the target together with the heads (Medusa-2). What is trained then is another target."""

    lora: Lora | None = Field(
        Lora(r=32, alpha=16, dropout=0.05, targets="all-linear"),
        description="beside its layers, by peft; null: all of them, and the norm",
    )
    lambda_0: float = Field(0.2, gt=0, description="what the heads' losses count beside the target's own")
    rate: float = Field(0.25, gt=0, description="the target's learning rate, times learning_rate, which is the heads'")
    heads_first: Amount = Field(0, ge=0, description="steps in which the target stays as it is; then it warms up, too")


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
    joint: Joint | None = None

    @property
    def tuned_folder(self) -> Path:
        """Where ``joint`` leaves the target that it tuned."""
        return self.out / "target"

    @property
    def measured_target(self) -> dict[str, Any]:
        return super().measured_target if self.joint is None else {"path": str(self.tuned_folder)}

    @property
    def trains_lm_head(self) -> bool:
        return self.own_lm_heads

    @property
    def dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.own_lm_heads else super().dtype

    @model_validator(mode="after")
    def _has_such_a_loss(self) -> Self:
        if self.labels == "tokens" and (self.classification_loss != "cross_entropy" or self.top_k_weight):
            raise ValueError(
                f"classification_loss: {self.classification_loss} and top_k_weight: {self.top_k_weight:g} compare "
                "distributions, and labels: tokens has none; set labels=target, or classification_loss=cross_entropy "
                "top_k_weight=0"
            )
        if self.own_lm_heads and not (self.precision in ("auto", "float32") and self.zero_stage == 0):
            # The loss multiplies with them outside of the module's forward, where ZeRO takes no gradients up.
            raise ValueError(
                f"own_lm_heads are trained with precision: float32 and zero_stage: 0 alone, not {self.precision} and "
                f"{self.zero_stage}; set precision=float32 zero_stage=0 or own_lm_heads=false"
            )
        return self

    @model_validator(mode="after")
    def _fits_a_joint_training(self) -> Self:
        if self.joint is None:
            return self
        refused = {
            "own_lm_heads": "the heads draft through the target's",
            "lora": "what is tuned by LoRA is the target: joint.lora",
            "loss_vocab": "the target has to keep its whole vocabulary",
            "top_k_weight": "the target is trained by cross-entropy",
        }
        for key, why in refused.items():
            if value := getattr(self, key):
                raise ValueError(f"{key} is {value}, and with joint {why}; leave one of the two out")
        if self.classification_loss != "cross_entropy":
            what = f"classification_loss is {self.classification_loss}, and with joint"
            raise ValueError(f"{what} the target is trained by cross-entropy; set that, or leave joint out")
        if self.zero_stage == 3:
            raise ValueError("zero_stage is 3, and with joint the target's layers are called one by one; set 0, 1 or 2")
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

    @classmethod
    def of(cls, config: TrainConfig) -> type[Task]:
        return JointTask if isinstance(config, MedusaConfig) and config.joint else cls

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
        return self._aligned(module(batch.features), nearest=1)

    def ideal(self, target: Tensor) -> Tensor:
        return target[:, None].expand(-1, self.config.heads, -1)

    def loss_sums(self, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None = None) -> dict[str, Tensor]:
        if self.config.labels == "target":
            return super().loss_sums(module, batch, rows, noise_seed)
        tokens = batch.input_ids.roll(-1, dims=1).flatten()[rows]
        predicted = self.pairs(module, batch, rows)[0].transpose(0, 1)
        return self._weighted(self.classification(predicted, self.places(tokens)))

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

    def _aligned(self, states: Tensor, nearest: int) -> Tensor:
        """``states [R, L, K, H]``, of which the first are about the ``nearest`` of a row's tokens behind the next one,
        with all that are about one token in its row."""
        import torch

        each = enumerate(states.unbind(2), start=nearest)
        return torch.stack([state.roll(k, dims=1) for k, state in each], dim=2)

    def _weighted(self, each: Tensor) -> dict[str, Tensor]:
        """The losses of ``each`` head ``[K]``."""
        import torch

        weights = self.config.head_decay ** torch.arange(1, len(each) + 1, device=each.device)
        parts = {f"head_{k}_loss": part for k, part in enumerate(each.unbind(), start=1)}
        return {"loss": (weights * each).sum()} | parts

    def _compared(self, predicted: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor]]:
        """``overlap_and_agreement`` of each head in ``predicted [n, K, H]``."""
        from train.core.losses import overlap_and_agreement

        size, lm_head = self.chunk_rows, self.ends.lm_head
        heads = zip(predicted.unbind(1), self.own or [lm_head] * predicted.shape[1], strict=False)
        return [overlap_and_agreement(states, target, lm_head, size, own) for states, own in heads]


class JointTask(MedusaTask):
    """Section 2.2.2, p^(0) of the target as it is now:

    L = L_0 + lambda_0 sum_k lambda_k L_k

    L_0 is the cross-entropy of p^(0) like that of the heads. With ``labels: target`` it is against the target's
    distribution as it was, from the features: the self-distillation of section 2.3.2, which keeps the target near to
    what it was. With ``labels: tokens`` it is the text's. The target has a learning rate of its own, and may begin
    later (the section's differential rates and heads' warm-up).

    A prediction is ``[n, 1 + K, H]``, the target's own first. Held-out acceptance is that of the target as it is now,
    which is the one that verifies.
    """

    module: JointModule

    def __init__(self, config: MedusaConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        base = self.module.target.base
        ends_of = [base.get_input_embeddings().weight, base.get_output_embeddings().weight]
        named = self.module.named_parameters()
        self.lm_heads = tuple(name for name, weights in named if any(weights is end for end in ends_of))
        self.constant_inputs = ()
        self.lm_head_products += 2

    def build(self) -> nn.Module:
        from train.draft.joint import joint_module

        heads: Any = self.new_module()
        return joint_module(self.config, self.ends.config, heads)

    def load(self) -> None:
        from train.draft.module import load_weights

        load_weights(self.module.target, self.config.target, self.config.revision)

    @property
    def drafting_module(self) -> nn.Module:
        return self.module.heads

    def rate_factors(self, step: int) -> dict[str, float]:
        from train.draft.joint import TARGET

        joint, warmup = self.config.joint, self.config.warmup_steps
        assert joint is not None
        late, warm = step - joint.heads_first, 1.0
        if joint.heads_first and warmup:
            warm = min(1.0, (late + 1) / warmup)
        return {TARGET: joint.rate * warm if late >= 0 else 0.0}

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        """``[R, L, 1 + K, H]``: at j what target and heads give for the token j + 1, head k at j - k."""
        return self._aligned(module(batch.input_ids, batch.position_ids, batch.attention()), nearest=0)

    def ideal(self, target: Tensor) -> Tensor:
        return target[:, None].expand(-1, 1 + self.config.heads, -1)

    def overlap(self, predicted: Tensor, target: Tensor) -> Tensor:
        return super().overlap(predicted[:, 1:], predicted[:, 0])

    def same_first(self, predicted: Tensor, target: Tensor) -> Tensor:
        return super().same_first(predicted[:, 1:], predicted[:, 0])

    def heldout(self, module: Any, batch: Batch, predicted: Tensor, target: Tensor) -> dict[str, Ratio]:
        """Of the heads, as the base class has it; and ``target_expected_acceptance`` and ``target_top1``: how near the
        target as it is now is to what it was."""
        import torch

        found = super().heldout(module, batch, predicted[:, 1:], predicted[:, 0])
        [(overlap, agree)] = self._compared(predicted[:, :1], target)
        count = torch.tensor(len(predicted), device=predicted.device)
        more = {"target_expected_acceptance": Ratio(overlap.sum(), count), "target_top1": Ratio(agree.sum(), count)}
        return found | more

    def drafters(self, target: TargetModel, weights: dict[str, Tensor]) -> dict[str, Drafter]:
        from drafters.model.target import TargetModel
        from train.draft.joint import HEADS, of_part, tuned_target

        model: Any = tuned_target(self.config, self.ends.config, weights).merged()
        tuned = TargetModel(model.to(target.device, target.dtype), name=str(self.config.tuned_folder))
        return super().drafters(tuned, of_part(weights, HEADS))

    def export(self, weights: dict[str, Tensor], target: TargetIdentity, training: dict[str, Any]) -> None:
        """The tuned target first, whose fingerprint the heads' checkpoint names."""
        from train.draft.joint import HEADS, export_tuned, of_part

        base = target.model_dump()
        tuned = export_tuned(self.config, self.ends.config, weights, {"target": base, "training": training})
        super().export(of_part(weights, HEADS), tuned, training | {"tuned_from": base})

    def _weighted(self, each: Tensor) -> dict[str, Tensor]:
        assert self.config.joint is not None
        heads = super()._weighted(each[1:])
        return heads | {"loss": each[0] + self.config.joint.lambda_0 * heads["loss"], "target_loss": each[0]}


if __name__ == "__main__":
    program("medusa")
