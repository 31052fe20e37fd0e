"""What a run says of itself: the contents of run.json, and the provenance in an export."""

from typing import Any

import torch

from drafters.common.machine import hardware
from drafters.common.paths import hub_names
from drafters.hub.checkpoint import HUB_NAMES
from train.core.runtime import Ranks
from train.core.task import Task
from train.run.files import PACKING, describe_data, how_to_repeat
from train.run.inputs import Inputs
from train.run.limits import Progress
from train.run.summary import describe_heldout
from train.watch.energy import TrainingEnergy


def describe_run(
    task: Task, inputs: Inputs, ranks: Ranks, device: torch.device, energy: TrainingEnergy, trained: str | None,
    arguments: list[str],
) -> dict[str, Any]:  # fmt: skip
    """The contents of run.json. ``trained``: the task's line on what is trained; ``arguments``: of the command line."""
    config = task.config
    described = {
        "drafter": config.drafter,
        "packing": PACKING,
        "ranks": ranks.count,
        **how_to_repeat(config, arguments, "deepspeed", "safetensors"),
        "data": {"train": describe_data(inputs.train.manifest)},
        "heldout": describe_heldout(config, inputs.heldout.manifest),
        "trained": trained,
        "loss_chunk_rows": task.heads.rows_at_once(task.heads.target),
        "energy": energy.how,
        "hardware": hardware(device),
        HUB_NAMES: _hub_names(task, inputs),
    }
    return described if task.base is None else described | {"base": task.base.model_dump()}


def _hub_names(task: Task, inputs: Inputs) -> list[str]:
    """Names in the run's records that were loaded from the Hub: of models, and of the data set."""
    models = (getattr(task.config, key, None) for key in ("target", "init_from", "draft_model"))
    return sorted({*hub_names(*models), *(inputs.train.manifest.hub_names or ())})


def provenance(inputs: Inputs, progress: Progress, info: dict[str, Any]) -> dict[str, Any]:
    """The training so far, for an export. ``info``: the contents of run.json."""
    manifest = inputs.train.manifest
    return {
        "data": manifest.source,
        "features": "online" if info["config"]["features"] == "online" else "store",
        "feature_dtype": manifest.dtype,
        "dialogues": manifest.dialogues,
        "steps": progress.step,
        "tokens": progress.tokens,
        "epochs": progress.epoch,
        "minutes": round(progress.seconds / 60, 2),
        "joules": progress.joules,
        **{key: info[key] for key in ("config", "ranks", "versions", "commit", HUB_NAMES)},
    }
