"""Names of models: folders, Hub repositories, or mistakes; texts without local paths; the cache folder."""

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # as peft calls them
READ = {".json", ".safetensors", ".model", ".txt", ".jinja"}  # suffixes of the files that libraries read in a folder
# A local path in a text: from the root, a home, a drive, a server (UNC) or the working directory, also after an
# option's letter (-I/home/u). Not a URL, not "a/b".
LOCAL = re.compile(
    r"(?:(?<![\w./~<-])|(?:(?<=^-[A-Za-z])|(?<=\s-[A-Za-z]))(?=[/~][^\s/]*/))(?!//)"
    r"(?:file://)?(?:[A-Za-z]:[\\/]|\\\\[\w.-]+\\|(?:~[\w.-]*|\.\.?)?/)"
    r"""[^\s'"`,;|<>()\[\]{}]+"""
)
RELATIVE = re.compile(r"(?:[\w.+@~-]+[\\/])+[\w.+@~:-]*")  # a text that is one relative path
# A text that is one absolute path, with or without spaces. Not a command with options, not "/word and more words".
ONE_PATH = re.compile(
    r"(?:file://)?(?:[A-Za-z]:[\\/]|\\\\[\w.-]+\\|~[\w.-]*/|/[^\s/]+/|/\S+$)"
    r"""(?:[^\s"`,;|<>]|[ ](?![-/~]))*"""
)


def is_missing_folder(name: str) -> bool:
    """True if ``name`` can only be a local folder, and that does not exist.

    ``checkpoints/x`` could be a Hub repository, unless ``checkpoints`` is a local folder.
    """
    path = Path(name).expanduser()
    if path.exists():
        return False
    return path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or Path(path.parts[0]).is_dir()


def is_hub_id(name: str) -> bool:
    """True if ``name`` has the form of a Hub repository ("user/name") and is no file or folder here. That it does not
    exist here says nothing in another working directory: for publishing, ``hub_names`` are recorded."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def hub_names(*names: str | Path | None) -> list[str]:
    """Those of the ``names`` of what was just loaded that are Hub repositories: no such file or folder is here."""
    return sorted({str(name) for name in names if name is not None and not Path(name).expanduser().exists()})


def shown_name(name: str, known: Collection[str]) -> str:
    """A name for publishing: a Hub repository, one of the ``known`` names, as it is; of a path the last component."""
    return name if name in known else _last_component(name)


def shown_names(value: Any, known: Collection[str], local: Collection[str] = ()) -> Any:
    """``names_only``, and of relative paths, too, only the last component is left.

    Args:
        known: names that stay, because they are the Hub's. local: names that are paths, whatever their form.
    """
    if isinstance(value, Mapping):
        return {key: shown_names(inner, known, local) for key, inner in names_only(value).items()}
    if isinstance(value, list | tuple):
        return [shown_names(inner, known, local) for inner in value]
    value = names_only(value)
    if not isinstance(value, str):
        return value
    key, equals, last = value.rpartition("=")  # an argument as key=value
    if last in known or not (last in local or RELATIVE.fullmatch(last)):
        return value
    return key + equals + _last_component(last)


def names_only(value: Any) -> Any:
    """Return ``value`` (JSON) for publishing: each local path in its strings is replaced by its last component."""
    if isinstance(value, Mapping):
        entries: dict[Any, Any] = {}
        for key, inner in value.items():
            name = shown = names_only(key)
            number = 1
            while shown in entries or (shown != key and shown in value):  # two folders may have files of one name
                number += 1
                shown = f"{name} ({number})"
            entries[shown] = names_only(inner)
        return entries
    if isinstance(value, list | tuple):
        return [names_only(inner) for inner in value]
    if not isinstance(value, str):
        return value
    key, equals, last = value.rpartition("=")  # an argument as key=value; its path may have spaces
    shown = _last_component(last) if ONE_PATH.fullmatch(last) else _without_folders(last)
    return _without_folders(key) + equals + shown


def _without_folders(text: str) -> str:
    return LOCAL.sub(lambda match: _last_component(match[0]), text)


def _last_component(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def user_cache() -> Path:
    """The folder of this library's cached files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "drafters"


def check_model(name: str | None, key: str, revision: str | None = None) -> None:
    """Raise ValueError if the model ``name``, given as ``key``, is a folder that does not exist or cannot be loaded."""
    if name is None:
        return
    if is_missing_folder(name):
        raise ValueError(f"{key}: there is no folder {name}; correct the path, or give a Hub repository as user/name")
    try:
        check_loadable(name, revision)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def check_loadable(name: str | Path, revision: str | None = None) -> None:
    """Refuse a path that no model, tokenizer or drafter can be loaded from, with a clearer message than a library's.

    Raises:
        ValueError: ``name`` is a file (torch would unpickle some), a folder and yet has a ``revision``, or a folder
            whose files may not be read.
    """
    path = Path(name)
    try:
        if path.is_file():
            raise ValueError(f"{str(name)!r} is a file; give its folder: {str(path.parent)!r}")
        if not path.is_dir():
            return
        files = sorted(file for file in path.iterdir() if file.suffix in READ and file.is_file())
    except PermissionError:
        raise ValueError(_denied(path)) from None
    if revision is not None:
        raise ValueError(f"revision is {revision!r}, but {str(name)!r} is a local folder: leave revision out")
    for file in files:
        readable(file)


def readable(path: Path) -> Path:
    """``path``; raises ValueError for a file without read permission (safetensors would report "No such file")."""
    try:
        path.open("rb").close()
    except PermissionError:
        raise ValueError(_denied(path)) from None
    except OSError:
        pass  # the reader reports it
    return path


def _denied(path: Path) -> str:
    return f"{path} may not be read (permission denied); let its owner allow it: chmod -R a+rX {path}"
