"""AdamW on float32 masters of a bf16 module, as in DeepSpeed, without DeepSpeed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from train.core.config import TrainConfig


@contextmanager
def exact_buffers(module: nn.Module) -> Iterator[None]:
    """Keep the buffers of ``module`` exact during a cast inside; they still move to another device with it.

    A cast to bf16 would also round the rotary frequencies, which moves position 500 by several tokens.
    """
    before = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
    yield
    for name, buffer in before.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, buffer.to(module.get_buffer(name).device))


class MasterAdamW:
    """Backward pass and update of one process, with the same two calls as DeepSpeed's engine.

    A float32 module is its own master.

    Args:
        module: the trained module, on its device and in its dtype.
        config: learning rate, betas, weight decay, clipping and accumulation.
    """

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        self.module, self.config = module, config
        self._weights: list[Tensor] = [weights for weights in module.parameters() if weights.requires_grad]
        self._copied = self._weights[0].dtype != torch.float32
        self._masters = [w.detach().float().clone() if self._copied else w for w in self._weights]
        decay, fused = config.weight_decay, self._weights[0].is_cuda or None  # None: torch's choice
        self._adam = torch.optim.AdamW(
            self._masters, config.learning_rate, config.betas, weight_decay=decay, fused=fused
        )
        self._micro_batches = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's forward."""
        return self.module(*arguments, **keywords)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` over the accumulation steps to those of the masters, in float32."""
        (loss / self.config.gradient_accumulation).backward()
        for master, weights in zip(self._masters, self._weights, strict=True):
            if self._copied and weights.grad is not None:
                gradient, weights.grad = weights.grad.float(), None
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    @torch.no_grad()
    def step(self) -> None:
        """Update after the last micro-batch of a step; after earlier ones, only count."""
        self._micro_batches += 1
        if self._micro_batches % self.config.gradient_accumulation:
            return
        nn.utils.clip_grad_norm_(self._masters, self.config.gradient_clipping)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        if self._copied:
            torch._foreach_copy_(self._weights, self._masters)
