"""Rank of this process among those that share one run. Processes take every n-th shard and need no network.

The rank comes from the environment of a launcher: torchrun and deepspeed (RANK, WORLD_SIZE, LOCAL_RANK), or Slurm's
srun. Without a launcher, give ``--rank 0 --ranks 4`` on the command line.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # from here on: Slurm's step ids of batch scripts and interactive shells


@dataclass(frozen=True)
class Rank:
    """Process ``index`` of ``count``; ``local``: its index on this machine, None if the launcher does not say."""

    index: int = 0
    count: int = 1
    local: int | None = None

    def describe(self) -> str:
        """``rank 1 of 4``, counted from 0; "" for a single process."""
        return f"rank {self.index} of {self.count}" if self.count > 1 else ""

    def takes(self, shard: int) -> bool:
        """Whether this process writes the shard with that number."""
        return shard % self.count == self.index

    def device(self, wanted: str | None) -> str | None:
        """``wanted``; under a launcher, unless it names one GPU, this process's own GPU.

        That GPU also becomes torch's current one, because pinned memory and streams use the current device.
        """
        if self.local is None or wanted not in (None, "cuda"):
            return wanted
        import torch  # here, so that programs find a rank without importing torch

        if not torch.cuda.is_available():
            return wanted
        gpu = f"cuda:{self.local % torch.cuda.device_count()}"
        torch.cuda.set_device(gpu)
        return gpu


def find_rank(rank: int | None, ranks: int | None, environment: Mapping[str, str] | None = None) -> Rank:
    """The rank from the command line, else from the launcher, else of a single process; ValueError if it is wrong."""
    known = os.environ if environment is None else environment
    if rank is None and ranks is None:
        return _from_launcher(known)
    if rank is None or ranks is None:
        raise ValueError(f"give both --rank and --ranks (found --rank {rank}, --ranks {ranks}), or neither")
    if not 0 <= rank < ranks:
        raise ValueError(f"--rank {rank} of --ranks {ranks}: ranks count from 0, so the last one is {ranks - 1}")
    return Rank(rank, ranks)


def _from_launcher(known: Mapping[str, str]) -> Rank:
    for names in (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", slurm_step(known), "SLURM_LOCALID")):
        rank, count, local = (known.get(name) for name in names)
        if rank is None or count is None:
            continue
        said = f"{names[0]}={rank}, {names[1]}={count} and {names[2]}={local} in the environment"
        try:
            parsed = Rank(int(rank), int(count), None if local is None else int(local))
        except ValueError:
            raise ValueError(f"{said} are not numbers; unset them, or give --rank and --ranks") from None
        if not 0 <= parsed.index < parsed.count:
            raise ValueError(f"{said} do not fit; unset them, or give --rank and --ranks")
        if parsed.count > 1 or names[0] == "RANK":
            return parsed
    return Rank()


def slurm_step(known: Mapping[str, str]) -> str:
    """Name of the variable with the number of tasks of this ``srun`` step; "" outside of a step.

    A batch script is not a step's task, though it has its job's SLURM_NTASKS and a SLURM_PROCID of 0.
    """
    step = known.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= FIRST_SPECIAL_STEP:
        return ""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in known else "SLURM_NTASKS"


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--rank`` and ``--ranks``, and the ``--local_rank`` that DeepSpeed's launcher appends."""
    parser.add_argument("--rank", type=int, help="number of this process, from 0; only without a launcher")
    parser.add_argument("--ranks", type=int, help="number of processes that share the work")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # also in the environment


def refuse_shared_map(rank: Rank, device_map: object, key: str = "device_map") -> None:
    """Raise ValueError if ``device_map`` (the config's ``key``) is set and this machine runs several processes."""
    if device_map is not None and rank.local:
        raise ValueError(
            f"{key} {device_map!r} spreads one target over all GPUs of a machine, but several processes were started "
            f"here; start one process a machine, or leave {key} out so that each has its own target"
        )
