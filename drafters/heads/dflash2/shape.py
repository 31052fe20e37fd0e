"""Shape of a DFlash2 head: a block head's, with convolutions and a selector of candidates. Imports no torch."""

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from drafters.heads.block.shape import FILL_IN, BlockShape
from drafters.heads.shape import TargetSizes


class DFlash2Shape(BlockShape):
    """Keys of a DFlash2 head.

    ``conv_kernel_size``: a row of a block reads itself and the rows before it, that many in all.
    ``conv_group_size``: neighbouring channels whose kernel changes together.
    """

    usual: ClassVar[dict[str, Any]] = {"layout": FILL_IN, "block_size": 8}

    conv_kernel_size: int = Field(default=2, ge=1, le=64, description="rows that a convolution reads")
    conv_group_size: int = Field(default=16, ge=1, le=16_384, description="channels that share a dynamic kernel")
    selector_rank: int = Field(default=256, ge=1, le=16_384, description="rank of the selector's scores")
    selector_top_k: int = Field(default=16, ge=1, le=1024, description="candidates of a slot that it chooses from")

    @model_validator(mode="after")
    def _fits_its_blocks(self) -> Self:
        if self.conv_kernel_size > self.block_size:
            raise ValueError(
                f"conv_kernel_size is {self.conv_kernel_size}, and block_size {self.block_size}; give that or less"
            )
        if self.draft_vocab_size is not None:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size:,}, and the selector of a DFlash2 head chooses among the "
                "target's tokens; leave it out"
            )
        return self

    def check(self, target: TargetSizes) -> None:
        super().check(target)
        if target.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}, which does not divide the target's hidden size of "
                f"{target.hidden_size:,}; give a divisor"
            )
        if self.selector_top_k > target.vocab_size:
            raise ValueError(
                f"selector_top_k is {self.selector_top_k}, and the target's vocabulary has {target.vocab_size:,} "
                "tokens; give at most that"
            )
