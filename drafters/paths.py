"""Which names of models are folders here, and which may be repositories on the Hub."""

from pathlib import Path


def is_missing_folder(name: str) -> bool:
    """Whether ``name`` can only mean a folder of this machine, and there is none.

    ``checkpoints/x`` could be a Hub repository's name; where ``checkpoints`` is a folder here, it is not meant as one.
    """
    path = Path(name).expanduser()
    if path.exists():
        return False
    return path.is_absolute() or name.startswith(".") or len(path.parts) > 2 or Path(path.parts[0]).is_dir()


def check_model(name: str | None, key: str) -> None:
    """Raise ValueError if ``name``, a config's ``key``, can only mean a folder that is not there."""
    if name is not None and is_missing_folder(name):
        raise ValueError(f"{key}: there is no folder {name}; mend the path, or give a Hub repository as user/name")
