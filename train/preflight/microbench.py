"""A few steps of training on random numbers: how fast this device is, before there are features."""

import time

import torch
from transformers import PretrainedConfig

from drafters.model.files import resolve_device
from train.config import TrainConfig
from train.optimizer import buffers_of, restore_buffers
from train.preflight.estimate import MicroBatch, meta_ends, random_batch
from train.task import make_task

STEPS = 3


def measured_rate(config: TrainConfig, target: PretrainedConfig, size: MicroBatch) -> float:
    """Tokens/s of one rank: forward, backward and AdamW on micro-batches of random features, after one warm-up.

    Without DeepSpeed, the reading of data and the exchange between ranks.
    """
    device = resolve_device()
    dtype = config.dtype
    task = make_task(config, meta_ends(target, device=str(device), dtype=dtype))
    buffers = buffers_of(task.module)
    module = task.module.to(device, dtype)
    restore_buffers(module, buffers, device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    batch = random_batch(config, size, target).to(device, dtype)
    rows = task.rows(batch)
    began = 0.0
    for step in range(STEPS + 1):
        if step == 1:
            began = _now(device)
        loss = task.loss_sums(module, batch, rows, noise_seed=step)["loss"]
        (loss / len(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return STEPS * size.tokens / (_now(device) - began)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
