"""Free space, checksums, and names of outputs on the disk."""

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


def write_error(error: OSError, path: Path, safe: str) -> OSError:
    """An error of writing ``path`` that says what to do; ``safe`` says which data is safe."""
    what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
    return OSError(
        error.errno or errno.EIO,
        f"could not write {path}: {what}; {safe}. Free some space and run the same command again to continue",
    )


# Files of data_prep.regenerate and data_prep.magpie.
def sidecar(out: str) -> Path:
    """``<out>.json`` with the settings and counts of a finished output."""
    return Path(f"{out}.json")


def unfinished(out: str) -> Path:
    """The folder of the journals of an unfinished output."""
    return Path(f"{out}.unfinished")


def is_finished(out: str) -> bool:
    """Whether the output and its sidecar exist."""
    return sidecar(out).is_file() and Path(out).is_file()


def check_own(out: str) -> None:
    """Raise ValueError if ``out`` exists without a sidecar or journals: another program wrote it."""
    if Path(out).exists() and not sidecar(out).exists() and not unfinished(out).exists():
        raise ValueError(f"out: {out} exists and was not written by this program; give another file or delete it")
