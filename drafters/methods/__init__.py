"""``make_drafter``: a drafter by the name of its method, which is the name of its file.

A method's file is imported when its name is used.
"""

import difflib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both import torch, and a mistyped name is answered without it
    from drafters.base import Drafter
    from drafters.model.target import TargetModel


def method_names(declaring: str = "name") -> list[str]:
    """Names of the methods: the files of this package with a class that has the file's name.

    Args:
        declaring: a class attribute; methods that do not set it are left out.
    """
    return sorted(name for name, text in _methods().items() if f"    {declaring} = " in text)


@cache
def _methods() -> dict[str, str]:
    """The text of each method's file. Each is read once: every drafter that is made asks for it."""
    files = [file for folder in import_module(__package__).__path__ for file in Path(folder).glob("*.py")]
    texts = {file.stem: file.read_text(encoding="utf-8") for file in files}
    return {name: text for name, text in texts.items() if f'    name = "{name}"\n' in text}


def check_method(name: str) -> None:
    """Raise ValueError for an unknown method."""
    known = method_names()
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"there is no drafter {name!r}; {meant}known: {', '.join(known)}")


def drafter_class(name: str) -> type["Drafter"]:
    """The drafter class of ``drafters/methods/<name>.py``.

    Raises:
        ValueError: an unknown method.
    """
    check_method(name)
    for value in vars(import_module(f".{name}", __package__)).values():
        if isinstance(value, type) and vars(value).get("name") == name:
            return value
    raise ValueError(f"drafters/methods/{name}.py holds no Drafter whose name is {name!r}")


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
