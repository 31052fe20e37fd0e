"""Train a DSpark head: DFlash's backbone, a Markov head over its blocks, and a head that estimates acceptance.

    deepspeed train/dspark.py --config configs/dspark/stdlib.yaml [--resume] [key=value ...]
    python train/dspark.py --config configs/dspark/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/dspark.py --config configs/dspark/stdlib.yaml --overfit 8    # can it learn 8 dialogues?

Processes and files are those of train/eagle.py.
"""

import sys
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from drafters.heads.block.shape import DSparkShape
from train.configs import DFlashConfig
from train.core.config import Weight
from train.preflight.command import program


class DSparkConfig(DFlashConfig):
    """The keys of a DSpark run: those of DFlash, and of the Markov and the confidence head.

    The default loss is the paper's, 0.1 CE + 0.9 ||p - q||_1 + BCE(confidence). ``total_variation`` is half of the L1
    norm, so that ``target_weight`` is 1.8. The confidence head learns sum_x min(p(x), q(x)), the acceptance rate.
    """

    drafter: ClassVar[str] = "dspark"

    head: DSparkShape
    classification_loss: Literal["cross_entropy", "total_variation", "lk_alpha", "lk_lambda"] = "total_variation"
    token_weight: Weight = 0.1
    target_weight: Weight = 1.8
    gamma: float | None = Field(None, ge=0.1, description="of exponential weights, in positions; null: 4")
    confidence_weight: Weight = Field(1.0, description="weight of the confidence head's cross-entropy")
    start: Literal["random", "regression"] = Field(
        "random", description="first weights of the Markov head: docs/training-options.md"
    )

    @property
    def decay(self) -> float:
        return self.gamma or 4.0

    @property
    def trains_lm_head(self) -> bool:
        return self.lora is None  # the Markov head

    @model_validator(mode="after")
    def _can_solve(self) -> Self:
        if self.start == "regression" and self.head.markov_head == "rnn":
            raise ValueError(
                "start: regression fits a Markov head without memory, and markov_head is rnn; set start=random, or "
                "markov_head=vanilla"
            )
        return self

    @model_validator(mode="after")
    def _trains_its_confidence(self) -> Self:
        if self.head.confidence_head and not self.confidence_weight:
            raise ValueError("confidence_weight is 0, which trains no confidence head; set confidence_head=false")
        if self.head.confidence_head and not self.target_weight:
            raise ValueError(
                "target_weight is 0, and the confidence head learns from the target's distribution; set "
                "confidence_head=false or a target_weight"
            )
        if not self.head.confidence_head and self.confidence_weight != self.default("confidence_weight"):
            raise ValueError(f"confidence_weight is {self.confidence_weight}, and confidence_head false; leave it out")
        return self


if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(DSparkConfig, __doc__)


import torch
import torch.nn.functional as F
from torch import Tensor

from drafters.model.ends import FrozenEnds
from train.core.losses import Pairs
from train.core.task import Ratio
from train.data.bigrams import fit_markov
from train.data.packing import Batch, Source
from train.dflash import DFlashTask


class DSparkTask(DFlashTask):
    """Section 3 of the paper (DeepSeek 2026, arXiv 2607.05147), DFlash's blocks with logits z_k of slot k and
    the text's token t_{k-1} before it, p of the target:

    q_k = softmax(z_k + W2 latent(t_{k-1}, h_k)),  c_k = sigmoid(confidence(h_k, t_{k-1}))
    L   = sum_k w_k (0.1 CrossEntropy(t_k, q_k) + 0.9 ||p_k - q_k||_1 + BCE(c_k, sum_x min(p_k(x), q_k(x))))

    with w_k = exp(-(k - 1) / 4), or as the config says. The confidence's label has no gradient. With ``draft_vocab``
    it compares distributions over those tokens, so it is too large where the target's token is another.
    """

    schema: ClassVar[type[DSparkConfig]] = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        head: Any = self.module
        self.heads.correction = head.markov_head.markov_w2
        # The loss multiplies with W2; W1 is an embedding.
        self.lm_heads = (*self.lm_heads, "markov_head.markov_w1.weight", "markov_head.markov_w2.weight")

    def fit(self, train: Source) -> None:
        fit_markov(self, train)

    def conditional(self, states: Tensor, batch: Batch) -> dict[str, Tensor]:
        head: Any = self.module
        embeddings = head.markov_head.markov_w1(self.tokens_before_slots(batch))
        latents = head.markov_head.latents(embeddings, states).flatten(0, 1)
        fields = {"latents": latents[batch.places][None]}
        if self.config.head.confidence_head:
            chosen = (part.flatten(0, 1)[batch.places] for part in (states, embeddings))
            fields["confidence"] = head.confidence_head(*chosen)
        return fields

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        if pairs.confidence is None:
            return super().losses(pairs)
        config, term = self.config, self.text_term(pairs)
        each, (overlap,) = self.heads.divergence_and_overlap(pairs, config.classification_loss, term)
        weights = None if pairs.weights is None else pairs.weights[0]
        label = overlap.clamp(0, 1)
        confidence = F.binary_cross_entropy_with_logits(pairs.confidence, label, weights, reduction="sum")
        loss = config.target_weight * each.sum() + config.confidence_weight * confidence
        return {"loss": loss, "confidence_loss": confidence}

    def figures(self, batch: Batch, pairs: Pairs, overlap: Tensor, agree: Tensor) -> dict[str, Ratio]:
        """Also ``confidence_error``: mean distance of the estimated acceptance from sum_x min(p, q)."""
        ratios = super().figures(batch, pairs, overlap, agree)
        if pairs.confidence is not None:
            distance = (pairs.confidence.sigmoid() - overlap).abs()
            ratios["confidence_error"] = Ratio(distance.sum(), torch.tensor(len(distance), device=distance.device))
        return ratios


TASK = DSparkTask
