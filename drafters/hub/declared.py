"""What a learned method declares about itself: how it is trained and measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """How ``train.start`` trains and measures a method.

    Attributes:
        learning_rate: of the paper; targets of up to 1,024 hidden states get the rate measured here.
        keys: keys of the training's config. small: others for targets of up to 1,024 hidden states.
        short: keys for short runs on a CPU.
        rows: rows of the speed report by label, each with its options; the first is the method's default.
        certified: options with which every step has a draft, for the certificate of losslessness.
        knobs: options with the values that eval.tune tries; empty if the method chooses them itself.
        start: options that eval.tune starts from.
    """

    learning_rate: float
    rows: Mapping[str, Mapping[str, Any]]
    keys: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    short: Mapping[str, Any] = field(default_factory=dict)
    certified: Mapping[str, Any] = field(default_factory=dict)
    knobs: Mapping[str, list[Any]] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
