"""The target's hidden states: their names, their two numberings in the field, and the usual ones to read.

A *tap* k is the hidden state after k decoder layers: ``hidden_states[k]`` of transformers, which norms the last one.
With layers counted from 0, it is the output of layer k - 1 and the input of layer k. Tap 0 is the embeddings' output.
All code here counts in taps.

    layer i means its INPUT, tap i:       EAGLE-3's aux layer ids: official code, vLLM, speculators (from_inputs)
    layer i means its OUTPUT, tap i + 1:  the same ids in SGLang and SpecForge; DFlash's and DSpark's target_layer_ids:
                                          z-lab, DeepSpec, SpecForge (from_outputs); -1 is the embeddings' output

Imports no torch.
"""

from collections.abc import Iterable, Sequence

FEATURES = "output of the final norm = hidden_states[-1]"  # the LM head's input, which every store holds


def state_name(tap: int) -> str:
    """Name a tap by both numberings: 13 -> ``"output of layer 12 = hidden_states[13]"``."""
    _check([tap], 0, "tap")
    return f"output of {'the embeddings' if tap == 0 else f'layer {tap - 1}'} = hidden_states[{tap}]"


def named_states(taps: Iterable[int]) -> dict[str, str]:
    """Name the states of a store by their tensors: ``{"features": "output of the final norm = ...", "tap_2": ...}``."""
    return {"features": FEATURES} | {f"tap_{tap}": state_name(tap) for tap in taps}


def from_inputs(ids: Sequence[int]) -> list[int]:
    """Taps of layer numbers that mean the INPUT of a layer (EAGLE-3); ValueError for a number below 0."""
    return _check(ids, 0, "layer whose input is meant")


def from_outputs(ids: Sequence[int]) -> list[int]:
    """Taps of layer numbers that mean the OUTPUT of a layer (DFlash, DSpark); ValueError for a number below -1."""
    return [layer + 1 for layer in _check(ids, -1, "layer whose output is meant")]


def to_inputs(taps: Sequence[int]) -> list[int]:
    """Inverse of ``from_inputs``."""
    return _check(taps, 0, "tap")


def to_outputs(taps: Sequence[int]) -> list[int]:
    """Inverse of ``from_outputs``; the embeddings' output becomes -1."""
    return [tap - 1 for tap in _check(taps, 0, "tap")]


def disorder(taps: Sequence[int]) -> str | None:
    """Say what is wrong with the order of ``taps``; None if each is deeper in the target than the one before it.

    A state that is read twice adds weights and no information. Engines hand the states over by depth, whatever the
    order in a config, so a head that was trained on another order reads the wrong states there.
    """
    if repeated := sorted({tap for tap in taps if taps.count(tap) > 1}):
        return f"tap {repeated[0]} is named {taps.count(repeated[0])} times; name each state once"
    if list(taps) != sorted(taps):
        return f"taps are not in ascending order; give {sorted(taps)}"
    return None


def eagle3_taps(layers: int) -> list[int]:
    """Return EAGLE-3's default taps ``[2, n // 2, n - 3]`` for a target of n ``layers``: a low, a middle, a high one.

    With fewer than 7 layers these do not increase; then three taps are spread evenly over 1 to n - 1.

    Raises:
        ValueError: fewer than 4 layers.
    """
    if layers >= 7:
        return from_inputs([2, layers // 2, layers - 3])
    return _spread_over_all(layers, 3)


def dflash_taps(layers: int, count: int = 5) -> list[int]:
    """Return the default taps of DFlash and DSpark for a target of n ``layers``.

    They are the outputs of ``count`` layers, evenly from layer 1 to n - 3 and rounded to whole numbers (a half to the
    even one), as z-lab's code and SGLang compute them: [1, 9, 17, 25, 33] of 36, so the taps [2, 10, 18, 26, 34]. A
    single one is the output of layer n // 2. In a target of fewer than ``count + 3`` layers these are not distinct;
    then the taps are spread evenly over 1 to n - 1.

    Raises:
        ValueError: ``count`` is below 1, or not below the number of layers.
    """
    _check([count], 1, "number of taps")
    if layers < count + 3:
        return _spread_over_all(layers, count)
    if count == 1:
        return from_outputs([layers // 2])
    return from_outputs([round(1 + place * (layers - 4) / (count - 1)) for place in range(count)])


def _spread_over_all(layers: int, count: int) -> list[int]:
    if layers <= count:
        raise ValueError(
            f"the target has {layers} layers, and {count} different taps need at least {count + 1}; name the layers "
            "yourself (exit_layers in a features config)"
        )
    last = layers - 1
    return [1 + (last - 1) * place // max(count - 1, 1) for place in range(count)]


def _check(numbers: Sequence[int], least: int, what: str) -> list[int]:
    if wrong := [number for number in numbers if number < least]:
        raise ValueError(f"{what}: {wrong[0]}, and the least is {least}")
    return list(numbers)
