"""Shape of an EAGLE head. Imports no torch."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from drafters.config import SHIFTED, UNSHIFTED, HeadInputs, HeadLayer
from drafters.heads.shape import HeadShape, TargetSizes


class EagleShape(HeadShape):
    """Keys of an EAGLE head; engines and released checkpoints know only the default ``inputs``.

    ``layer``: the target's own decoder layer, or Llama's. In training auto: the target's if engines serve it, else
    llama; the trained head records which.
    """

    usual: ClassVar[dict[str, Any]] = {"layer": "auto"}
    stated: ClassVar[tuple[str, ...]] = ("layer",)

    inputs: HeadInputs = Field(default=SHIFTED, description="the head's inputs: Figure 8 of the paper")
    fc_bias: bool = Field(default=False, description="a bias of fc, as in released heads for Vicuna and Llama 2")
    layer: Literal["auto"] | HeadLayer = Field(default="target", description="the kind of its decoder layer")

    @property
    def has_fc(self) -> bool:
        """True if the head reads a feature and an embedding; with one input there is no fc."""
        return self.inputs in (SHIFTED, UNSHIFTED)

    @property
    def token_shift(self) -> int:
        """Row i reads token i + ``token_shift``."""
        return 0 if self.inputs == UNSHIFTED else 1

    def check(self, target: TargetSizes) -> None:
        if self.layer == "auto":
            raise ValueError("layer is auto, which only training settles; give target or llama")

    @model_validator(mode="after")
    def _has_what_it_biases(self) -> Self:
        if self.fc_bias and not self.has_fc:
            raise ValueError(f"fc_bias: true, and a head with inputs: {self.inputs} has no fc; set fc_bias=false")
        return self
