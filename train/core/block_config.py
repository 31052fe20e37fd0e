"""The keys of training runs of block drafters, DFlash and DSpark. Imports no torch."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from drafters.common.states import dflash_taps
from drafters.config import Amount, DraftLayer, DraftSize, Vocabulary, Width
from train.core.config import Taps, TrainConfig, Weight


class DFlashConfig(TrainConfig):
    """The keys of a DFlash run.

    The loss of a token is ``token_weight`` times the cross-entropy of the text's token, and ``target_weight`` times
    ``classification_loss``, which compares with the target's distribution. Both are multiplied with a weight of the
    token's position in its block, by ``position_weights``:

    - exponential: exp(-(k - 1) / gamma) at position k, divided by the mean over a block's positions (DFlash);
    - d-pace: w_k = sum_{m >= k} prod_{i <= m} (1 + a_i) / 2, with a_i the acceptance rate at position i (D-PACE, arXiv
      2605.18810): the probability of the text's token, or with ``target_weight`` the overlap of both distributions. It
      costs a second product with the LM head;
    - uniform: 1.
    """

    drafter: ClassVar[str] = "dflash"
    has_recipe: ClassVar[bool] = True
    sizes_lm_head: ClassVar[bool] = True

    layout: Literal["fill-in", "anchor-first"] = Field(
        "fill-in", description="slot k of a block predicts the token k after the anchor, or (anchor-first) k + 1"
    )
    block_size: DraftSize = Field(16, ge=2, description="rows of a block, the anchor's included")
    mask_token_id: Vocabulary = Field(ge=0, description="the token at a block's other rows; one that texts lack")
    tap_layers: Taps | None = Field(
        None, description="the target's states that it reads: 2 is after two layers; null: five of them"
    )
    layer: DraftLayer = Field("qwen3", description="the kind of its decoder layers")
    layers: int = Field(5, ge=1, le=64, description="number of its decoder layers")
    causal: bool = Field(False, description="a row of a block attends only to the rows before it and itself")
    anchors: Amount = Field(512, ge=1, description="most blocks of a dialogue; each epoch draws others")
    anchor_share: float = Field(
        1.0, gt=0, le=1, description="the same, as a share of the positions that can be anchors"
    )
    token_weight: Weight = Field(1.0, description="weight of the cross-entropy of the text's tokens")
    target_weight: Weight = Field(0.0, description="weight of classification_loss, from the target's distribution")
    position_weights: Literal["exponential", "d-pace", "uniform"] = Field("exponential", description="see above")
    gamma: float | None = Field(
        None, ge=0.1, description="of exponential weights, in positions; null: 7, 5, 4 for blocks of 16, 10, 8 rows"
    )

    @property
    def slots(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - (self.layout == "fill-in")

    @property
    def decay(self) -> float:
        """gamma; its defaults are the paper's, and straight lines through them."""
        return self.gamma or (self.block_size / 2 if self.block_size <= 10 else (self.block_size + 5) / 3)

    @classmethod
    def default(cls, key: str) -> Any:
        """A key's default."""
        return cls.model_fields[key].default

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.tap_layers or ())

    def settled(self, layers: Callable[[], int]) -> Self:
        return self if self.tap_layers else self.model_copy(update={"tap_layers": dflash_taps(layers())})

    @property
    def trains_lm_head(self) -> bool:
        return self.draft_vocab is not None

    @model_validator(mode="after")
    def _has_a_loss(self) -> Self:
        if not self.token_weight and not self.target_weight:
            raise ValueError("token_weight and target_weight are both 0, so that there is no loss; set one of them")
        if not self.target_weight and self.classification_loss != self.default("classification_loss"):
            raise ValueError(f"classification_loss is {self.classification_loss}, and target_weight is 0; set both")
        if self.top_k_weight:
            raise ValueError(f"top_k_weight is {self.top_k_weight}, which block drafters do not use; leave it out")
        if self.gamma is not None and self.position_weights != "exponential":
            raise ValueError(f"gamma is {self.gamma}, and position_weights is {self.position_weights}; leave gamma out")
        return self

    @model_validator(mode="after")
    def _can_hold_its_blocks(self) -> Self:
        if self.batch_tokens <= self.block_size:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}, and a block of {self.block_size} rows needs a token before it; "
                f"set batch_tokens={self.block_size + 1} or more"
            )
        if self.draft_vocab is not None and self.loss_vocab is not None:
            raise ValueError(f"loss_vocab is {self.loss_vocab}, and the loss is over draft_vocab; set only that")
        if self.trains_lm_head and self.zero_stage == 3:
            raise ValueError("zero_stage is 3, which would split weights that the loss multiplies with; set 0, 1 or 2")
        return self


class DSparkConfig(DFlashConfig):
    """The keys of a DSpark run: those of DFlash, and of the Markov and the confidence head.

    The default loss is the paper's, 0.1 CE + 0.9 ||p - q||_1 + BCE(confidence). ``total_variation`` is half of the L1
    norm, so that ``target_weight`` is 1.8. The confidence head learns sum_x min(p(x), q(x)), the acceptance rate.
    """

    drafter: ClassVar[str] = "dspark"

    layout: Literal["fill-in", "anchor-first"] = "anchor-first"
    block_size: DraftSize = Field(7, ge=2)
    classification_loss: Literal["cross_entropy", "total_variation", "lk_alpha", "lk_lambda"] = "total_variation"
    token_weight: Weight = 0.1
    target_weight: Weight = 1.8
    gamma: float | None = Field(None, ge=0.1, description="of exponential weights, in positions; null: 4")
    markov_head: Literal["vanilla", "gated", "rnn"] = Field("vanilla", description="the kind of its Markov head")
    markov_rank: Width = Field(256, ge=1, description="the rank of the Markov head")
    confidence_head: bool = Field(True, description="it also estimates the acceptance of each token")
    confidence_weight: Weight = Field(1.0, description="weight of the confidence head's cross-entropy")

    @property
    def decay(self) -> float:
        return self.gamma or 4.0

    @property
    def trains_lm_head(self) -> bool:
        return True  # the Markov head

    @model_validator(mode="after")
    def _trains_its_confidence(self) -> Self:
        if self.confidence_head and not self.confidence_weight:
            raise ValueError("confidence_weight is 0, which trains no confidence head; set confidence_head=false")
        if self.confidence_head and not self.target_weight:
            raise ValueError(
                "target_weight is 0, and the confidence head learns from the target's distribution; set "
                "confidence_head=false or a target_weight"
            )
        if not self.confidence_head and self.confidence_weight != self.default("confidence_weight"):
            raise ValueError(f"confidence_weight is {self.confidence_weight}, and confidence_head false; leave it out")
        return self
