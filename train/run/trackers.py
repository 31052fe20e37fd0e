"""Experiment trackers beside TensorBoard, by accelerate's classes."""

from typing import Any

from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from train.core.config import TENSORBOARD, TrainConfig
from train.run.files import by_key

PROJECT = "drafters"
RUN_NAME = {"mlflow": "run_name", "swanlab": "experiment_name", "trackio": "name", "wandb": "name"}  # their keywords


def start_trackers(config: TrainConfig) -> list[Any]:
    """Begin a run of the name of ``config.out`` in each tracker of ``config.trackers`` except TensorBoard."""
    names = [name for name in config.trackers if name != TENSORBOARD]
    if names:
        PartialState()  # accelerate's messages fail without it
    trackers = [LOGGER_TYPE_TO_CLASS[name](PROJECT, **{RUN_NAME[name]: config.out.name}) for name in names]
    for tracker in trackers:
        tracker.start()
        tracker.store_init_configuration(by_key(config.model_dump(mode="json")))
    return trackers
