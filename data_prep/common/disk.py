"""Free space and checksums on the disk."""

import errno
import hashlib
import shutil
from pathlib import Path

from drafters.common.files import existing_folder
from drafters.common.wording import size_text


def free_bytes(path: Path) -> int:
    """Bytes that can still be written below ``path``, which need not exist yet."""
    return shutil.disk_usage(existing_folder(path)).free


def check_room(place: Path, needed: float, what: str, fix: str) -> None:
    """Raise ValueError unless ``what`` ("the run folder runs/eagle") finds ``needed`` free bytes below ``place``."""
    free = free_bytes(place)
    if needed > free:
        where = existing_folder(place)
        raise ValueError(f"{what} needs {size_text(needed)}, and {size_text(free)} are free at {where}; {fix}")


def source_bytes(source: str) -> int:
    """Rough size of a data file's text in bytes; 0 if it is unknown before reading."""
    path = Path(source)
    if not path.is_file():
        return 0
    return path.stat().st_size * (4 if path.suffix == ".gz" else 1)  # JSON compresses at least fourfold


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_error(error: OSError, path: Path, kept: str) -> OSError:
    """An error of writing ``path`` that says what to do; ``kept`` says which data is safe."""
    what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
    return OSError(
        error.errno or errno.EIO,
        f"could not write {path}: {what}; {kept}. Free some space and run the same command again to continue",
    )
