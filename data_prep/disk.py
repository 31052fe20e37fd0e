"""Room on the disk for a folder that need not be there yet, and what to say when it ends."""

import errno
import os
import shutil
from pathlib import Path

from drafters.wording import size_text


def existing_folder(path: Path) -> Path:
    """``path``, made absolute, or the nearest of its parents that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def check_folder(out: Path, key: str = "out:") -> None:
    """Check that ``out`` is, or can become, a folder to write to; creates nothing.

    Raises:
        ValueError: a file stands in the way, or writing is not allowed.
    """
    there = existing_folder(out)
    if not there.is_dir():
        raise ValueError(f"{key} {out} cannot be a folder, for {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{key} {there} may not be written to; choose another folder or change its permissions")


def check_new_folder(out: Path, key: str) -> None:
    """As ``check_folder``, and that nothing is in it yet."""
    check_folder(out, key)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{key} {out} is not empty; give another folder, or delete it")


def free_bytes(path: Path) -> int:
    """Bytes that can still be written below ``path``.

    Raises:
        OSError: the file system does not say.
    """
    return shutil.disk_usage(existing_folder(path)).free


def check_room(place: Path, needed: float, what: str, fix: str) -> None:
    """Raise ValueError unless there is room for ``needed`` bytes below ``place``.

    Args:
        what: that needs them, in the singular: "the run folder runs/eagle".
        fix: what helps where there is too little.
    """
    free = free_bytes(place)
    if needed > free:
        where = existing_folder(place)
        raise ValueError(f"{what} needs {size_text(needed)}, and {size_text(free)} are free at {where}; {fix}")


def source_bytes(source: str) -> int:
    """Roughly how many bytes of text a data file holds; 0 where that is not known before it is read."""
    path = Path(source)
    if not path.is_file():
        return 0
    return path.stat().st_size * (4 if path.suffix == ".gz" else 1)  # as JSON compresses, at the least


def write_error(error: OSError, path: Path, kept: str) -> OSError:
    """``error`` of writing ``path`` in words that help; ``kept``: what it leaves whole."""
    what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
    return OSError(
        error.errno or errno.EIO,
        f"could not write {path}: {what}; {kept}. Free some space and run the same command again to continue",
    )
