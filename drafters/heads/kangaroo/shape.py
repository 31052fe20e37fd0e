"""Shape of a Kangaroo adapter. Imports no torch."""

from typing import ClassVar

from pydantic import Field

from drafters.config import Layers
from drafters.heads.shape import HeadShape, TargetSizes


class KangarooShape(HeadShape):
    """Keys of a Kangaroo adapter. ``ffn`` and ``own_lm_head`` are ablations of the paper's Table 2."""

    names_layer: ClassVar[bool] = True

    exit_layer: Layers = Field(ge=1, description="the adapter reads the hidden state after this many decoder layers")
    ffn: bool = Field(default=False, description="an adapter with an MLP (Table 2 of the paper): larger, and no better")
    own_lm_head: bool = Field(default=False, description="an LM head of its own, initially the target's (Table 2)")

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.exit_layer,)

    def check(self, target: TargetSizes) -> None:
        if self.exit_layer >= target.num_hidden_layers:
            most = target.num_hidden_layers - 1
            raise ValueError(f"exit_layer must be between 1 and {most} for this target, found {self.exit_layer}")
