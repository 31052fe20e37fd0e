"""Drafters for speculative decoding, learned and training-free, in one decoding loop.

>>> from drafters import TargetModel, generate, load_drafter
>>> target = TargetModel.from_pretrained("checkpoints/stdlib-target")
>>> drafter = load_drafter("checkpoints/stdlib-eagle", target)
>>> result = generate(target, drafter, input_ids, max_new_tokens=128)
"""

from typing import TYPE_CHECKING

from drafters.methods import drafter_class, make_drafter

if TYPE_CHECKING:
    from drafters.base import Drafter as Drafter
    from drafters.learned import LearnedDrafter as LearnedDrafter
    from drafters.loading import load_drafter as load_drafter
    from drafters.loop.generate import GenerateResult as GenerateResult
    from drafters.loop.generate import generate as generate
    from drafters.loop.refill import Continued as Continued
    from drafters.loop.refill import generate_many as generate_many
    from drafters.loop.sampling import Sampling as Sampling
    from drafters.model.ends import FrozenEnds as FrozenEnds
    from drafters.model.ends import load_frozen_ends as load_frozen_ends
    from drafters.model.target import FeatureOutput as FeatureOutput
    from drafters.model.target import TargetModel as TargetModel

    __all__ = ["drafter_class", "make_drafter"]
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
    __all__ = ["drafter_class", "make_drafter", *_MODULES]

    def __getattr__(name):
        """Import what is asked for (PEP 562)."""
        from importlib import import_module

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
        return value

    def __dir__():
        return sorted({*globals(), *_MODULES})
