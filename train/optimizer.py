"""AdamW on float32 masters of a bf16 module, as DeepSpeed does it, for where DeepSpeed is not installed."""

from typing import Any

import torch
from torch import Tensor, nn

from train.config import TrainConfig


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies by name, for ``restore_buffers``.

    Casting a module to bf16 casts the rotary frequencies, too, which moves position 500 by several tokens.
    """
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def restore_buffers(module: nn.Module, buffers: dict[str, Tensor], device: torch.device) -> None:
    """Put buffers back as they were before a cast, on ``device``."""
    for name, buffer in buffers.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, buffer.to(device))


class MasterAdamW:
    """One process's backward pass and update, with the two calls of DeepSpeed's engine that a step needs.

    A float32 module is its own master.

    Args:
        module: what is trained, on its device, in its dtype.
        config: learning rate, betas, weight decay, clipping and accumulation.
    """

    def __init__(self, module: nn.Module, config: TrainConfig) -> None:
        self.module, self.config = module, config
        self._weights: list[Tensor] = [weights for weights in module.parameters() if weights.requires_grad]
        self._copied = self._weights[0].dtype != torch.float32
        self._masters: list[Tensor] = [
            weights.detach().float().clone() if self._copied else weights for weights in self._weights
        ]
        options: dict[str, Any] = {"fused": True} if self._weights[0].is_cuda else {}
        self._adam = torch.optim.AdamW(
            self._masters, config.learning_rate, config.betas, weight_decay=config.weight_decay, **options
        )
        self._micro_batches = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The module's forward."""
        return self.module(*arguments, **keywords)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of ``loss`` over the accumulation steps to those of the masters, in float32."""
        (loss / self.config.gradient_accumulation).backward()
        if not self._copied:
            return
        for master, weights in zip(self._masters, self._weights, strict=True):
            if weights.grad is None:
                continue
            gradient, weights.grad = weights.grad.float(), None
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)

    @torch.no_grad()
    def step(self) -> None:
        """Update after the last of the accumulated micro-batches; before, only count."""
        self._micro_batches += 1
        if self._micro_batches % self.config.gradient_accumulation:
            return
        nn.utils.clip_grad_norm_(self._masters, self.config.gradient_clipping)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        if self._copied:
            torch._foreach_copy_(self._weights, self._masters)
