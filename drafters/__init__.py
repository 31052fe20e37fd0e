"""Drafters for speculative decoding, learned and training-free, in one decoding loop.

>>> from drafters import TargetModel, generate, load_drafter
>>> target = TargetModel.from_pretrained("checkpoints/stdlib-target")
>>> drafter = load_drafter("checkpoints/stdlib-eagle", target)
>>> result = generate(target, drafter, input_ids, max_new_tokens=128)
"""

from typing import TYPE_CHECKING

from drafters.methods import drafter_class, make_drafter

if TYPE_CHECKING:
    from drafters.base import Drafter
    from drafters.learned import LearnedDrafter
    from drafters.loading import load_drafter
    from drafters.loop.generate import GenerateResult, generate
    from drafters.loop.refill import Continued, generate_many
    from drafters.loop.sampling import Sampling
    from drafters.model.ends import FrozenEnds, load_frozen_ends
    from drafters.model.target import FeatureOutput, TargetModel
else:
    # torch takes seconds to import. A program that only reads its config, to find a mistyped key, must not wait for it.
    _NAMES = {
        "base": ("Drafter",),
        "learned": ("LearnedDrafter",),
        "loading": ("load_drafter",),
        "loop.generate": ("GenerateResult", "generate"),
        "loop.refill": ("Continued", "generate_many"),
        "loop.sampling": ("Sampling",),
        "model.ends": ("FrozenEnds", "load_frozen_ends"),
        "model.target": ("FeatureOutput", "TargetModel"),
    }
    _MODULES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name):
        """Import what is asked for (PEP 562)."""
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        return value

    def __dir__():
        return sorted({*globals(), *_MODULES})


__all__ = [
    "Continued",
    "Drafter",
    "FeatureOutput",
    "FrozenEnds",
    "GenerateResult",
    "LearnedDrafter",
    "Sampling",
    "TargetModel",
    "drafter_class",
    "generate",
    "generate_many",
    "load_drafter",
    "load_frozen_ends",
    "make_drafter",
]
