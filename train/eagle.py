"""Train an EAGLE head: regression of the target's next feature, and the cross-entropy of the token after it.

    deepspeed train/eagle.py --config configs/eagle/stdlib.yaml [--resume] [key=value ...]
    python train/eagle.py --config configs/eagle/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/eagle.py --config configs/eagle/stdlib.yaml --overfit 8    # can it learn 8 dialogues?

The launcher starts the processes (--num_gpus N); plain `python train/eagle.py ...` is one process. The run folder
(`out` in the config) holds the trained drafter, metrics.jsonl, TensorBoard events and the resumable state.
"""

import sys
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from drafters.heads.eagle.shape import EagleShape
from train.core.config import TrainConfig, Weight
from train.preflight.command import program


class EagleConfig(TrainConfig):
    """The keys of an EAGLE run."""

    drafter: ClassVar[str] = "eagle"
    older: ClassVar[dict[str, Any]] = {"layer": "target"}

    head: EagleShape
    classification_weight: Weight = Field(0.1, description="w_cls of the EAGLE paper, section 3.2")
    start: Literal["random", "regression"] = Field(
        "random", description="first weights of fc: docs/training-options.md"
    )
    noise: Literal["paper", "code", "none"] = "paper"
    mask_alignment: Literal["shifted", "paper-code"] = "shifted"
    unroll: int = Field(1, ge=1, le=8, description="consecutive predictions from each trained position; 1 in the paper")
    unroll_weight: Weight = Field(1.0, gt=0, description="factor on the loss of each further prediction")

    @model_validator(mode="after")
    def _has_what_to_feed_back(self) -> Self:
        inputs = self.head.inputs
        if inputs == "token" and self.unroll > 1:
            raise ValueError(f"unroll: {self.unroll} feeds features back, and inputs: token has none; set unroll=1")
        if self.start == "regression" and not self.head.has_fc:
            raise ValueError(f"start: regression fits fc, and inputs: {inputs} has none; set start=random")
        return self


if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(EagleConfig, __doc__)

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from drafters.model.ends import FrozenEnds
from drafters.model.layers import default_layer
from train.core.losses import Pairs, regression_sum
from train.core.task import Ratio, target_states
from train.core.unroll import UnrolledTask
from train.data.packing import Batch, Source, Span
from train.data.regression import fit_fc
from train.watch.alpha import chain_alpha

NOISE_WIDTH = 0.1  # e: U(-0.1, 0.1)
CHAIN_DEPTH = 5  # 0-alpha to 4-alpha, as the paper reports


class EagleTask(UnrolledTask):
    """Section 3.2 of the paper (Li et al. 2024), f the target's features and t the tokens:

    f'_{i+1} = head(f_1 + e_1 .. f_i + e_i, t_2 .. t_{i+1}),  e from U(-0.1, 0.1)
    p_{i+2}  = softmax(LM_head(f_{i+1})),  p'_{i+2} = softmax(LM_head(f'_{i+1}))
    L_reg    = SmoothL1(f_{i+1}, f'_{i+1})
    L_cls    = CrossEntropy(p_{i+2}, p'_{i+2}), or the config's classification_loss
    L        = L_reg + w_cls L_cls,  w_cls = 0.1

    Row i predicts f_{i+1}, so the distribution of t_{i+2}.
    """

    schema = EagleConfig
    config: EagleConfig
    drafts: ClassVar[dict[str, dict[str, Any]]] = {
        "chain": {"tree": "chain", "depth": CHAIN_DEPTH},
        "tree": {"tree": "dynamic"},
    }
    constant_inputs = ("fc.weight",)  # it reads features and embeddings

    def __init__(self, config: EagleConfig, ends: FrozenEnds) -> None:
        if config.head.layer == "auto":  # run.json records the settled value, which a resumed run needs
            head = config.head.model_copy(update={"layer": default_layer(ends.config)})
            config = config.model_copy(update={"head": head})
        super().__init__(config, ends)
        self.predictions = self.passes = config.unroll
        self.token_shift = config.head.token_shift

    def fit(self, train: Source) -> None:
        fit_fc(self, train, 0.0 if self.config.noise == "none" else NOISE_WIDTH)

    def rows(self, batch: Batch, seed: int | None = None) -> Tensor:
        """``shifted`` trains i if the predicted token_{i+2} belongs to an answer.

        ``paper-code`` trains i if token_i does, as the released code. That omits the predictions of an answer's first
        two tokens (the second is the first that a drafter ever has to guess) and trains those past its end instead.
        """
        if self.config.mask_alignment == "shifted":
            return super().rows(batch, seed)
        followed = batch.shifted(batch.loss_mask.new_ones(batch.loss_mask.shape), 1)
        return self.reached(batch, (batch.loss_mask & followed).flatten().nonzero().squeeze(1), seed)

    def pairs(self, module: Any, batch: Batch, seed: int | None = None) -> Pairs:
        if self.passes == 1 or seed is None:
            return super().pairs(module, batch, seed)
        predictions = self.chains(module, self.with_noise(batch, seed), seed)
        return Pairs(predictions, target_states(batch, self.ahead).flatten(0, 1)[batch.rows])

    def with_noise(self, batch: Batch, seed: int) -> Batch:
        if self.config.noise == "none":
            return batch
        noise = feature_noise(batch.features, batch.spans, self.config.noise, seed)
        return replace(batch, features=batch.features + noise)

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        # The last row of a dialogue reads another dialogue's token; it is never trained.
        tokens = self.ends.embed(batch.input_ids.roll(-self.token_shift, dims=1))
        return module(batch.features, tokens, batch.position_ids, batch.attention())

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """Step n counts ``unroll_weight`` ^ n; the names of the first step's losses have no number."""
        regression, classification = regression_sum(pairs), self.heads.classification(pairs)
        decay = self.config.unroll_weight ** torch.arange(len(regression), device=regression.device)
        losses = {"loss": (decay * (regression + self.config.classification_weight * classification)).sum()}
        for n, (first, second) in enumerate(zip(regression, classification, strict=True)):
            number = f"_{n}" if n else ""
            losses |= {f"regression_loss{number}": first, f"classification_loss{number}": second}
        return losses

    def heldout(self, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
        ratios = chain_alpha(module, self.ends, batch, CHAIN_DEPTH, self.token_shift)
        return {f"{n}-alpha": ratio for n, ratio in enumerate(ratios)}


def feature_noise(features: Tensor, spans: list[Span], kind: Literal["paper", "code"], seed: int) -> Tensor:
    """Noise ``[R, L, H]`` for the input features, zero in the padding.

    ``paper``: U(-0.1, 0.1). ``code``: ``(rand - 0.5) * 0.2 * 512 / T`` as released, T the dialogue's length. Each
    dialogue has its own random stream, so that its noise depends on neither packing nor ranks nor resuming.
    """
    noise = torch.zeros_like(features)
    generator = torch.Generator(features.device)
    for span in spans:
        generator.manual_seed((seed * 2_654_435_761 + span.dialogue) % 2**63)
        width = NOISE_WIDTH if kind == "paper" else NOISE_WIDTH * 512 / span.length
        noise[span.row, span.start : span.start + span.length].uniform_(-width, width, generator=generator)
    return noise


TASK = EagleTask
