"""Variants of a model: copies that share its weights and differ in a few parts.

Checks and partial forwards need other sliding windows, fewer layers or another LM head. The model itself stays as it
is, because another thread may generate with it.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn


def variant(module: Any, parts: Mapping[int, Any]) -> Any:
    """Return ``module`` with other objects in place of some.

    Only the modules around a replaced object are copied; all else is shared.

    Args:
        parts: ``id`` of a submodule, or of an attribute such as the config -> its replacement.
    """
    if id(module) in parts:
        return parts[id(module)]
    children = {name: None if part is None else variant(part, parts) for name, part in module._modules.items()}
    changes = {name: parts[id(value)] for name, value in vars(module).items() if id(value) in parts}
    if not changes and all(children[name] is part for name, part in module._modules.items()):
        return module
    copied = copy.copy(module)
    bound = {name: _bound_to(copied, value, module) for name, value in vars(module).items()}
    vars(copied).update({**bound, **changes, "_modules": children})
    return copied


def _bound_to(copied: nn.Module, value: Any, module: nn.Module) -> Any:
    """Return ``value`` bound to the copy if it is a function bound to ``module``, as accelerate and torch.compile set
    in place of ``forward``."""
    value = getattr(value, "_torchdynamo_orig_callable", value)
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, copied)
    if isinstance(value, functools.partial) and any(argument is module for argument in value.args):
        arguments = [copied if argument is module else argument for argument in value.args]
        return functools.partial(value.func, *arguments, **value.keywords)
    return value


class StandIn(nn.Module):
    """Stands for a module in a variant of its model: calls it, and returns what ``read`` makes of the output.

    Args:
        read: called with the output, then with the inputs.
    """

    def __init__(self, module: nn.Module, read: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.read = (module,), read  # in a tuple: not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module[0], name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self.read(self.module[0](*arguments, **named), *arguments, **named)
