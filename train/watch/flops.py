"""FLOPs of training a drafter, by formula, and the devices' peaks for the MFU.

A product of [n, a] and [a, b] counts 2 n a b; attention counts each token of the same dialogue up to the query.
Padding, recomputation (activation checkpointing, flash attention's backward pass), norms, activations and the optimiser
do not count, because they are not useful work.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from drafters.model.cache import head_sizes
from train.core.task import Task

# Dense bf16 peaks with float32 accumulation, in 1e12 FLOP/s, from NVIDIA's data sheets; the first match counts.
PEAK_TFLOPS = (
    (r"B200", 2250.0),
    (r"H200", 989.0),
    (r"H100 PCIe", 756.0),
    (r"H100 NVL", 835.0),
    (r"H100|GH200", 989.0),
    (r"A100", 312.0),
    (r"L40S", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bA40\b", 150.0),
    (r"\bA10\b", 125.0),
    (r"RTX A6000", 155.0),
    (r"4090", 165.0),
    (r"3090", 71.0),
)


@dataclass(frozen=True)
class TrainingCost:
    """FLOPs of forward and backward passes."""

    token: int  # of the module's weights, for each token
    pair: int  # of its attention, for each (query, key) pair
    row: int  # of the LM head's products, for each trained position

    def of(self, lengths: list[int], rows: float) -> float:
        """FLOPs of dialogues of these lengths (tokens), ``rows`` of whose positions are trained."""
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return self.token * sum(lengths) + self.pair * pairs + self.row * rows


@dataclass(frozen=True)
class BlockCost(TrainingCost):
    """Of a block drafter: ``token`` is of each context token, ``row`` also of a slot's share of its block, and ``pair``
    of a slot and a context token."""

    def of(self, lengths: list[int], rows: float) -> float:
        """A block is taken to attend to half of its dialogue, and a dialogue to have blocks by its length."""
        tokens = sum(lengths)
        seen = sum(length * length for length in lengths) / (2 * tokens) if tokens else 0.0
        return self.token * tokens + (self.row + self.pair * seen) * rows


def training_cost(task: Task, passes: int | None = None) -> TrainingCost:
    """The cost of a task's module, by the shapes of its weights: on any device, also meta, before ZeRO-3
    partitions them. ``passes``: fewer than the task has."""
    config = task.layers_config
    every = task.module.named_parameters()
    matrices = {name: weights for name, weights in every if weights.dim() == 2 and name not in task.lm_heads}
    # 2 FLOPs for each of three products: the forward one, the weights' gradient (of frozen ones, none) and the input's
    # (of a constant, none). A LoRA matrix has the input of the weight beside it.
    token = 0
    for name, weights in matrices.items():
        beside = re.sub(r"\.(base_layer|lora_A\.default)\.", ".", name)
        products = 3 - (beside in task.constant_inputs) - (not weights.requires_grad)
        token += 2 * products * weights.numel()
    layers = sum(hasattr(part, "o_proj") for part in task.module.modules())  # of attention
    # Scores and weighted sum: 2 x 2 FLOPs an element of a head; the backward pass takes two products for each.
    pair = 12 * config.num_attention_heads * head_sizes(config)[1] * layers
    if task.block_rows is not None:
        return block_cost(task, matrices, pair)
    steps = passes or task.passes
    own_keys = pair * (steps * (steps - 1) // 2)  # step n sees n more keys, those of its own chain
    return TrainingCost(steps * token + own_keys, steps * pair, row_flops(task, passes))


def block_cost(task: Task, matrices: Mapping[str, Tensor], pair: int) -> BlockCost:
    """The cost of a block drafter, whose context goes only through fc and the projections of keys and values."""
    assert task.block_rows is not None
    context = {name: 6 * weights.numel() for name, weights in matrices.items() if name.startswith("fc")}
    both = {name: 6 * weights.numel() for name, weights in matrices.items() if re.search(r"\b[kv]_proj\b", name)}
    other = 6 * sum(weights.numel() for name, weights in matrices.items() if name not in {*context, *both})
    share = task.block_rows / task.slots  # rows of a block for each slot that predicts
    of_slot = row_flops(task) + round(share * (sum(both.values()) + other))
    return BlockCost(sum(context.values()) + sum(both.values()), round(share * pair), of_slot)


def row_flops(task: Task, predictions: int | None = None) -> int:
    """FLOPs of the LM heads for one trained position; ``predictions``: fewer than the task has.

    The target's logits; for each prediction its logits, their gradient by the prediction and, of an LM head that is
    trained, the gradient of its weights.
    """
    target = task.heads.target
    heads = [task.heads.own_of(number) or target for number in range(predictions or task.predictions)]
    numbers = task.against_logits * target.in_features
    numbers += sum((2 + head.weight.requires_grad) * head.in_features for head in heads)
    return 2 * (task.config.loss_tokens or target.out_features) * int(numbers)


def peak_tflops(device: torch.device | str) -> float | None:
    """A device's dense bf16 peak in 1e12 FLOP/s by its name; None for one that is not known, and for CPUs.

    ``device``: a torch device, or a name such as "H200".
    """
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return None
        device = torch.cuda.get_device_name(device)
    return next((peak for pattern, peak in PEAK_TFLOPS if re.search(pattern, device, re.IGNORECASE)), None)
