"""Shapes of block heads: DFlash's, and DSpark's with its two further heads. Imports no torch."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from drafters.common.states import dflash_taps
from drafters.config import DraftLayer, DraftSize, Layers, LayerShape, Length, Vocabulary
from drafters.heads.shape import HeadShape

FILL_IN, ANCHOR_FIRST = "fill-in", "anchor-first"


def _stated(layout: Any) -> Any:
    if layout is None:
        raise ValueError(
            "a block does not tell its layout; set it to fill-in (slot k predicts the token k after the anchor, as "
            "DFlash) or to anchor-first (the token k + 1 after it, as DSpark)"
        )
    return layout


BlockLayout = Annotated[Literal["fill-in", "anchor-first"], BeforeValidator(_stated)]
MarkovKind = Literal["vanilla", "gated", "rnn"]


class BlockShape(HeadShape):
    """Keys of a block head.

    ``layout``: fill-in: slot k of the block predicts the token k after the anchor, and slot 0 nothing (DFlash);
    anchor-first: slot k predicts the token k + 1 after it (DSpark). It has no default: with the wrong one, less than 1%
    of the drafts are accepted. Engines call anchor-first ``sample_from_anchor: true``.
    ``taps`` 2 is the output of the second layer, transformers' hidden_states[2]. DFlash's configs call it target
    layer 1.
    ``draft_vocab_size``: tokens of its own LM head; null: it drafts with the target's LM head.
    ``shape``: heads, MLP and RoPE of its layers where a released head has others than the target.
    """

    usual: ClassVar[dict[str, Any]] = {"layout": FILL_IN, "block_size": 16}
    mistakes: ClassVar[dict[str, str]] = {"causal": "blocks causal, or not"}

    layout: BlockLayout = Field(
        default=None,
        validate_default=True,
        description="slot k of a block predicts the token k after the anchor, or (anchor-first) k + 1",
    )
    block_size: DraftSize = Field(ge=2, description="rows of a block, the anchor's included")
    mask_token_id: Vocabulary = Field(ge=0, description="the token at a block's other rows; one that texts lack")
    taps: list[Layers] | None = Field(
        default=None,
        min_length=1,
        description="the target's states that it reads: 2 is after two layers; null: five of them",
    )
    layer: DraftLayer = Field(default="qwen3", description="the kind of its decoder layers")
    layers: int = Field(default=5, ge=1, le=64, description="number of its decoder layers")
    causal: bool | Literal["sliding"] = Field(
        default=False,
        description="a row of a block attends only to the rows before it and itself; sliding: in sliding layers",
    )
    sliding_window: Length | None = Field(
        default=None, ge=2, description="tokens that sliding layers attend to before the block; null: no such layers"
    )
    full_layers: list[Layers] = Field(
        default=[], description="with a sliding_window: the layers, from 0 on, that attend to all tokens"
    )
    window_edge: Literal["slot", "anchor"] = Field(
        default="slot",
        description="the window ends before each row's own position, or (anchor, speculators) at one place for a block",
    )
    mask_embedding: bool = Field(
        default=False, description="it has an embedding of its own for the mask token; false: the target's"
    )
    draft_vocab_size: Vocabulary | None = Field(
        default=None, ge=1, description="tokens of its own LM head; null: the target's"
    )
    shape: LayerShape = LayerShape()

    @classmethod
    def usual_taps(cls, layers: int) -> list[int]:
        return dflash_taps(layers)

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token."""
        return 1 if self.layout == FILL_IN else 0

    @property
    def rows(self) -> int:
        """Rows of a block, the anchor's included."""
        return self.block_size

    @property
    def slots(self) -> int:
        """Tokens that a block predicts."""
        return self.rows - self.first_slot

    @property
    def sliding(self) -> list[bool]:
        """Whether each layer has the sliding window."""
        return [self.sliding_window is not None and layer not in self.full_layers for layer in range(self.layers)]

    def is_causal(self, layer: int) -> bool:
        """Whether a row of a block attends only to the rows before it and itself in this layer."""
        return self.sliding[layer] if self.causal == "sliding" else bool(self.causal)

    @property
    def reach(self) -> int | None:
        """Tokens before a block that any layer attends to; None: all."""
        return self.sliding_window if all(self.sliding) else None

    @model_validator(mode="after")
    def _has_windows_of_blocks(self) -> Self:
        window = self.sliding_window
        if window is None:
            stated = {"full_layers": self.full_layers != [], "window_edge": self.window_edge != "slot"}
            stated["causal"] = self.causal == "sliding"
            if key := next((key for key, extra in stated.items() if extra), None):
                raise ValueError(f"{key} is {getattr(self, key)}, and there is no sliding_window; give both or none")
        elif window < self.block_size:
            raise ValueError(
                f"sliding_window is {window}, and a block has {self.block_size} rows; give a window of at least a block"
            )
        if wrong := [layer for layer in self.full_layers if layer >= self.layers]:
            raise ValueError(f"full_layers names layer {wrong[0]}, and the head has the layers 0 to {self.layers - 1}")
        return self


class DSparkShape(BlockShape):
    """Keys of a DSpark head: those of a block head, of the Markov head and of the confidence head.

    Without a confidence head, ``truncate`` estimates acceptance online from max q.
    """

    usual: ClassVar[dict[str, Any]] = {"layout": ANCHOR_FIRST, "block_size": 7}

    markov_head: MarkovKind = Field(default="vanilla", description="the kind of its Markov head")
    markov_rank: int = Field(default=256, ge=1, le=16_384, description="the rank of the Markov head")
    confidence_head: bool = Field(default=True, description="it also estimates the acceptance of each token")
