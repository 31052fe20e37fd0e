"""Room on the disk for a folder that need not be there yet, and what to say when it ends."""

import errno
import shutil
from pathlib import Path

from drafters.common.files import existing_folder
from drafters.common.wording import size_text


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
