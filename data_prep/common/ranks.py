"""Which of several processes this one is: they share a dump by taking every n-th shard, and need not talk.

Any launcher that says so in the environment will do: torchrun and deepspeed (RANK, WORLD_SIZE, LOCAL_RANK), or Slurm's
srun; without one, ``--rank 0 --ranks 4`` on the command line.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from data_prep.common.progress import quiet_in_log_files
from drafters.common.wording import dtype_name
from drafters.config import Config, Dtype

if TYPE_CHECKING:
    from drafters.model.target import TargetModel

FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm's ids of batch scripts, interactive shells and the like: one process, not many


@dataclass(frozen=True)
class Rank:
    """Process ``index`` of ``count``; ``local`` counts those of this machine, if the launcher says."""

    index: int = 0
    count: int = 1
    local: int | None = None

    def describe(self) -> str:
        """``rank 1 of 4``, counted from 0; nothing for a single process."""
        return f"rank {self.index} of {self.count}" if self.count > 1 else ""

    def takes(self, shard: int) -> bool:
        """Whether this process writes the shard of that number."""
        return shard % self.count == self.index

    def device(self, wanted: str | None) -> str | None:
        """``wanted``, or, where no particular GPU is named, this process's own of the machine's GPUs, which becomes its
        current one: what names no device (pinned memory, streams) would else be the first GPU's.
        """
        if self.local is None or wanted not in (None, "cuda"):
            return wanted
        import torch  # here: most of what is asked of a rank does not need it

        if not torch.cuda.is_available():
            return wanted
        own = f"cuda:{self.local % torch.cuda.device_count()}"
        torch.cuda.set_device(own)
        return own


class TargetKeys(Config):
    """How a config's target is loaded, and its tokenizer."""

    revision: str | None = None  # of the target on the Hub
    dtype: Dtype = "auto"  # in which the target runs; auto: bf16 where the device has instructions for it
    device: str | None = None  # default: cuda if there is one (under a launcher the process's own), else cpu
    device_map: str | dict[str, int | str] | None = None  # in place of device: layers over several GPUs, e.g. auto
    chat_template: str | None = None  # file with a Jinja template, used in place of the tokenizer's own


def load_target(name: str, config: TargetKeys, rank: Rank) -> "TargetModel":
    """The target ``name`` as its config says, on this process's device or over all that ``device_map`` names.

    Raises:
        ValueError: see ``TargetModel.from_pretrained``; or processes of one machine that would each want all its GPUs.
    """
    from drafters.common.threads import fit_threads
    from drafters.model.target import TargetModel

    quiet_in_log_files()
    fit_threads()
    refuse_shared_map(rank, config.device_map)
    device = rank.device(config.device) if config.device_map is None else config.device
    target = TargetModel.from_pretrained(name, config.dtype, device, config.revision, device_map=config.device_map)
    say_dtype(name, config.dtype, dtype_name(target.dtype), rank)
    return target


def say_dtype(target: str, asked: str, dtype: str, rank: Rank) -> None:
    """Print which dtype ``auto`` was for a target, on the first rank."""
    if asked == "auto" and rank.index == 0:
        print(f"{target} runs in {dtype} (dtype: auto)")


def dtype_here(config: TargetKeys) -> str:
    """The dtype that the target of ``config`` runs in on this machine."""
    from drafters.model.files import resolve_device, resolve_dtype

    return dtype_name(resolve_dtype(config.dtype, resolve_device(config.device)))


def find_rank(rank: int | None, ranks: int | None, environment: Mapping[str, str] | None = None) -> Rank:
    """This process's rank: as given on the command line, else as the launcher says, else a single process.

    Raises:
        ValueError: one number without the other, or a rank outside of its count.
    """
    known = os.environ if environment is None else environment
    if rank is None and ranks is None:
        return _from_launcher(known)
    if rank is None or ranks is None:
        raise ValueError(f"give both --rank and --ranks (found --rank {rank}, --ranks {ranks}), or neither")
    if not 0 <= rank < ranks:
        raise ValueError(f"--rank {rank} of --ranks {ranks}: ranks count from 0, so the last one is {ranks - 1}")
    return Rank(rank, ranks)


def _from_launcher(known: Mapping[str, str]) -> Rank:
    for rank, count, local in (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("SLURM_PROCID", slurm_step(known), "SLURM_LOCALID"),
    ):
        if rank not in known or count not in known:
            continue
        try:
            found = Rank(int(known[rank]), int(known[count]), int(known[local]) if local in known else None)
        except ValueError:
            raise ValueError(
                f"{rank}={known[rank]!r}, {count}={known[count]!r} and {local}={known.get(local)!r} in the environment "
                "are no numbers; unset them, or give --rank and --ranks"
            ) from None
        if not 0 <= found.index < found.count:
            raise ValueError(
                f"{rank}={found.index} and {count}={found.count} in the environment do not fit; unset them, or give "
                "--rank and --ranks"
            )
        if found.count > 1 or rank == "RANK":
            return found
    return Rank()


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """``--rank`` and ``--ranks`` for ``find_rank``, and the ``--local_rank`` that DeepSpeed's launcher appends."""
    parser.add_argument("--rank", type=int, help="this process's number, from 0, where no launcher says it")
    parser.add_argument("--ranks", type=int, help="how many processes share the work")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # the environment says it, too


def refuse_shared_map(rank: Rank, device_map: object, key: str = "device_map") -> None:
    """Raise ValueError where a device map would give this process the GPUs of another one of its machine.

    Args:
        rank: this process.
        device_map: how a target is spread over GPUs; None: it is not.
        key: what the config calls it.
    """
    if device_map is not None and rank.local:
        raise ValueError(
            f"{key} {device_map!r} lays one target over all GPUs of a machine, and several processes were started "
            f"here; start one process a machine, or leave {key} out so that each has its own target"
        )


def slurm_step(known: Mapping[str, str]) -> str:
    """The variable with the number of tasks of the job step that ``srun`` started this process for.

    "" where it is no such task. A batch script is none, though it sees its job's SLURM_NTASKS and a SLURM_PROCID of 0.
    """
    try:
        step = int(known.get("SLURM_STEP_ID", ""))
    except ValueError:
        return ""
    if step >= FIRST_SPECIAL_STEP:
        return ""
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in known else "SLURM_NTASKS"
