"""Which process of how many: from launchers, and from the command line."""

import pytest
import torch
from programs import refused

from data_prep.common.ranks import Rank, find_rank, refuse_shared_map

SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Rank(0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, Rank(2, 4, 0)),
        (SRUN, Rank(3, 8, 1)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "4"}, Rank(3, 4, 1)),  # srun -n 4 in a job of 8
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, Rank(0, 2, 0)),  # torchrun below srun
        # A batch script and an interactive shell see their job's tasks and are one process all the same.
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": ""}, Rank(0, 1)),
        ({**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFB)}, Rank(0, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}, Rank(0, 1)),
    ],
)
def test_what_launchers_say(environment, expected):
    """Catches a batch script that runs as one rank of eight and leaves 7/8 of the corpus undone."""
    assert find_rank(None, None, environment) == expected


def test_the_command_line_wins():
    """Catches an explicit rank that a launcher's variables override, and half of one that is taken for a whole."""
    assert find_rank(1, 4, {"RANK": "0", "WORLD_SIZE": "2"}) == Rank(1, 4)
    with refused(r"give both --rank and --ranks \(found --rank 1, --ranks None\)"):
        find_rank(1, None, {})
    with refused("--rank 4 of --ranks 4: ranks count from 0, so the last one is 3"):
        find_rank(4, 4, {})
    with refused("RANK=5, WORLD_SIZE=2 .* do not fit"):
        find_rank(None, None, {"RANK": "5", "WORLD_SIZE": "2"})
    with refused("RANK=a.*are not numbers"):
        find_rank(None, None, {"RANK": "a", "WORLD_SIZE": "2"})


def test_each_process_has_its_own_gpu(monkeypatch):
    """Catches eight processes on the first GPU, if only with what names none, and a GPU that was named exchanged."""
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [Rank(5, 8, 5).device(wanted) for wanted in (None, "cuda", "cuda:3", "cpu")] == [
        "cuda:1",
        "cuda:1",
        "cuda:3",
        "cpu",
    ]
    assert current == ["cuda:1", "cuda:1"]
    assert Rank(1, 8).device("cuda") == "cuda"  # no launcher: the user chooses
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Rank(5, 8, 5).device(None) is None


def test_a_device_map_is_for_one_process_a_machine():
    """Catches two processes that each spread a target over the same GPUs, as srun's tasks did."""
    with refused(r"data\.target_device_map 'auto' spreads one target over all GPUs"):
        refuse_shared_map(find_rank(None, None, SRUN), "auto", "data.target_device_map")
    refuse_shared_map(find_rank(None, None, SRUN), None)
    for alone in (Rank(), Rank(3, 8, 0), Rank(1, 2)):  # the last one's launcher says nothing about machines
        refuse_shared_map(alone, "auto")
