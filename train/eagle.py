"""Train an EAGLE head: regression of the target's next feature, and the cross-entropy of the token after it.

    deepspeed train/eagle.py --config configs/eagle/stdlib.yaml [--resume] [key=value ...]
    python train/eagle.py --config configs/eagle/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/eagle.py --config configs/eagle/stdlib.yaml --overfit 8    # is the pipeline sound?

As many processes as the launcher is told to start (--num_gpus N); plain `python train/eagle.py ...` is a single
one. The run folder (`out` in the config) gets the trained drafter, metrics.jsonl, TensorBoard events and the resumable
state.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from drafters.config import SHIFTED, UNSHIFTED, HeadInputs, HeadLayer
from train.cli import program
from train.core.config import TrainConfig
from train.core.task import Ratio, Task

if TYPE_CHECKING:  # torch is imported within functions: see train/core/task.py
    from collections.abc import Callable

    from torch import Tensor

    from drafters.model.ends import FrozenEnds
    from train.data.packing import Batch, Source, Span

NOISE_WIDTH = 0.1  # e: U(-0.1, 0.1)
CHAIN_DEPTH = 5  # 0-alpha to 4-alpha, as the paper reports

Noise = Literal["paper", "code", "none"]


class EagleConfig(TrainConfig):
    """The keys of an EAGLE run beside those of every run."""

    drafter: ClassVar[str] = "eagle"
    older: ClassVar[dict[str, Any]] = {"layer": "target"}

    inputs: HeadInputs = Field(SHIFTED, description="what the head reads: Figure 8 of the paper")
    fc_bias: bool = Field(False, description="a bias of fc, as released heads for Vicuna and Llama 2 have one")
    layer: Literal["auto"] | HeadLayer = Field(
        "auto", description="the head's decoder layer; auto: the target's where engines serve it, else llama"
    )
    classification_weight: float = Field(0.1, ge=0, description="w_cls of the EAGLE paper, section 3.2")
    start: Literal["random", "regression"] = Field("random", description="of fc's weights: docs/training.md")
    noise: Noise = "paper"
    mask_alignment: Literal["shifted", "paper-code"] = "shifted"
    unroll: int = Field(1, ge=1, le=8, description="predictions in a row of each trained position; the paper's: 1")
    unroll_weight: float = Field(1.0, gt=0, description="of the loss of each further prediction over the one before")

    @model_validator(mode="after")
    def _has_what_to_feed_back(self) -> Self:
        if self.inputs == "token" and self.unroll > 1:
            raise ValueError(
                f"unroll: {self.unroll} feeds predicted features back, and inputs: token has none; set unroll=1, or "
                f"inputs={SHIFTED}"
            )
        if self.fc_bias and self.inputs not in (SHIFTED, UNSHIFTED):
            raise ValueError(f"fc_bias: true, and a head with inputs: {self.inputs} has no fc; set fc_bias=false")
        if self.start == "regression" and self.inputs not in (SHIFTED, UNSHIFTED):
            raise ValueError(
                f"start: regression fits fc, and a head with inputs: {self.inputs} has none; set start=random"
            )
        if self.start == "regression" and self.init_from is not None:
            raise ValueError(
                f"start: regression fits new weights, and init_from: {self.init_from} gives trained ones; "
                "set start=random"
            )
        return self


class EagleTask(Task):
    """Section 3.2 of the paper (Li et al. 2024), f the target's features and t the tokens:

    f'_{i+1} = head(f_1 + e_1 .. f_i + e_i, t_2 .. t_{i+1}),  e from U(-0.1, 0.1)
    p_{i+2}  = softmax(LM_head(f_{i+1})),  p'_{i+2} = softmax(LM_head(f'_{i+1}))
    L_reg    = SmoothL1(f_{i+1}, f'_{i+1})
    L_cls    = CrossEntropy(p_{i+2}, p'_{i+2}), or what classification_loss says
    L        = L_reg + w_cls L_cls,  w_cls = 0.1

    Row i is about f_{i+1}, so about the distribution of t_{i+2}.
    """

    schema = EagleConfig
    config: EagleConfig
    ahead = 2
    drafts: ClassVar[dict[str, dict[str, Any]]] = {
        "chain": {"tree": "chain", "depth": CHAIN_DEPTH},
        "tree": {"tree": "dynamic"},
    }
    constant_inputs = ("fc.weight",)  # it reads features and embeddings

    def __init__(self, config: EagleConfig, ends: FrozenEnds) -> None:
        from drafters.model.layers import default_layer

        if config.layer == "auto":  # settled here, so that run.json says what a resumed run has to go on with
            config = config.model_copy(update={"layer": default_layer(ends.config)})
        super().__init__(config, ends)

    @property
    def unroll(self) -> int:
        return self.config.unroll

    def rows(self, batch: Batch) -> Tensor:
        """``shifted`` trains i where the predicted token_{i+2} belongs to an answer.

        ``paper-code`` trains i where token_i does, as the released code: it leaves out the predictions of an answer's
        first two tokens (the second is the first that a drafter ever has to guess) and trains those past its end
        instead.

        Unrolled, i is trained where every step has a chain that gets there: not at the first ``unroll - 1`` of a
        dialogue, which answers hardly have.
        """
        if self.config.mask_alignment == "shifted":
            rows = super().rows(batch)
        else:
            followed = batch.shifted(batch.loss_mask.new_ones(batch.loss_mask.shape), 1)
            rows = (batch.loss_mask & followed).flatten().nonzero().squeeze(1)
        return rows[batch.position_ids.flatten()[rows] >= self.unroll - 1] if self.unroll > 1 else rows

    def with_noise(self, batch: Batch, seed: int) -> Batch:
        if self.config.noise == "none":
            return batch
        noise = feature_noise(batch.features, batch.spans, self.config.noise, seed)
        return replace(batch, features=batch.features + noise)

    @property
    def fits(self) -> bool:
        return self.config.start == "regression"

    def fit(self, train: Source) -> None:
        from train.regression import fit_fc

        fit_fc(self, train)

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        # The last one of a dialogue is never trained.
        tokens = self.ends.embed(batch.input_ids.roll(-self.token_shift, dims=1))
        return module(batch.features, tokens, batch.position_ids, batch.attention())

    @property
    def token_shift(self) -> int:
        """Row i reads token i + token_shift, if any."""
        return 0 if self.config.inputs == UNSHIFTED else 1

    def drafter_config(self) -> dict[str, Any]:
        options: dict[str, Any] = {"layer": self.config.layer}
        options |= {} if self.config.inputs == SHIFTED else {"inputs": self.config.inputs}
        return options | ({"fc_bias": True} if self.config.fc_bias else {})

    def losses(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        from train.core.losses import regression_sum

        regression = regression_sum(predicted, target)
        classification = self.classification(predicted, target)
        loss = regression + self.config.classification_weight * classification
        return {"loss": loss, "regression_loss": regression, "classification_loss": classification}

    def loss_sums(self, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None = None) -> dict[str, Tensor]:
        """With ``unroll``, step n's losses weigh ``unroll_weight`` ^ n; the first one's have no number in their names.

        Step n's chain from i - n predicts what step 0 predicts at i: all have the same targets.
        """
        if self.unroll == 1:
            return super().loss_sums(module, batch, rows, noise_seed)
        import torch

        from train.core.unroll import unrolled

        inputs = batch if noise_seed is None else self.with_noise(batch, noise_seed)
        steps = enumerate(unrolled(module, self.ends.embed, inputs, self.unroll, self.token_shift))
        predicted = torch.stack([states.flatten(0, 1)[rows - n] for n, states in steps])
        sums = self.losses(predicted, self.targets(batch).flatten(0, 1)[rows])
        weighted = [self.config.unroll_weight**n * loss for n, loss in enumerate(sums.pop("loss"))]
        found = {"loss": torch.stack(weighted).sum()}
        for n in range(self.unroll):
            found |= {f"{name}_{n}" if n else name: values[n] for name, values in sums.items()}
        return found

    def heldout(self, module: Any, batch: Batch, predicted: Tensor, target: Tensor) -> dict[str, Ratio]:
        from train.watch.alpha import chain_alpha

        ratios = chain_alpha(module, self.ends, batch, CHAIN_DEPTH, self.token_shift)
        return {f"{n}-alpha": ratio for n, ratio in enumerate(ratios)}


def feature_noise(features: Tensor, spans: list[Span], kind: Noise, seed: int) -> Tensor:
    """Noise ``[R, L, H]`` for the input features, zero in the padding.

    ``paper``: U(-0.1, 0.1). ``code``: ``(rand - 0.5) * 0.2 * 512 / T`` as released, T the dialogue's length. Each
    dialogue has its own random stream, so that its noise depends on neither packing nor ranks nor where a run resumed.
    """
    import torch

    noise = torch.zeros_like(features)
    generator = torch.Generator(features.device)
    for span in spans:
        generator.manual_seed((seed * 2_654_435_761 + span.dialogue) % 2**63)
        width = NOISE_WIDTH if kind == "paper" else NOISE_WIDTH * 512 / span.length
        noise[span.row, span.start : span.start + span.length].uniform_(-width, width, generator=generator)
    return noise


if __name__ == "__main__":
    program("eagle")
