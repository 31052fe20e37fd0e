"""The moving average of a run's weights, which is judged and exported instead of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

FILE = "weight_average"  # in a state, beside the weights and moments


class WeightAverage:
    """``average += (1 - d) (weights - average)`` after each step, in float32.

    After t steps d = min(decay, (1 + t) / (10 + t)), so that a short run's average is not dominated by its beginning.

    Every rank has the whole average, of its module's own weights, without communication; at ZeRO-3 no rank has whole
    weights.

    Args:
        module: the trained module, with whole weights.
        decay: below 1; about 1 / (1 - decay) steps are averaged.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        self.weights: dict[str, Tensor] = {
            name: value.detach().to(torch.float32, copy=True)
            for name, value in module.named_parameters()
            if value.requires_grad
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after ``step`` steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, average in self.weights.items():
            average.lerp_(self.module.get_parameter(name).float(), 1 - decay)

    def load(self, weights: dict[str, Tensor]) -> None:
        """Go on from a saved average."""
        for name, average in self.weights.items():
            average.copy_(weights[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module has the averaged weights meanwhile."""
        before = {name: self.module.get_parameter(name).detach().clone() for name in self.weights}
        self.module.load_state_dict(self.weights, strict=False)
        try:
            yield
        finally:
            self.module.load_state_dict(before, strict=False)
