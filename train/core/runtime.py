"""Ranks, devices and threads of this process, set up before DeepSpeed starts."""

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from data_prep.common.ranks import slurm_step
from drafters.common.precision import training_dtype
from drafters.common.threads import cpu_cores
from drafters.model.files import resolve_dtype
from train.core.config import TrainConfig


@dataclass(frozen=True)
class Ranks:
    """This process's rank, and the number of ranks."""

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


ALONE = Ranks(0, 1)


def check_same_step(ranks: Ranks, step: int, device: torch.device) -> None:
    """Raise ValueError, on every rank, unless all continue from the same ``step``; a collective."""
    steps = torch.zeros(ranks.count, dtype=torch.int64, device=device)
    steps[ranks.rank] = step
    by_rank = ranks.total(steps).tolist()
    if len(set(by_rank)) > 1:
        raise ValueError(
            f"the ranks found saved states of different steps ({', '.join(map(str, by_rank))}): the run folder must "
            "lie where every node sees the same files; a network file system may need a minute after a kill: start "
            "again"
        )


def local_ranks(otherwise: int) -> int:
    """Number of ranks on this machine, from the variables of torchrun, Slurm and DeepSpeed's launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", otherwise)))


def local_rank() -> int:
    """Number of this rank on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def threads_of_rank(environment: Mapping[str, str], local: int) -> int | None:
    """CPU threads of one of ``local`` ranks on this machine; None if OMP_NUM_THREADS decides, which torch has read.

    torchrun sets OMP_NUM_THREADS=1 for several ranks if the user has not set it, so that 1 is ignored. DeepSpeed's
    launcher sets it only with --bind_cores_to_rank, to the number of the rank's cores.
    """
    wish = environment.get("OMP_NUM_THREADS")
    if wish and not (wish == "1" and local > 1 and "TORCHELASTIC_RUN_ID" in environment):
        return None
    return max(1, cpu_cores() // local)


def check_devices(config: TrainConfig) -> None:
    """Raise ValueError if the config names a device that this machine lacks."""
    wanted, devices = torch.device(config.tau_device or "cpu"), ["cpu"]
    if (kind := torch.accelerator.current_accelerator(check_available=True)) is not None:
        devices += [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]
    if wanted.type != "cpu" and f"{wanted.type}:{wanted.index or 0}" not in devices:
        raise ValueError(
            f"tau_device: this machine has no {config.tau_device}, only {', '.join(devices)}; set one, or null"
        )


def seed_step(seed: int, step: int, ranks: Ranks) -> None:
    """Seed the global generators (dropout) from the step, so that a resumed run draws the same numbers."""
    torch.manual_seed((seed * 1_000_003 + step) * 4_096 + ranks.rank)


def describe_process(environment: MutableMapping[str, str]) -> None:
    """Set a launcher's variables if no launcher did: for a Slurm task, or for a single process.

    DeepSpeed's launcher, torchrun and mpirun wrappers set RANK and WORLD_SIZE. Then only the port of a single process
    changes, because DeepSpeed's is the same for every training on a machine. Under ``srun`` with several tasks, each
    task is a rank. A batch script's own process is no task, although it sees SLURM_NTASKS:
    ``data_prep.common.ranks.slurm_step``.

    Raises:
        ValueError: a Slurm step without a list of its hosts.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        if environment["WORLD_SIZE"] == "1" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            environment["MASTER_PORT"] = free_port()
        return
    tasks = environment.get(slurm_step(environment), "1")
    if int(tasks) > 1:
        environment.update(_slurm_task(environment, tasks))
        return
    environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())


def free_port() -> str:
    """A free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _slurm_task(environment: MutableMapping[str, str], tasks: str) -> dict[str, str]:
    """The variables of a Slurm task; MASTER_ADDR and MASTER_PORT keep given values."""
    hosts = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", ""))
    if "MASTER_ADDR" not in environment and not hosts:
        raise ValueError("srun started this task without SLURM_STEP_NODELIST: set MASTER_ADDR to the first node's name")
    job, step = int(environment.get("SLURM_JOB_ID", "0")), int(environment.get("SLURM_STEP_ID", "0"))
    local = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", tasks))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": environment.get("LOCAL_WORLD_SIZE", local[0] if local else "1"),
        "MASTER_ADDR": environment.get("MASTER_ADDR", first_host(hosts)),
        # The same for all tasks of a step, another one for the next step on the same nodes.
        "MASTER_PORT": environment.get("MASTER_PORT", str(20_000 + (job * 31 + step) % 12_000)),
    }


def first_host(nodes: str) -> str:
    """The first host of Slurm's compressed node list: ``gpu[07-09,12],login1`` -> ``gpu07``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0]) if first else nodes


def take_device(environment: MutableMapping[str, str]) -> None:
    """Select the GPU of LOCAL_RANK; if each process sees only one GPU, that one."""
    count, local = torch.accelerator.device_count(), int(environment.get("LOCAL_RANK", "0"))
    if count == 1 and slurm_step(environment):  # --gpus-per-task=1
        local = 0
    if local >= count:
        raise ValueError(f"process {local + 1} of this machine has no GPU, there are {count}: start no more than that")
    environment["LOCAL_RANK"] = str(local)
    torch.accelerator.set_device_index(local)


def rank_device() -> torch.device:
    """The device that this rank trains on."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def dtype_of(config: TrainConfig) -> torch.dtype:
    """The dtype that the drafter computes in on this rank's device."""
    if config.computes_in == "auto":
        return training_dtype(rank_device())
    return resolve_dtype("bfloat16" if config.computes_in == "bf16" else config.computes_in, rank_device())
