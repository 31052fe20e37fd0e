"""Drafters for speculative decoding, learned and training-free, in one decoding loop.

>>> from drafters import TargetModel, generate, load_drafter
>>> target = TargetModel.from_pretrained("checkpoints/stdlib-target", dtype="bfloat16")
>>> drafter = load_drafter("checkpoints/stdlib-eagle", target)
>>> result = generate(target, drafter, input_ids, max_new_tokens=128)
"""

import difflib
import importlib
import pkgutil
from typing import Any

from .base import Drafter, LearnedDrafter
from .checkpoint import drafter_type
from .decoding.frozen import FrozenEnds, load_frozen_ends
from .decoding.loop import GenerateResult, generate
from .decoding.sampling import Sampling
from .decoding.target import FeatureOutput, TargetModel

__all__ = [
    "Drafter",
    "FeatureOutput",
    "FrozenEnds",
    "GenerateResult",
    "LearnedDrafter",
    "Sampling",
    "TargetModel",
    "drafter_class",
    "generate",
    "load_drafter",
    "load_frozen_ends",
    "make_drafter",
]


def drafter_class(name: str) -> type[Drafter]:
    """The drafter class of ``drafters/<name>.py``.

    Raises:
        ValueError: no such method; the message lists those there are.
    """
    if name in {module.name for module in pkgutil.iter_modules(__path__)}:
        for value in vars(importlib.import_module(f"{__name__}.{name}")).values():
            if isinstance(value, type) and issubclass(value, Drafter) and value.name == name:
                return value
    known = sorted(_known())
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"there is no drafter {name!r}; {meant}known: {', '.join(known)}")


def make_drafter(name: str, target: TargetModel, **options: Any) -> Drafter:
    """A drafter by its method's name and options, as configs give them. Learned ones take ``checkpoint=``.

    A draft model may also be a loaded ``TargetModel``, so that several drafters share one.

    Raises:
        ValueError: an unknown method or option, or a checkpoint that does not fit.
    """
    kind = drafter_class(name)
    if issubclass(kind, LearnedDrafter):
        path = options.pop("checkpoint", None)
        if path is None:
            raise ValueError(f"drafter {name!r} is learned: give checkpoint: a folder or a Hub repository")
        return kind.from_checkpoint(target, path, **options)
    return kind.from_options(target, **options)


def load_drafter(path: str, target: TargetModel, revision: str | None = None, **options: Any) -> Drafter:
    """Load a trained drafter from a folder or a Hub repository; ``options`` override its saved decoding options.

    Raises:
        ValueError: nothing loadable there, unsafe or incomplete weights, or a drafter of another target.
    """
    name = drafter_type(path, revision=revision)
    kind = drafter_class(name)
    if not issubclass(kind, LearnedDrafter):
        raise ValueError(f"{path}: drafter_type {name!r} has no weights to load")
    return kind.from_checkpoint(target, path, revision=revision, **options)


def _known() -> list[str]:
    names = []
    for module in pkgutil.iter_modules(__path__):
        members = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        if any(isinstance(v, type) and issubclass(v, Drafter) and v.name == module.name for v in members):
            names.append(module.name)
    return names
