"""Shape of a P-EAGLE head. Imports no torch."""

from typing import Any, ClassVar

from pydantic import Field

from drafters.config import DraftSize, Vocabulary
from drafters.heads.eagle3.shape import Eagle3Shape


class PEagleShape(Eagle3Shape):
    """Keys of a P-EAGLE head: those of an EAGLE-3 head, the mask token and the number of depths.

    At depth 0 it reads as EAGLE-3 does; at each further depth the mask token and a learned state, ``mask_hidden``.
    """

    usual: ClassVar[dict[str, Any]] = {"depths": 8}
    mistakes: ClassVar[dict[str, str]] = {"norm_before_residual": Eagle3Shape.mistakes["norm_before_residual"]}

    mask_token_id: Vocabulary = Field(ge=0, description="the token at depths above 0; one that texts lack")
    depths: DraftSize = Field(ge=2, le=64, description="tokens that it predicts in one pass")
    layers: int = Field(default=4, ge=1, le=64, description="number of its decoder layers")

    @property
    def slots(self) -> int:
        """Tokens that it predicts in one pass."""
        return self.depths
