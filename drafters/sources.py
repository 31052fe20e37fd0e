"""Where a model, a tokenizer or a drafter may come from: a local folder, or a repository on the Hub.

Looked at before any library opens it: what a library makes of a file, or of one that may not be read, helps nobody.
"""

from pathlib import Path

READ = {".json", ".safetensors", ".model", ".txt", ".jinja"}  # suffixes of the files that are read from such a folder


def check_source(name: str | Path, revision: str | None = None) -> None:
    """Refuse what can be no source; whether a folder or a repository holds what is wanted shows when it is read.

    Raises:
        ValueError: ``name`` is a file (torch would unpickle some), a folder with a ``revision``, or a folder with files
            that may not be read.
    """
    path = Path(name)
    try:
        if path.is_file():
            raise ValueError(f"{str(name)!r} is a file; give the folder that it lies in: {str(path.parent)!r}")
        if not path.is_dir():
            return
        files = sorted(file for file in path.iterdir() if file.suffix in READ and file.is_file())
    except PermissionError:
        raise ValueError(_denied(path)) from None
    if revision is not None:
        raise ValueError(
            f"revision is {revision!r}, but {str(name)!r} is a local folder, which has no revisions; leave revision "
            "out, or give the name of a Hub repository"
        )
    for file in files:
        readable(file)


def readable(path: Path) -> Path:
    """``path``; a file that is there and may not be read is a ValueError (safetensors says "No such file" of it)."""
    try:
        path.open("rb").close()
    except PermissionError:
        raise ValueError(_denied(path)) from None
    except OSError:
        pass  # whoever reads it will tell
    return path


def _denied(path: Path) -> str:
    return f"{path} may not be read (permission denied); let its owner allow it: chmod -R a+rX {path}"
