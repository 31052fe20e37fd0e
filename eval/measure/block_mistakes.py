"""Known mistakes in reading or serving a DFlash or DSpark head; see ``mistakes``. The layout is one of them: with the
other one, each draft is the right one of the token before or after.
"""

import copy
from functools import partial
from typing import Any, cast

from torch import nn

from drafters.methods.dflash import DFlashDrafter
from drafters.model.runner import Part
from eval.measure.mistakes import PLAIN_THETA, Mistake, ignore_d2t, move_taps, remade, reverse_taps


def other_layout(drafter: DFlashDrafter) -> DFlashDrafter:
    """Take slot k for the token k + 1 after the anchor instead of k, or the reverse; drafts stay within the block."""
    layout = "anchor-first" if drafter.given.layout == "fill-in" else "fill-in"
    slots = drafter.given.model_copy(update={"layout": layout}).slots
    return remade(drafter, layout=layout, depth=min(drafter.depth, slots))


def flip_causal(drafter: DFlashDrafter) -> DFlashDrafter:
    """Let the rows of a block attend only to those before, or to all of them."""
    return remade(drafter, causal=not drafter.given.causal)


def leave_out_norm(drafter: DFlashDrafter) -> DFlashDrafter:
    """Leave out the norm of the context features."""
    head: Any = copy.deepcopy(drafter.module)
    head.hidden_norm = nn.Identity()
    return remade(drafter, head)


def turn_otherwise(drafter: DFlashDrafter) -> DFlashDrafter | None:
    """Rotate with the ``rope_theta`` of a config that does not state it."""
    head: Any = copy.deepcopy(drafter.module)
    if head.config.rope_parameters["rope_theta"] == PLAIN_THETA:
        return None
    head.config.rope_parameters = head.config.rope_parameters | {"rope_theta": PLAIN_THETA}
    return remade(drafter, head)


class _FirstNorm(DFlashDrafter):
    def _parts(self) -> tuple[Part, Part]:
        block, context = super()._parts()
        layers: list[Any] = [part.layer for part in context.layers]
        for layer in layers[1:]:
            layer.attention = layers[0].attention  # only its norm is read; projections stay those of the layer
        return block, context


def norm_as_first(drafter: DFlashDrafter) -> DFlashDrafter | None:
    """Norm the context keys of every layer with the first layer's ``k_norm``, as vLLM 0.32 does on a CPU."""
    norms = [getattr(layer.self_attn, "k_norm", None) for layer in cast(Any, drafter.module).layers]
    weights = [norm.weight for norm in norms if norm is not None]
    if all(one.equal(weights[0]) for one in weights):
        return None
    return remade(drafter, mixin=_FirstNorm)


_LAYER_IDS = "target_layer_ids numbers outputs of layers (hidden states - 1), aux_hidden_state_layer_ids inputs"
_FIRST_NORM = "the norm of the context keys in layers after the first; vLLM 0.32 on a CPU has this fault"
BLOCK_MISTAKES = (
    Mistake(
        "the other layout",
        "sample_from_anchor: true is anchor-first, false is fill-in (drafters.convert --layout)",
        other_layout,
    ),
    Mistake("layer ids one too high", _LAYER_IDS, partial(move_taps, by=1)),
    Mistake("layer ids one too low", _LAYER_IDS, partial(move_taps, by=-1)),
    Mistake("layer ids in reverse order", "order of the hidden states before fc", reverse_taps),
    Mistake("blocks causal, or not", "is_causal, dflash_config.causal, sliding_window_non_causal", flip_causal),
    Mistake("hidden_norm left out", "hidden_norm.weight", leave_out_norm),
    Mistake("context keys with the first layer's k_norm", _FIRST_NORM, norm_as_first),
    Mistake("rope_theta 10000", "rope_theta, rope_parameters", turn_otherwise),
    Mistake("d2t ignored", "d2t: target id - draft id", ignore_d2t),
)
