"""Load the target as a config's ``TargetKeys`` say, and explain too little memory for it."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from data_prep.common.progress import quiet_in_log_files
from data_prep.common.ranks import Rank, refuse_shared_map
from drafters.common.threads import fit_threads
from drafters.common.wording import dtype_name
from drafters.model.files import resolve_device, resolve_dtype
from drafters.model.target import TargetModel

if TYPE_CHECKING:
    from data_prep.configs import TargetKeys


def load_target(name: str, config: "TargetKeys", rank: Rank, capture_only: bool = False) -> TargetModel:
    """The target ``name`` on this process's device, or over the GPUs of ``device_map``; ``capture_only`` as there.

    Raises ValueError as ``TargetModel.from_pretrained``, or if several processes share a machine's ``device_map``.
    """
    quiet_in_log_files()
    fit_threads()
    refuse_shared_map(rank, config.device_map)
    device = rank.device(config.device) if config.device_map is None else config.device
    more: Any = {"device_map": config.device_map, "capture_only": capture_only}
    target = TargetModel.from_pretrained(name, config.dtype, device, config.revision, **more)
    say_dtype(name, config.dtype, dtype_name(target.dtype), rank)
    return target


@contextlib.contextmanager
def enough_memory(when: str, fix: str) -> Iterator[None]:
    """Turn running out of memory into a ValueError with a fix."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ValueError(f"out of memory {when}; {fix} and run again: finished work is kept") from error


def say_dtype(target: str, asked: str, dtype: str, rank: Rank) -> None:
    """Print, on the first rank, which dtype ``auto`` became."""
    if asked == "auto" and rank.index == 0:
        print(f"{target} runs in {dtype} (dtype: auto)")


def dtype_here(config: "TargetKeys") -> str:
    """The dtype in which the target of ``config`` runs on this machine."""
    return dtype_name(resolve_dtype(config.dtype, resolve_device(config.device)))
