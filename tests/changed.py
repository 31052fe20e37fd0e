"""Damaged files: a JSON document with one key changed at a time."""

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

REMOVED = object()
VALUES = (REMOVED, None, "text", ["text"], 1.5, {})  # instead of the right one


def changes(content: Any) -> Iterator[tuple[str, bool, Any]]:
    """Yield every change to one of ``VALUES``: the key, whether the value has the type of the right one, the copy."""
    text = json.dumps(content)
    for path in _paths(content):
        for value in VALUES:
            changed = json.loads(text)
            inner = changed
            for part in path[:-1]:
                inner = inner[part]
            alike = type(value) is type(inner[path[-1]])
            if value is REMOVED and isinstance(inner, list):
                continue  # a list that is one shorter is as good
            if value is REMOVED:
                del inner[path[-1]]
            else:
                inner[path[-1]] = value
            yield [part for part in path if isinstance(part, str)][-1], alike, changed


def _paths(content: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each key below ``content``; of a list only the last element."""
    keys: Any = content if isinstance(content, dict) else range(len(content))[-1:]
    for key in keys:
        yield (key,)
        if isinstance(content[key], dict | list):
            yield from ((key, *path) for path in _paths(content[key]))


def check_refusals(
    content: Any,
    file: Path,
    read: Callable[[], object],
    optional: Collection[str] = (),
    dump: Callable[[Any], str] = json.dumps,
) -> int:
    """Call ``read`` with every change of ``content`` in ``file``; return how many it refuses.

    It may read a file whose change does not matter to it. Otherwise it raises a ValueError that names file and key. Of
    a value of the right type, or a missing ``optional`` one, it may say something else, such as that two reports are of
    different texts.
    """
    refused = 0
    for key, alike, changed in changes(content):
        file.write_text(dump(changed))
        try:
            read()
        except ValueError as error:
            assert alike or key in optional or (str(file) in str(error) and key in str(error)), (key, error)
            refused += not alike
    file.write_text(dump(content))
    read()
    return refused
