"""Known mistakes in reading or serving a DFlash or DSpark head; see ``mistakes``. The layout is one of them: with the
other one, each draft is the right one of the token before or after.
"""

import copy
from functools import partial
from typing import Any

from torch import nn

from drafters.methods.dflash import DFlashDrafter
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


_LAYER_IDS = "target_layer_ids numbers outputs of layers (hidden states - 1), aux_hidden_state_layer_ids inputs"
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
    Mistake("rope_theta 10000", "rope_theta, rope_parameters", turn_otherwise),
    Mistake("d2t ignored", "d2t: target id - draft id", ignore_d2t),
)
