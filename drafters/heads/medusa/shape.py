"""Shape of Medusa heads. Imports no torch."""

from typing import ClassVar

from pydantic import Field

from drafters.heads.shape import HeadShape


class MedusaShape(HeadShape):
    """Keys of Medusa heads: K heads of residual blocks, with the target's LM head or one each (K V H weights)."""

    stated: ClassVar[tuple[str, ...]] = ("heads", "layers", "own_lm_heads")

    heads: int = Field(default=4, ge=1, le=64, description="K: head k predicts the token k + 1 ahead")
    layers: int = Field(default=1, ge=1, le=16, description="residual blocks of a head")
    own_lm_heads: bool = Field(
        default=False, description="as published: each head has its own LM head, initially the target's"
    )
