"""Room on the disk for a folder that need not be there yet."""

import shutil
from pathlib import Path


def existing_folder(path: Path) -> Path:
    """``path``, made absolute, or the nearest of its parents that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def free_bytes(path: Path) -> int:
    """Bytes that can still be written below ``path``.

    Raises:
        OSError: the file system does not say.
    """
    return shutil.disk_usage(existing_folder(path)).free
