"""A few steps of training on random numbers: how fast this device is, before there are features."""

import time

import torch
from transformers import PretrainedConfig

from drafters.model.files import resolve_device
from train.config import TrainConfig
from train.data.packing import Batch
from train.optimizer import buffers_of, restore_buffers
from train.preflight.estimate import MicroBatch, meta_ends
from train.tasks import Task

STEPS = 3


def measured_rate(make: type[Task], config: TrainConfig, target: PretrainedConfig, size: MicroBatch) -> float:
    """Tokens/s of one rank: forward, backward and AdamW on micro-batches of random features, after one warm-up.

    Without DeepSpeed, the reading of data and the exchange between ranks.
    """
    device = resolve_device()
    dtype = config.dtype
    task = make(config, meta_ends(target, device=str(device), dtype=dtype))
    buffers = buffers_of(task.module)
    module = task.module.to(device, dtype)
    restore_buffers(module, buffers, device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6)
    batch = _random_batch(task, size, target, device, dtype)
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


def _random_batch(
    task: Task, size: MicroBatch, target: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> Batch:
    shape = (1, size.tokens)
    generator = torch.Generator(device).manual_seed(0)

    def states() -> torch.Tensor:
        return torch.randn(*shape, target.hidden_size, generator=generator, device=device).to(dtype)

    return Batch(
        input_ids=torch.randint(target.vocab_size, shape, generator=generator, device=device),
        loss_mask=torch.ones(shape, dtype=torch.bool, device=device),
        features=states(),
        taps={layer: states() for layer in task.taps},
        position_ids=torch.arange(size.length, device=device).repeat(size.dialogues)[None],
        segments=torch.arange(size.dialogues, device=device).repeat_interleave(size.length)[None],
        spans=size.spans,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
