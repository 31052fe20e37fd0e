"""Align a draft model with its target (DistillSpec): an existing causal LM learns the target's distribution.

    deepspeed train/draft_model.py --config configs/draft_model/stdlib.yaml [--resume] [key=value ...]
    python train/draft_model.py --config configs/draft_model/stdlib.yaml --dry-run    # check; estimate what it takes
    deepspeed train/draft_model.py --config configs/draft_model/stdlib.yaml --overfit 8    # is the pipeline sound?

Processes and files are as train/eagle.py says; the run folder gets a model as transformers saves it (with `lora:` an
adapter as peft does), to be given to any method as `draft_model:`.
"""

from __future__ import annotations

import sys
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from train.cli import program
from train.core.config import TrainConfig
from train.core.task import Task
from train.draft.options import Boost, OnPolicy

if TYPE_CHECKING:  # torch is imported within functions: see train/core/task.py
    from collections.abc import Callable

    import torch
    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from drafters.base import Drafter
    from drafters.hub.checkpoint import TargetIdentity
    from drafters.model.target import TargetModel
    from train.core.engine import Engine
    from train.data.packing import Batch, Rewrite, TrainData
    from train.draft.coverage import Boosting
    from train.draft.module import DraftModule

GAMMA = 4  # tokens of the drafts that tau is measured with


class DraftModelConfig(TrainConfig):
    """The keys of a draft model's run beside those of every run."""

    drafter: ClassVar[str] = "draft_model"

    draft_model: str = Field(
        description="folder or Hub name of the causal LM that is trained; of the target's tokenizer"
    )
    divergence: Literal["forward_kl", "reverse_kl", "jsd", "total_variation", "lk_alpha", "lk_lambda", "tokens"] = (
        Field(
            "forward_kl",
            description="from the target's distribution; tokens: the cross-entropy of the text's own (BiLD)",
        )
    )
    beta: float = Field(0.5, gt=0, lt=1, description="of jsd: the target's share in the mixture")
    freeze_ends: bool = Field(
        False, description="leave its embedding and LM head as they are: for one of the target's own layers"
    )
    on_policy: OnPolicy | None = None
    boost: Boost | None = None

    @property
    def measured_by(self) -> dict[str, Any]:
        return {"drafter": "speculative", "draft_model": str(self.out)}

    @property
    def trains_lm_head(self) -> bool:
        return self.lora is None and not self.freeze_ends

    @property
    def provenance_file(self) -> str:
        return "training.json"

    @property
    def lora_base(self) -> str | None:
        return self.draft_model

    @property
    def other_models(self) -> dict[str, str]:
        earlier = self.boost.after if self.boost else []
        return {"draft_model": self.draft_model} | {f"boost.after[{n}]": name for n, name in enumerate(earlier)}

    @model_validator(mode="after")
    def _fits_a_draft_model(self) -> Self:
        if self.draft_vocab is not None:
            raise ValueError(
                f"draft_vocab is {self.draft_vocab}, and a draft model keeps its whole LM head; leave it out, and list "
                "tokens in what was trained: python -m train.draft_vocab"
            )
        if self.loss_vocab is not None and self.trains_lm_head:
            raise ValueError(
                f"loss_vocab is {self.loss_vocab}, and the draft model's LM head is trained, of which each token has "
                "to learn; leave it out, or set freeze_ends=true"
            )
        if self.init_from is not None:
            raise ValueError(f"init_from is {self.init_from}, and a draft model starts as draft_model says; set that")
        for key in ("classification_loss", "top_k_weight"):
            if (value := getattr(self, key)) != type(self).model_fields[key].default:
                raise ValueError(f"{key} is {value}, and a draft model learns by its divergence; set that instead")
        if self.on_policy and self.features != "online":
            raise ValueError(
                f"on_policy needs the target beside the training, and features is {str(self.features)!r}: set "
                "features=online with data.train and data.heldout"
            )
        if self.on_policy and self.save_every % self.on_policy.every:
            every = self.on_policy.every  # else a resumed run would go on with other answers
            raise ValueError(f"save_every is {self.save_every}, and on_policy.every {every}; save every {every} or so")
        if self.zero_stage == 3:
            raise ValueError("zero_stage is 3, which would split the draft model's LM head; set 0, 1 or 2")
        return self


class DraftModelTask(Task):
    """DistillSpec (Zhou et al. 2023, arXiv 2310.08461), section 3: the mean over the answers' tokens of
    D(p(. | x, y_<t), q(. | x, y_<t)), p of the target and q of the draft model. The text y is the dialogues' (made by
    data_prep.regenerate it is the target's own) or, with ``on_policy``, in part the draft model's.

    Row i is about token_{i+1}, as the target's feature_i is.
    """

    schema = DraftModelConfig
    config: DraftModelConfig
    module: DraftModule
    ahead = 1
    drafts: ClassVar[dict[str, dict[str, Any]]] = {"chain": {"gamma": GAMMA}}

    def build(self) -> nn.Module:
        from train.draft.module import draft_module

        module = draft_module(self.config.draft_model, self.config.lora)
        ours, theirs = module.lm_head.out_features, self.ends.lm_head.out_features
        if ours != theirs:
            raise ValueError(
                f"draft_model {self.config.draft_model} has a vocabulary of {ours} tokens and target "
                f"{self.config.target} one of {theirs}: it may draft for it, but training compares the two "
                "distributions token by token; choose a draft model with as many"
            )
        ends = [module.base.get_input_embeddings().weight, module.lm_head.weight]
        self.lm_heads = tuple(name for name, weights in module.named_parameters() if any(weights is x for x in ends))
        if self.config.freeze_ends:
            for weights in ends:
                weights.requires_grad_(False)
        return module

    def load(self) -> None:
        from drafters.drafting.draft_model import check_tokenizers, tokenizer_vocabulary
        from train.draft.module import load_weights

        config = self.config
        names = (config.draft_model, None), (config.target, config.revision)
        ours, theirs = (tokenizer_vocabulary(*name) for name in names)
        check_tokenizers(config.draft_model, ours, config.target, theirs)
        load_weights(self.module, config.draft_model)

    @property
    def layers_config(self) -> PretrainedConfig:
        config: PretrainedConfig = self.module.base.config
        return config

    @property
    def row_flops(self) -> int:
        """Logits of the target; logits of the draft model, and their gradients by its state and its LM head."""
        ours, theirs = self.module.lm_head, self.ends.lm_head
        products = 3 if ours.weight.requires_grad else 2
        vocab = self.config.loss_vocab or theirs.out_features
        return 2 * vocab * (theirs.in_features + products * ours.in_features)

    @property
    def draft_lm_head(self) -> nn.Linear:
        return self.module.lm_head

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        return module(batch.input_ids, batch.position_ids, batch.attention())

    def rows(self, batch: Batch) -> Tensor:
        rows = super().rows(batch)
        if self.boost is None:
            return rows
        return rows[self.boost.trained(batch).flatten()[rows]]

    @cached_property
    def boost(self) -> Boosting | None:
        """What is left to train of batches."""
        from train.draft.coverage import Boosting

        options = self.config.boost
        return Boosting(options, self.ends, self.config.dtype, self.chunk_rows) if options else None

    def rewriter(self, data: TrainData, engine: Engine, step: Callable[[], int]) -> Rewrite | None:
        from train.draft.on_policy import OnPolicyText

        if self.config.on_policy is None:
            return None

        def draft_model() -> TargetModel:
            return self.draft_model(engine.weights(), engine.device, self.config.dtype, captured=False)

        return OnPolicyText(self.config.on_policy, data, draft_model, step).rewrite

    def loss_sums(self, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None = None) -> dict[str, Tensor]:
        if self.config.divergence != "tokens":
            return super().loss_sums(module, batch, rows, noise_seed)
        predicted = self.predict(module, batch).flatten(0, 1)[rows]
        tokens = batch.input_ids.roll(-1, dims=1).flatten()[rows]
        return {"loss": self.divergence(predicted, self.places(tokens), "cross_entropy")}

    def losses(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The divergence from the target; of a training on the text's tokens, which are not known here, forward KL."""
        name = "forward_kl" if self.config.divergence == "tokens" else self.config.divergence
        return {"loss": self.divergence(predicted, target, name)}

    def divergence(self, predicted: Tensor, target: Tensor, name: str) -> Tensor:
        """Of ``predicted [n, h]`` from the target's features ``[n, H]``, or from tokens int64 ``[n]`` (``places``): the
        sum. With ``loss_vocab`` both distributions are over its tokens alone."""
        from train.core import losses

        given = {"jsd": {"beta": self.config.beta}, "lk_lambda": {"eta": self.config.lk_eta}}.get(name, {})
        divergence = partial(getattr(losses, name), **given)
        head, own = self.loss_head, [self.loss_rows(self.draft_lm_head.weight)]
        return losses.divergence_sum(predicted, target, head, divergence, None, self.chunk_rows_of(head), own)

    def ideal(self, target: Tensor) -> Tensor:
        """None has the target's width: of the right shape alone."""
        return target.new_zeros(len(target), self.draft_lm_head.in_features)

    def floor(self, target: Tensor) -> Tensor:
        return target.new_zeros(())

    def drafters(self, target: TargetModel, weights: dict[str, Tensor]) -> dict[str, Drafter]:
        model = self.draft_model(weights, target.device, target.dtype)
        return {
            kind: self.drafter.from_options(target, draft_model=model, **options)
            for kind, options in self.drafts.items()
        }

    def draft_model(
        self, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype, captured: bool = True
    ) -> TargetModel:
        """A model of its own with copies of ``weights``, adapters merged.

        ``captured``: on a GPU its forwards may be captured, which takes longer than one step's few texts.
        """
        from drafters.model.fused import why_not
        from drafters.model.target import TargetModel
        from train.draft.export import with_weights

        model = with_weights(self.config, weights).merged().to(device, dtype)
        fused = not captured and all(why_not(layer, model.config) is None for layer in model.model.layers)
        return TargetModel(model, name=str(self.config.out), engine="fused" if fused else None)

    def export(self, weights: dict[str, Tensor], target: TargetIdentity, training: dict[str, Any]) -> None:
        from train.draft.export import export

        export(self.config, weights, {"target": target.model_dump(), "training": training})


if __name__ == "__main__":
    program("draft_model")
