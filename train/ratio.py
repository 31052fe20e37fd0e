"""A mean that is not divided yet: sums and counts leave a task, and are added up over batches and ranks before."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Ratio:
    """``total`` over ``count``, scalars."""

    total: Tensor
    count: Tensor
