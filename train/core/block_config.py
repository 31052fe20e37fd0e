"""The keys of training runs of block drafters: DFlash, DSpark and DFlash2. Imports no torch."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from drafters.config import Amount
from drafters.heads.block.shape import BlockShape, DSparkShape
from drafters.heads.dflash2.shape import DFlash2Shape
from train.core.config import TrainConfig, Weight


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
    sizes_lm_head: ClassVar[bool] = True

    head: BlockShape
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
    def decay(self) -> float:
        """gamma; its defaults are the paper's, and straight lines through them."""
        size = self.head.rows
        return self.gamma or (size / 2 if size <= 10 else (size + 5) / 3)

    @classmethod
    def default(cls, key: str) -> Any:
        """A key's default."""
        return cls.model_fields[key].default

    @property
    def shape(self) -> BlockShape:
        return self.head.model_copy(update={"draft_vocab_size": self.draft_vocab})

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
        size = self.head.rows
        if self.batch_tokens <= size:
            raise ValueError(
                f"batch_tokens is {self.batch_tokens}, and a block of {size} rows needs a token before it; "
                f"set batch_tokens={size + 1} or more"
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

    head: DSparkShape
    classification_loss: Literal["cross_entropy", "total_variation", "lk_alpha", "lk_lambda"] = "total_variation"
    token_weight: Weight = 0.1
    target_weight: Weight = 1.8
    gamma: float | None = Field(None, ge=0.1, description="of exponential weights, in positions; null: 4")
    confidence_weight: Weight = Field(1.0, description="weight of the confidence head's cross-entropy")

    @property
    def decay(self) -> float:
        return self.gamma or 4.0

    @property
    def trains_lm_head(self) -> bool:
        return True  # the Markov head

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


class DFlash2Config(DFlashConfig):
    """The keys of a DFlash2 run: those of DFlash, and of the selector.

    The loss is that of speculators: cross-entropy with the target's distribution over all tokens, and
    ``selector_weight`` times that of the text's token among the candidates, both weighted by ``position_weights``.
    ``init_from`` may also be a DFlash head: new convolutions change nothing.
    """

    drafter: ClassVar[str] = "dflash2"
    extends: ClassVar[tuple[str, ...]] = ("dflash",)

    head: DFlash2Shape
    token_weight: Weight = 0.0
    target_weight: Weight = 1.0
    selector_weight: Weight = Field(1.0, description="weight of the selector's cross-entropy")
    trains: Literal["all", "selector"] = Field(
        "all", description="selector: the rest of the head in init_from stays as it is"
    )

    @property
    def trains_lm_head(self) -> bool:
        return True  # the selector, outside of the module's forward

    @model_validator(mode="after")
    def _trains_its_selector(self) -> Self:
        for key in ("draft_vocab", "loss_vocab"):
            if (value := getattr(self, key)) is not None:
                raise ValueError(f"{key} is {value}, and the selector chooses among all tokens; leave it out")
        if not self.selector_weight:
            raise ValueError("selector_weight is 0, which trains no selector; train a DFlash head, or set a weight")
        if self.trains == "selector" and self.init_from is None:
            raise ValueError("trains is selector, and the rest of the head must be a trained one; set init_from")
        return self
