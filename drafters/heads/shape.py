"""Base of the shapes of heads. A shape is one schema: config.json stores it, training's YAML has it under ``head:``,
stored forms read into it and write from it. Each check of a shape stands in its schema. Imports no torch.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self

from drafters.common.states import state_name
from drafters.config import Config


class TargetSizes(Protocol):
    """The part of a target's configuration that shapes are checked against."""

    num_hidden_layers: int
    hidden_size: int
    vocab_size: int


class HeadShape(Config):
    """What a head is. A method derives its own.

    Class attributes:
        usual: values that training gives to keys that stored heads must state.
        stated: keys that config.json has also with their defaults.
        names_layer: True if the layer that it reads has no default, so that training and features must name it.
        mistakes: keys that are true or false, each with the mistake of a program that takes the other value.
        reads_last: True if it may be trained on the state after the target's last layer, before the final norm.
    """

    usual: ClassVar[dict[str, Any]] = {}
    stated: ClassVar[tuple[str, ...]] = ()
    mistakes: ClassVar[dict[str, str]] = {}
    names_layer: ClassVar[bool] = False
    reads_last: ClassVar[bool] = False

    @classmethod
    def usual_taps(cls, layers: int) -> list[int]:
        """Return the states that such a head reads by default of a target with this number of layers.

        Raises:
            ValueError: the target is too shallow.
        """
        return []

    @property
    def reads(self) -> tuple[int, ...]:
        """States of the target that the head reads beside the features, by the number of layers before each."""
        return tuple(getattr(self, "taps", None) or ())

    @property
    def draft_rows(self) -> int | None:
        """Rows of the head's own LM head over a draft vocabulary; None without one."""
        return getattr(self, "draft_vocab_size", None)

    def settled(self, layers: int) -> Self:
        """Return the shape with the usual states where it names none."""
        if "taps" not in type(self).model_fields or self.reads:
            return self
        return self.model_copy(update={"taps": self.usual_taps(layers)})

    def check(self, target: TargetSizes) -> None:
        """Raise ValueError unless a target with this configuration has such states and tokens."""
        if self.reads:
            check_taps(self.reads, target.num_hidden_layers)
        if self.draft_rows is not None and self.draft_rows > target.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_rows:,}, and the target's vocabulary has {target.vocab_size:,} "
                "tokens; give at most that, or leave it out"
            )
        if (mask := getattr(self, "mask_token_id", 0)) >= target.vocab_size:
            raise ValueError(
                f"mask_token_id is {mask:,}, and the target's vocabulary has {target.vocab_size:,} tokens; give the id "
                "that the head was trained with, or to train one an id that texts lack"
            )

    def stored(self) -> dict[str, Any]:
        """Return the keys for config.json: those that are no defaults, and those that are always ``stated``."""
        return {key: getattr(self, key) for key in self.stated} | self.model_dump(exclude_defaults=True)


def split(kind: type[HeadShape], section: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the ``drafter`` section of a config.json into the keys of the shape and the drafting options."""
    own = kind.model_fields.keys()
    shape = {key: value for key, value in section.items() if key in own}
    return shape, {key: value for key, value in section.items() if key not in own}


def check_taps(taps: Sequence[int], layers: int) -> None:
    """Raise ValueError unless a target of this number of layers has these states."""
    if wrong := [tap for tap in taps if not 0 <= tap <= layers]:
        raise ValueError(
            f"taps are {list(taps)}, and the target has {layers} layers: {wrong[0]} is no state of it; give numbers "
            f"from 0 (the embeddings) to {layers} ({state_name(layers)})"
        )
