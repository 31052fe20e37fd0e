"""Align a draft model with its target (DistillSpec): an existing causal LM learns the target's distribution.

    deepspeed train/draft_model.py --config configs/draft_model/stdlib.yaml [--resume] [key=value ...]
    python train/draft_model.py --config configs/draft_model/stdlib.yaml --dry-run    # check; estimate memory and time
    deepspeed train/draft_model.py --config configs/draft_model/stdlib.yaml --overfit 8    # can it learn 8 dialogues?

Processes and files are those of train/eagle.py; the run folder holds a model in transformers' format (with `lora:` an
adapter in peft's), for any method's `draft_model:`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from train.configs import DraftModelConfig
from train.preflight.command import program

if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(DraftModelConfig, __doc__)

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafters.base import Drafter
from drafters.drafting.draft_model import check_tokenizers, tokenizer_vocabulary
from drafters.hub.checkpoint import TargetIdentity
from drafters.model.ends import FrozenEnds
from drafters.model.fused import why_not
from drafters.model.target import TargetModel
from train.core.engine import Engine
from train.core.losses import Pairs
from train.core.runtime import dtype_of
from train.core.task import Task
from train.data.packing import Batch, Rewrite, TrainData
from train.draft.coverage import Boosting
from train.draft.export import export, with_weights
from train.draft.module import DraftModule, check_attention, draft_module, load_weights, names_of
from train.draft.on_policy import OnPolicyText

GAMMA = 4  # tokens of the drafts that tau is measured with


class DraftModelTask(Task):
    """DistillSpec (Zhou et al. 2023, arXiv 2310.08461), section 3: the mean over the answers' tokens of
    D(p(. | x, y_<t), q(. | x, y_<t)), p of the target and q of the draft model. The text y is the dialogues' (with
    data_prep.regenerate the target's own) or, with ``on_policy``, in part the draft model's.

    Row i is about token_{i+1}, as the target's feature_i is.
    """

    schema = DraftModelConfig
    config: DraftModelConfig
    module: DraftModule
    ahead = 1
    drafts: ClassVar[dict[str, dict[str, Any]]] = {"chain": {"gamma": GAMMA}}

    def __init__(self, config: DraftModelConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        self.layers_config = self.module.base.config
        self.heads.drafter_heads = [self.module.lm_head]
        self.against_logits = config.divergence != "tokens"
        self.boost = Boosting(config.boost, self.heads, dtype_of(config)) if config.boost else None

    def build(self) -> nn.Module:
        module = draft_module(self.config.draft_model, self.config.lora)
        ours, theirs = module.lm_head.out_features, self.ends.lm_head.out_features
        if ours != theirs:
            names = self.config.draft_model, self.config.target
            raise ValueError(
                f"draft_model {names[0]} has a vocabulary of {ours} tokens and target {names[1]} one of {theirs}, and "
                "training compares them token by token; choose a draft model with the target's"
            )
        self.lm_heads = names_of(module, module.ends())
        if self.config.freeze_ends:
            for weights in module.ends():
                weights.requires_grad_(False)
        return module

    def check_attention(self) -> None:
        check_attention(self.module, f"draft_model: {self.config.draft_model}")

    def load(self) -> None:
        config = self.config
        names = (config.draft_model, None), (config.target, config.revision)
        ours, theirs = (tokenizer_vocabulary(*name) for name in names)
        check_tokenizers(config.draft_model, ours, config.target, theirs)
        load_weights(self.module, config.draft_model)

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        return module(batch.input_ids, batch.position_ids, batch.attention())

    def rows(self, batch: Batch, seed: int | None = None) -> Tensor:
        rows = super().rows(batch, seed)
        if self.boost is None:
            return rows
        return rows[self.boost.trained(batch).flatten()[rows]]

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """The config's divergence; with ``divergence: tokens`` the cross-entropy of tokens, on held-out text the KL."""
        name: str = self.config.divergence
        if name == "tokens":
            name = "forward_kl" if pairs.targets.is_floating_point() else "cross_entropy"
        return {"loss": self.heads.divergence(pairs, name).sum()}

    def rewriter(self, data: TrainData, engine: Engine, step: Callable[[], int]) -> Rewrite | None:
        if self.config.on_policy is None:
            return None

        def draft_model() -> TargetModel:
            return self.draft_model(engine.weights(), engine.device, dtype_of(self.config), captured=False)

        return OnPolicyText(self.config.on_policy, data, draft_model, step).rewrite

    def drafters(self, target: TargetModel, weights: dict[str, Tensor]) -> dict[str, Drafter]:
        model = self.draft_model(weights, target.device, target.dtype)
        return {
            kind: self.drafter.from_options(target, draft_model=model, **options)
            for kind, options in self.drafts.items()
        }

    def draft_model(
        self, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype, captured: bool = True
    ) -> TargetModel:
        """A separate model with copies of ``weights``, adapters merged.

        ``captured``: whether its forwards may be captured on a GPU, which takes longer than one step's few texts.
        """
        model = with_weights(self.config, weights).merged().to(device, dtype)
        fused = all(why_not(layer, model.config) is None for layer in model.model.layers)
        return TargetModel(model, name=str(self.config.out), engine=None if captured else "fused" if fused else "stock")

    def export(self, weights: dict[str, Tensor], target: TargetIdentity, training: dict[str, Any]) -> None:
        export(self.config, weights, {"target": target.model_dump(), "training": training})


TASK = DraftModelTask
