"""A folder with a head in the form of its authors or of an engine: read it, and tell which head it is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafters.common.paths import check_loadable, readable
from drafters.common.wording import shortened
from drafters.config import validate
from drafters.heads.forms import Stored, load_pickled
from drafters.heads.keys import CONFIG_FILE, read_config
from drafters.heads.one_layer import PICKLED_FILE
from drafters.hub.checkpoint import WEIGHTS_FILE
from drafters.learned import LearnedDrafter
from drafters.methods import drafter_class, method_names

INDEXES = (f"{WEIGHTS_FILE}.index.json", f"{PICKLED_FILE}.index.json")


def read_folder(folder: Path, source: str, own: str) -> tuple[Path, Stored]:
    """The file of weights in a folder, and the folder's content; raises as ``read_config`` and ``read_weights``."""
    config = read_config(folder, source, own)
    path, weights = read_weights(folder, source)
    return path, Stored(folder, source, config, weights, path.name == PICKLED_FILE)


def read_weights(folder: Path, source: str) -> tuple[Path, dict[str, Tensor]]:
    """The file of weights in a folder, and its tensors. Of a pickled file only tensors are read.

    Raises:
        ValueError: no such file, several parts of one, or a file that is damaged or holds more than tensors.
    """
    check_loadable(folder)
    path = next((folder / name for name in (WEIGHTS_FILE, PICKLED_FILE) if (folder / name).is_file()), None)
    if path is None:
        if index := next((name for name in INDEXES if (folder / name).is_file()), None):
            raise ValueError(f"{source} has its weights in parts ({index}); put them into one {WEIGHTS_FILE}")
        names = sorted(entry.name for entry in folder.iterdir())
        raise ValueError(
            f"{source} holds no {WEIGHTS_FILE} and no {PICKLED_FILE}; found: {', '.join(names) or 'nothing'}"
        )
    if path.name == WEIGHTS_FILE:
        try:
            return path, load_file(readable(path))
        except SafetensorError as error:
            raise ValueError(f"{source}: {path.name} cannot be read ({error}); it may be cut off") from None
    content = load_pickled(path, source)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise ValueError(f"{source}: {path.name} must hold tensors by name, found {shortened(content)}")
    return path, {name: value.contiguous() for name, value in content.items()}


def exportable() -> list[type[LearnedDrafter]]:
    """The methods whose heads other programs load."""
    kinds: list[Any] = [drafter_class(name) for name in method_names()]
    return [kind for kind in kinds if issubclass(kind, LearnedDrafter) and kind.forms.readers]


def kind_of(config: Mapping[str, Any], weights: Mapping[str, Tensor], source: str) -> type[LearnedDrafter]:
    """The method of a head with this ``config.json`` and these tensors.

    Raises:
        ValueError: no head has such tensors, or the keys of this head have other types.
    """
    matches = {kind: kind.forms.match(config, {*weights}) for kind in exportable()}
    kind = max(matches, key=lambda one: matches[one])
    if not matches[kind]:
        known = ", ".join(other.forms.noun for other in matches)
        held = ", ".join(sorted(weights)[:3]) or "nothing"
        raise ValueError(f"{source} is no head of a known kind (known: {known}): it holds {held}")
    validate(kind.forms.keys, dict(config), f"{source}: {CONFIG_FILE}")
    return kind
