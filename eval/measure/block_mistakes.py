"""Known mistakes in reading or serving a block head; see ``mistakes``. The layout is one of them: with the other one,
each draft is the right one of the token before or after.
"""

import copy
from typing import Any, cast

from torch import Tensor, nn

from drafters.drafting.grow import Slots
from drafters.heads.block.shape import ANCHOR_FIRST, FILL_IN, BlockShape
from drafters.loop.state import DecodeState
from drafters.methods.block import BlockDrafter, BlockHead, DSparkDrafter, MarkovBlock, MarkovSlots
from drafters.methods.dflash2 import DFlash2Drafter
from drafters.model.target import TargetModel
from eval.measure.mistakes import PLAIN_THETA, RETRAIN, WRONG_MASK, Mistake, flips, ignore_d2t, of_taps, remade

EDGES = {"slot": "anchor", "anchor": "slot"}


def shape_of(drafter: BlockDrafter) -> BlockShape:
    """The shape of the drafter's head."""
    shape: BlockShape = cast(Any, drafter.module).shape
    return shape


def other_layout(drafter: BlockDrafter) -> BlockDrafter:
    """Take slot k for the token k + 1 after the anchor instead of k, or the reverse; drafts stay within the block."""
    layout = ANCHOR_FIRST if shape_of(drafter).layout == FILL_IN else FILL_IN
    slots = shape_of(drafter).model_copy(update={"layout": layout}).slots
    return remade(drafter, layout=layout, depth=min(drafter.shaper.depth, slots))


def leave_out_windows(drafter: BlockDrafter) -> BlockDrafter | None:
    """Attend to all tokens in sliding layers, as programs that do not read ``sliding_window``."""
    return remade(drafter, sliding_window=None) if shape_of(drafter).sliding_window else None


def other_edge(drafter: BlockDrafter) -> BlockDrafter | None:
    """Move the windows with the rows of a block, or not."""
    shape = shape_of(drafter)
    return remade(drafter, window_edge=EDGES[shape.window_edge]) if shape.sliding_window else None


def leave_out_norm(drafter: BlockDrafter) -> BlockDrafter:
    """Leave out the norm of the context features."""
    head: Any = copy.deepcopy(drafter.module)
    head.hidden_norm = nn.Identity()
    return remade(drafter, head)


def turn_otherwise(drafter: BlockDrafter) -> BlockDrafter | None:
    """Rotate with the ``rope_theta`` of a config that does not state it."""
    head: Any = copy.deepcopy(drafter.module)
    if head.config.rope_parameters["rope_theta"] == PLAIN_THETA:
        return None
    head.config.rope_parameters = head.config.rope_parameters | {"rope_theta": PLAIN_THETA}
    return remade(drafter, head)


class _FirstNorm(BlockHead):
    def __init__(self, target: TargetModel, module: Any, options: Any) -> None:
        super().__init__(target, module, options)
        layers: list[Any] = [part.layer for part in self.context.layers]
        for layer in layers[1:]:
            layer.attention = layers[0].attention  # only its norm is read; projections stay those of the layer


def norm_as_first(drafter: BlockDrafter) -> BlockDrafter | None:
    """Norm the context keys of every layer with the first layer's ``k_norm``, as vLLM 0.32 does on a CPU."""
    norms = [getattr(layer.self_attn, "k_norm", None) for layer in cast(Any, drafter.module).layers]
    weights = [norm.weight for norm in norms if norm is not None]
    if all(one.equal(weights[0]) for one in weights):
        return None
    return remade(drafter, wrong=_FirstNorm)


def ignore_markov(drafter: BlockDrafter) -> BlockDrafter | None:
    """Leave out the bias of the Markov head."""
    if not isinstance(drafter, DSparkDrafter):
        return None
    head: Any = copy.deepcopy(drafter.module)
    head.markov_head.markov_w2.weight.data.zero_()
    return remade(drafter, head)


class _LateSlots(MarkovSlots):
    """Each slot reads the token before the one that it should; the first two read the anchor. Of chains."""

    def __init__(self, head: MarkovBlock, logits: Tensor, states: Tensor, anchors: Tensor) -> None:
        super().__init__(head, logits, states, anchors)
        self._next = anchors

    def follow(self, tokens: Tensor, parents: Tensor) -> None:
        super().follow(tokens, parents)
        self._tokens, self._next = self._next, self._tokens


class _LateMarkov(MarkovBlock):
    def scored(self, states: Tensor, state: DecodeState) -> Slots:
        return _LateSlots(self, self.lm_head(states), states, state.roots)


def read_markov_late(drafter: BlockDrafter) -> BlockDrafter | None:
    """Give the Markov head of slot k the token x_{k-2}, not x_{k-1}."""
    return remade(drafter, wrong=_LateMarkov) if isinstance(drafter, DSparkDrafter) else None


def ignore_selector(drafter: BlockDrafter) -> BlockDrafter | None:
    """Draft the likeliest candidate of each slot, as a reader of DFlash heads."""
    if not isinstance(drafter, DFlash2Drafter):
        return None
    head: Any = copy.deepcopy(drafter.module)
    head.candidate_selector.successor_codebook.data.zero_()
    return remade(drafter, head)


def leave_out_convolutions(drafter: BlockDrafter) -> BlockDrafter | None:
    """Run the layers without their convolutions."""
    if not isinstance(drafter, DFlash2Drafter):
        return None
    head: Any = copy.deepcopy(drafter.module)
    for layer in head.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel.data.zero_()[:, 0] = 1.0
            conv.kernel_projection.weight.data.zero_()
    return remade(drafter, head)


_LAYER_IDS = "target_layer_ids numbers outputs of layers (hidden states - 1), aux_hidden_state_layer_ids inputs"
_FIRST_NORM = "the norm of the context keys in layers after the first; vLLM 0.32 on a CPU has this fault"
_THETA = 'set rope_theta to 10000 of "shape": {"rope_parameters": {...}} in its config.json'
BLOCK_MISTAKES = (
    Mistake(
        "the other layout",
        "sample_from_anchor: true is anchor-first, false is fill-in (drafters.convert --layout)",
        "import it again with the other --layout, or edit layout in its config.json",
        other_layout,
    ),
    *of_taps(_LAYER_IDS),
    *flips(BlockShape, "is_causal, dflash_config.causal, sliding_window_non_causal"),
    Mistake(
        "windows left out",
        "sliding_window, layer_types, use_swa",
        "remove sliding_window from its config.json",
        leave_out_windows,
    ),
    Mistake(
        "windows at the other edge",
        "the oldest token that each row of a block attends to",
        "set window_edge to its other value in its config.json",
        other_edge,
    ),
    Mistake("hidden_norm left out", "hidden_norm.weight", RETRAIN, leave_out_norm),
    Mistake("context keys with the first layer's k_norm", _FIRST_NORM, RETRAIN, norm_as_first),
    Mistake("rope_theta 10000", "rope_theta, rope_parameters", _THETA, turn_otherwise),
    Mistake("d2t ignored", "d2t: target id - draft id", "write zeros into d2t of its weights", ignore_d2t),
    WRONG_MASK,
    Mistake(
        "Markov head ignored",
        "markov_rank, and the tensors of markov_head, which readers of DFlash heads drop",
        "write zeros into markov_head.markov_w2.weight of its weights",
        ignore_markov,
    ),
    Mistake(
        "selector ignored",
        "selector_rank, and the tensors of candidate_selector, which readers of DFlash heads drop",
        "write zeros into candidate_selector.successor_codebook of its weights",
        ignore_selector,
    ),
    Mistake(
        "convolutions left out",
        "conv_kernel_size, and the tensors of attention_conv and mlp_conv, which readers of DFlash heads drop",
        "write 1 into tap 0 of every base_kernel of its weights, zeros into the rest and into kernel_projection",
        leave_out_convolutions,
    ),
    Mistake(
        "Markov bias of the token before",
        "the token that the Markov head reads: the one before the slot's",
        RETRAIN,
        read_markov_late,
    ),
)
