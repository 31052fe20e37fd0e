"""Modules without contents, random micro-batches, and how many tokens/s they are trained with here."""

import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from data_prep.store.reader import StoredDialogue
from drafters.model.ends import FrozenEnds, LMHead
from drafters.model.files import meta_model, resolve_device
from drafters.model.stock import logit_change
from train.core.config import TrainConfig
from train.core.optimizer import exact_buffers
from train.core.runtime import dtype_of
from train.core.task import Task, make_task, task_class
from train.data.packing import Batch, collate

MEASURED_STEPS = 3


def meta_ends(config: PretrainedConfig, device: str = "meta", dtype: torch.dtype = torch.bfloat16) -> FrozenEnds:
    """Embeddings and LM head of a target of this configuration, without contents, or random on another device."""
    vocab, hidden = config.vocab_size, config.hidden_size
    embed = nn.Embedding(vocab, hidden, device=device, dtype=dtype).requires_grad_(False)
    weight = torch.randn(vocab, hidden, device=device, dtype=dtype)
    model: Any = meta_model(config)
    has_bias = model.get_output_embeddings().bias is not None
    bias = torch.randn(vocab, device=device, dtype=dtype) if has_bias else None
    head = LMHead(embed.weight if config.tie_word_embeddings else weight, logit_change(model), bias)
    return FrozenEnds(embed, head, config, "")


class RandomStore:
    """Random tokens and states of given lengths, made by each read, always the same. The last tokens of each dialogue,
    a share of ``trained``, belong to answers."""

    def __init__(self, config: TrainConfig, target: PretrainedConfig, lengths: list[int], trained: float = 1.0) -> None:
        self.config, self.target, self.lengths, self.trained = config, target, lengths, trained

    def __getitem__(self, index: int) -> StoredDialogue:
        generator, length = torch.Generator().manual_seed(index), self.lengths[index]

        def states() -> Tensor:
            return torch.randn(length, self.target.hidden_size, generator=generator).to(dtype_of(self.config))

        return StoredDialogue(
            input_ids=torch.randint(self.target.vocab_size, (length,), generator=generator),
            loss_mask=torch.arange(length) >= min(round((1 - self.trained) * length), length - 1),
            features=states(),
            taps={layer: states() for layer in self.config.taps},
        )

    def batch(self) -> Batch:
        """All dialogues in one row, as in training."""
        store: Any = self
        return collate(store, list(range(len(self.lengths))), self.config.taps)


def meta_task(config: TrainConfig, target: PretrainedConfig) -> Task:
    """The task with a module without contents, which no check can run."""
    kind = task_class(config.drafter).of(config)
    with torch.device("meta"):
        return type(kind.__name__, (kind,), {"check_attention": lambda task: None})(config, meta_ends(target))


def parameters(module: nn.Module) -> int:
    """The number of weights."""
    return sum(weights.numel() for weights in module.parameters())


def target_parameters(config: PretrainedConfig) -> tuple[int, int]:
    """A target's parameters, and those that one token uses: no embeddings, two experts of eight."""
    total = active = 0
    for name, weights in meta_model(config).named_parameters():
        total += weights.numel()
        if weights.dim() < 2 or ("embed_tokens" in name and not config.tie_word_embeddings):
            continue
        share = 1.0
        if ".experts." in name:
            experts = getattr(config, "num_local_experts", None) or config.num_experts
            share = config.num_experts_per_tok / experts
        active += round(weights.numel() * share)
    return total, active


# ------------------------------------------------------------------------------------------- speed


def random_task(
    config: TrainConfig, target: PretrainedConfig, lengths: list[int], trained: float = 1.0
) -> tuple[Task, Batch]:
    """A task with a new module, and a random micro-batch on this machine's device; ``trained``: share of positions."""
    device, dtype = resolve_device(), dtype_of(config)
    task = make_task(config, meta_ends(target, device=str(device), dtype=dtype))
    if task.config.loss_tokens is not None:  # which tokens makes no difference here
        task.heads.ids = torch.arange(min(task.config.loss_tokens, task.ends.lm_head.out_features))
    with exact_buffers(task.module):
        task.module.to(device, dtype)
    return task, RandomStore(config, target, lengths, trained).batch().to(device, dtype)


def measured_rate(config: TrainConfig, target: PretrainedConfig, lengths: list[int], trained: float = 1.0) -> float:
    """Tokens/s of one rank here: forward, backward and AdamW on random micro-batches, after one of warm-up.

    Without DeepSpeed, reading of data and communication. ``trained``: share of the positions that are trained.
    """
    device = resolve_device()
    task, batch = random_task(config, target, lengths, trained)
    optimizer = torch.optim.AdamW([weights for weights in task.module.parameters() if weights.requires_grad], lr=1e-6)
    batch = task.choose(batch)
    for step in range(MEASURED_STEPS + 1):
        if step == 1:
            began = _now(device)
        loss = task.losses(task.pairs(task.module, batch, seed=step))["loss"]
        (loss / len(batch.rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return MEASURED_STEPS * sum(lengths) / (_now(device) - began)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
