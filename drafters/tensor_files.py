"""Safetensors files as a user expects files to be: on the disk when they are said to be, and readable for others."""

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file through to the disk, with the permissions that the umask gives to any new file.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
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
    with path.open("rb") as file:
        os.fsync(file.fileno())


def keep_mode(path: Path, mode: int) -> None:
    """Give a file the ``mode`` that a new one has; safetensors makes its own, which only their owner may read."""
    if path.stat().st_mode != mode:  # some file systems know no modes
        path.chmod(stat.S_IMODE(mode))
