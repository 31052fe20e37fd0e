"""Shape of an EAGLE-3 head. Imports no torch."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from drafters.common.states import eagle3_taps
from drafters.config import DraftLayer, DraftSize, Layers, LayerShape, Length, Vocabulary
from drafters.heads.shape import HeadShape


class Eagle3Shape(HeadShape):
    """Keys of an EAGLE-3 head. EAGLE-3.1 is ``fc_norm: true, norm_output: true``.

    ``taps`` 2 is the output of the second layer, the input of layer 2 (counted from 0), transformers' hidden_states[2].
    These are the numbers that EAGLE-3's configs call auxiliary layer ids.
    ``trained_steps``: steps of its training-time test, as the training records them; a default ``depth`` is no deeper.
    ``shape``: heads, MLP and RoPE of its layers where a released head has others than the target.
    """

    mistakes: ClassVar[dict[str, str]] = {
        "norm_output": "feedback on the wrong side of the final norm",
        "norm_before_residual": "residual on the wrong side of hidden_norm",
    }

    taps: list[Layers] | None = Field(
        default=None,
        min_length=1,
        description="the target's states that it reads: 2 is after two layers; null: 2, n/2, n-3",
    )
    layer: DraftLayer = Field(default="llama", description="the kind of its decoder layers")
    layers: int = Field(default=1, ge=1, le=64, description="number of its decoder layers")
    own_lm_head: bool = Field(
        default=True, description="false: it drafts with the target's LM head, which stays frozen"
    )
    draft_vocab_size: Vocabulary | None = Field(default=None, ge=1, description="tokens of its own LM head; null: all")
    norm_before_residual: bool = Field(
        default=False, description="the residual is the feature after its norm, not before"
    )
    norm_before_fc: bool = Field(default=False, description="one norm over all states before fc")
    fc_norm: bool = Field(default=False, description="a norm for each state before fc (EAGLE-3.1)")
    norm_output: bool = Field(default=False, description="feed back the output after the final norm (EAGLE-3.1)")
    sliding_window: Length | None = Field(
        None, ge=1, description="tokens that its layers attend to, the present one included; null: all"
    )
    trained_steps: DraftSize | None = Field(default=None, ge=1)
    shape: LayerShape = LayerShape()

    @classmethod
    def usual_taps(cls, layers: int) -> list[int]:
        return eagle3_taps(layers)

    @model_validator(mode="after")
    def _is_one_head(self) -> Self:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both true, two norms in one place; set one to false")
        if self.draft_vocab_size is not None and not self.own_lm_head:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size:,}, and own_lm_head is false; leave one of them out"
            )
        return self
