"""``make_drafter``: a drafter by the name of its method.

``METHODS`` is the one list of methods. A method's file is imported when its name is used. What other parts need to know
of a method its class declares, and the shape of its head, which needs no torch.
"""

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from drafters.heads.shape import HeadShape

if TYPE_CHECKING:  # both import torch, and a mistyped name is answered without it
    from drafters.base import Drafter
    from drafters.model.target import TargetModel


class Method(NamedTuple):
    """Where a method is.

    drafter: module in this package, and class. shape: of a learned method, the same of its head's shape in ``heads``.
    """

    drafter: str
    shape: str | None = None


# By name in configs.
METHODS = {
    "autoregressive": Method("autoregressive:AutoregressiveDrafter"),
    "bild": Method("papers.bild:BiLDDrafter"),
    "cascade": Method("papers.cascade:CascadeDrafter"),
    "dflash": Method("block:DFlashDrafter", "block.shape:BlockShape"),
    "dflash2": Method("dflash2:DFlash2Drafter", "dflash2.shape:DFlash2Shape"),
    "dspark": Method("block:DSparkDrafter", "block.shape:DSparkShape"),
    "eagle": Method("eagle:EagleDrafter", "eagle.shape:EagleShape"),
    "eagle3": Method("eagle:Eagle3Drafter", "eagle3.shape:Eagle3Shape"),
    "hybrid": Method("hybrid:HybridDrafter"),
    "kangaroo": Method("kangaroo:KangarooDrafter", "kangaroo.shape:KangarooShape"),
    "llmcad": Method("papers.llmcad:LLMCadDrafter"),
    "lookahead": Method("papers.lookahead:LookaheadDrafter"),
    "medusa": Method("medusa:MedusaDrafter", "medusa.shape:MedusaShape"),
    "mjgd": Method("papers.mjgd:MJGDDrafter"),
    "mjsd": Method("papers.mjsd:MJSDDrafter"),
    "mtp": Method("mtp:MTPDrafter", "mtp.shape:MTPShape"),
    "ouroboros": Method("papers.ouroboros:OuroborosDrafter"),
    "peagle": Method("peagle:PEagleDrafter", "peagle.shape:PEagleShape"),
    "prompt_lookup": Method("prompt_lookup:PromptLookupDrafter"),
    "replay": Method("replay:ReplayDrafter"),
    "rest": Method("papers.rest:RestDrafter"),
    "specinfer": Method("papers.specinfer:SpecInferDrafter"),
    "spectr": Method("papers.spectr:SpecTrDrafter"),
    "speculative": Method("speculative:SpeculativeDrafter"),
    "suffix": Method("suffix:SuffixDrafter"),
}


def method_names() -> list[str]:
    """Return the names of the methods."""
    return sorted(METHODS)


def learned_methods() -> list[str]:
    """Return the names of the methods whose drafter has a trained head."""
    return [name for name in method_names() if METHODS[name].shape]


def check_method(name: str) -> None:
    """Raise ValueError for an unknown method."""
    if name not in METHODS:
        near = difflib.get_close_matches(str(name), METHODS, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no drafter {name!r}; {meant}known: {', '.join(method_names())}")


def drafter_class(name: str) -> type["Drafter"]:
    """Return the class of the method.

    Raises:
        ValueError: an unknown method.
    """
    check_method(name)
    module, _, kind = METHODS[name].drafter.partition(":")
    drafter_type: type[Drafter] = getattr(import_module(f".{module}", __package__), kind)
    return drafter_type


def head_shape(name: str) -> type[HeadShape]:
    """Return the schema of the method's head, without torch; of a method without a head, one without keys."""
    if name not in METHODS or METHODS[name].shape is None:
        return HeadShape
    module, _, kind = str(METHODS[name].shape).partition(":")
    shape: type[HeadShape] = getattr(import_module(f"drafters.heads.{module}"), kind)
    return shape


def taps_for(methods: Iterable[str], layers: int, others: Iterable[int] = ()) -> list[int]:
    """Return the union of what ``methods`` read from a target of ``layers`` layers and the taps ``others``, ascending.

    Raises:
        ValueError: the target is too shallow for a method's default.
    """
    taps = set(others)
    for method in methods:
        try:
            taps |= set(head_shape(method).usual_taps(layers))
        except ValueError as error:
            raise ValueError(f"{method}: {error}") from None
    return sorted(taps)


def make_drafter(name: str, target: "TargetModel", **options: Any) -> "Drafter":
    """Make a drafter from its method's name and options, as configs give them.

    Args:
        name: the method.
        target: the target it drafts for.
        options: the method's options. A draft model may be a loaded ``TargetModel``, which several drafters can share.
            A learned drafter also takes ``checkpoint``, a folder or Hub repository of a drafter or of an adapter for
            it, and ``adapter``, the same for the adapter. ``mtp`` without a checkpoint is the target's own layer.

    Raises:
        ValueError: an unknown method or option, or a checkpoint that does not fit.
    """
    kind: Any = drafter_class(name)
    if hasattr(kind, "from_checkpoint"):
        path = options.pop("checkpoint", None)
        return kind.from_target(target, **options) if path is None else kind.from_checkpoint(target, path, **options)
    return kind.from_options(target, **options)


def inner_drafter(inner: "Drafter | dict[str, Any]", target: "TargetModel") -> "Drafter":
    """The inner drafter of another one: made from its name and options, or already built for the same ``target``.

    Raises:
        ValueError: no name, an unknown method or option, or a drafter of another target.
    """
    if isinstance(inner, dict):
        options = dict(inner)
        name = options.pop("drafter", None)
        if not isinstance(name, str):
            raise ValueError(f"inner must name its drafter, for example {{drafter: speculative, ...}}; found {inner}")
        return make_drafter(name, target, **options)
    if inner.target is not target:
        raise ValueError(f"the inner drafter was built for target {inner.target.name!r}: use this target object")
    return inner
