"""Write files: replaced as a whole, synced, readable for other users."""

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def existing_folder(path: Path) -> Path:
    """``path`` as an absolute path, or its nearest parent that exists."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return place


def check_folder(out: Path, key: str = "out:") -> None:
    """Check that ``out`` is, or can become, a folder to write to; creates nothing.

    Raises:
        ValueError: ``out`` or one of its parents is a file, or writing is not allowed.
    """
    there = existing_folder(out)
    if not there.is_dir():
        raise ValueError(f"{key} {out} cannot be a folder, for {there} is a file; give a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"{key} {there} may not be written to; choose another folder or change its permissions")


def check_new_folder(out: Path, key: str) -> None:
    """As ``check_folder``, and check that the folder is empty or does not exist."""
    check_folder(out, key)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{key} {out} is not empty; give another folder, or delete it")


def check_file(out: Path, key: str = "out:") -> None:
    """Check that ``out`` is, or can become, a file to write; creates nothing.

    Raises:
        ValueError: it is a folder, one of its parents is a file, or its folder may not be written to.
    """
    if out.is_dir():
        raise ValueError(f"{key} {out} is a folder; give a file")
    check_folder(out.parent, f"{key} {out}: its folder")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename it to ``path`` at the end: a kill or a power cut leaves the old file or the
    new one, never a part.

    Raises:
        OSError: it cannot be written; the error names ``path``, and the old file stays.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextlib.contextmanager
def replacing_files(folder: Path, last: Sequence[str]) -> Iterator[Path]:
    """Yield a temporary folder, and move its files into ``folder`` at the end, those named in ``last`` at last.

    A process killed during this leaves the old files, the new ones, or none of ``last``, without which readers refuse
    the folder.

    Raises:
        OSError: they cannot be written.
    """
    temporary = folder / ".export"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    yield temporary
    files = sorted(temporary.iterdir(), key=lambda file: last.index(file.name) if file.name in last else -1)
    mode = files[-1].stat().st_mode
    for file in files:
        keep_mode(file, mode)
        sync(file)
    for name in reversed(last):
        (folder / name).unlink(missing_ok=True)
    for file in files:
        file.replace(folder / file.name)
    sync(folder)
    temporary.rmdir()


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8; raises OSError as ``replacing`` does."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def replace_json(path: Path, value: Any, allow_nan: bool = False) -> None:
    """Write ``value`` as JSON; raises OSError as ``replacing`` does, and ValueError for a NaN that is not allowed."""
    replace_text(path, json.dumps(value, indent=2, allow_nan=allow_nan) + "\n")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of writing ``path`` name it: the error of a full disk names no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error.__cause__, OSError):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush the renames in a folder to the disk, on file systems that can."""
    with contextlib.suppress(OSError):
        sync(path)


def save_tensors(tensors: Mapping[str, "Tensor"], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file through to the disk, with the permissions that the umask gives to any new file.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    from safetensors import SafetensorError  # here: what writes text alone does without torch
    from safetensors.torch import save_file

    if path.exists():  # left by a process that was killed, and perhaps for its owner alone
        path.unlink()
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:  # it wraps the system's error in text
        full = "No space left" in str(error) or f"os error {errno.ENOSPC}" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error)) from error
    keep_mode(path, mode)
    sync(path)


def keep_mode(path: Path, mode: int) -> None:
    """Set the ``mode`` of a file; safetensors creates files that only their owner may read."""
    if path.stat().st_mode != mode:  # some file systems know no modes
        path.chmod(stat.S_IMODE(mode))
