"""New heads and drafters by the keys of config.json: those of the shape, and drafting options."""

from typing import Any

from transformers import PretrainedConfig

from drafters import TargetModel, drafter_class


def new_head(method: Any, config: PretrainedConfig, **keys: Any) -> Any:
    """A new head for a target with this ``config``; ``method``: its name or its class. Options are left out."""
    kind: Any = drafter_class(method) if isinstance(method, str) else method
    return kind.build_module(config, kind.read_section(keys, "test")[0])


def new_drafter(method: Any, target: TargetModel, head: Any = None, **keys: Any) -> Any:
    """A drafter that holds ``head``, or a new one; ``keys`` of the shape are the new head's."""
    kind: Any = drafter_class(method) if isinstance(method, str) else method
    made = new_head(kind, target.config, **keys) if head is None else head
    options = {key: value for key, value in keys.items() if key not in kind.shape.model_fields}
    return kind(target, made, kind.options(**options))
