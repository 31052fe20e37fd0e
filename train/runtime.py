"""One process or many, CPU or GPU: what has to be in place before DeepSpeed starts."""

import os
import socket
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from train.config import TrainConfig


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    count: int

    @property
    def is_first(self) -> bool:
        """True for the one rank that writes files and prints."""
        return self.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all ranks."""
        if self.count > 1:
            torch.distributed.all_reduce(values)
        return values


def start(config: TrainConfig) -> Ranks:
    """Start torch.distributed through DeepSpeed: under its launcher as many ranks as it made, alone a single one."""
    _describe_single_process()
    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that it had to find out
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    # Of DeepSpeed's extensions none is needed here. An empty table keeps its CPU backend from compiling a shared-memory
    # all-reduce at the first start (30 s and a C++ compiler); gloo does that work.
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)
    deepspeed.init_distributed(verbose=False)
    ranks = Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size())
    if not torch.accelerator.is_available():
        local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", ranks.count)))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(config.threads or max(1, cores // local))
    return ranks


def stop() -> None:
    """Leave the process group."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def seed_step(seed: int, step: int, ranks: Ranks) -> None:
    """Seed the global generators (dropout) from the step alone, so that a resumed run draws what the first would."""
    torch.manual_seed((seed * 1_000_003 + step) * 4_096 + ranks.rank)


def _describe_single_process() -> None:
    """The variables that a launcher would set, for a plain ``python train/...``."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(single)
