"""Comparison of fingerprints, which tell targets apart. ``drafters/model/fingerprint.py`` computes them.

A fingerprint has two halves, ``e500116eb63308f6-0123456789abcdef``. Files of former versions hold only the first half.
It covers the model's shape, its final norm and one row of the last layer's attention. The second covers all weights.
"""

import functools
import logging

FORMER = 16  # hexadecimal digits of the first half


def same_weights(recorded: str, actual: str, what: str) -> bool:
    """Return True if two fingerprints are of the same weights, as far as both cover them.

    Logs a warning if one of them has no second half.

    Args:
        recorded: the fingerprint that ``what`` names.
        actual: the target's fingerprint.
        what: thing made with the target, for the warning ("runs/eagle").
    """
    shorter, longer = sorted((recorded, actual), key=len)
    if len(shorter) != FORMER:
        return recorded == actual
    if not longer.startswith(shorter):
        return False
    why = (
        "it was made by a former version"
        if len(recorded) == FORMER
        else "the target's other files are not downloaded (hf download)"
    )
    _warn(
        f"{what}: of its target, only the shape, the final norm and one row of the last layer's attention were "
        f"compared, because {why}. They are the same; a tune of other weights would go unnoticed"
    )
    return True


@functools.lru_cache(maxsize=1024)  # once for each file
def _warn(text: str) -> None:
    logging.getLogger(__name__).warning("%s", text)
