"""Load a trained drafter by its folder or Hub repository."""

from typing import Any

from drafters.base import Drafter
from drafters.hub.checkpoint import drafter_type
from drafters.learned import LearnedDrafter
from drafters.methods import drafter_class
from drafters.model.target import TargetModel


def load_drafter(path: str, target: TargetModel, revision: str | None = None, **options: Any) -> Drafter:
    """Load a trained drafter from a folder or a Hub repository; ``options`` override its saved decoding options.

    ``adapter=``: a folder or Hub repository with a LoRA for it. ``path`` may also be such a LoRA, which names its
    drafter.

    Raises:
        ValueError: nothing loadable there, unsafe or incomplete weights, or a drafter of another target.
    """
    name = drafter_type(path, revision=revision)
    kind = drafter_class(name)
    if not issubclass(kind, LearnedDrafter):
        raise ValueError(f"{path}: drafter_type {name!r} has no weights to load")
    return kind.from_checkpoint(target, path, revision=revision, **options)
