"""``make_drafter``: a drafter by the name of its method.

``METHODS`` is the one list of methods. A method's file is imported when its name is used.
"""

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both import torch, and a mistyped name is answered without it
    from drafters.base import Drafter
    from drafters.model.target import TargetModel

# Name in configs -> module in this package, and class.
METHODS = {
    "autoregressive": "autoregressive:AutoregressiveDrafter",
    "bild": "papers.bild:BiLDDrafter",
    "cascade": "papers.cascade:CascadeDrafter",
    "dflash": "block:DFlashDrafter",
    "dspark": "block:DSparkDrafter",
    "eagle": "eagle:EagleDrafter",
    "eagle3": "eagle:Eagle3Drafter",
    "hybrid": "hybrid:HybridDrafter",
    "kangaroo": "kangaroo:KangarooDrafter",
    "llmcad": "papers.llmcad:LLMCadDrafter",
    "lookahead": "papers.lookahead:LookaheadDrafter",
    "medusa": "medusa:MedusaDrafter",
    "mjgd": "papers.mjgd:MJGDDrafter",
    "mjsd": "papers.mjsd:MJSDDrafter",
    "ouroboros": "papers.ouroboros:OuroborosDrafter",
    "prompt_lookup": "prompt_lookup:PromptLookupDrafter",
    "replay": "replay:ReplayDrafter",
    "rest": "papers.rest:RestDrafter",
    "specinfer": "papers.specinfer:SpecInferDrafter",
    "spectr": "papers.spectr:SpecTrDrafter",
    "speculative": "speculative:SpeculativeDrafter",
    "suffix": "suffix:SuffixDrafter",
}


def method_names() -> list[str]:
    """Return the names of the methods."""
    return sorted(METHODS)


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
    module, _, kind = METHODS[name].partition(":")
    found: type[Drafter] = getattr(import_module(f".{module}", __package__), kind)
    return found


def make_drafter(name: str, target: "TargetModel", **options: Any) -> "Drafter":
    """Make a drafter from its method's name and options, as configs give them.

    Args:
        name: the method.
        target: the target it drafts for.
        options: the method's options. A draft model may be a loaded ``TargetModel``, which several drafters can share.
            A learned drafter also takes ``checkpoint``, a folder or Hub repository of a drafter or of an adapter for
            it, and ``adapter``, the same for the adapter.

    Raises:
        ValueError: an unknown method or option, or a checkpoint that does not fit.
    """
    kind: Any = drafter_class(name)
    if hasattr(kind, "from_checkpoint"):
        path = options.pop("checkpoint", None)
        if path is None:
            raise ValueError(f"drafter {name!r} is learned: give checkpoint: a folder or a Hub repository")
        return kind.from_checkpoint(target, path, **options)
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
