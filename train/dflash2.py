"""Train a DFlash2 head: DFlash's blocks with convolutions, and a selector of candidates.

    deepspeed train/dflash2.py --config configs/dflash2/stdlib.yaml [--resume] [key=value ...]
    deepspeed train/dflash2.py --config configs/dflash2/stdlib.yaml init_from=D trains=selector    # D: a DFlash head
    python train/dflash2.py --config configs/dflash2/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/dflash2.py --config configs/dflash2/stdlib.yaml --overfit 8    # can it learn 8 dialogues?

Processes and files are those of train/eagle.py.
"""

import sys
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from drafters.heads.dflash2.shape import DFlash2Shape
from train.configs import DFlashConfig
from train.core.config import Weight
from train.preflight.command import program


class DFlash2Config(DFlashConfig):
    """The keys of a DFlash2 run: those of DFlash, and of the selector.

    The loss is that of speculators: cross-entropy with the target's distribution over all tokens, and
    ``selector_weight`` times that of the text's token among the candidates, both weighted by ``position_weights``.
    ``init_from`` may also be a DFlash head: new convolutions change nothing.
    """

    drafter: ClassVar[str] = "dflash2"
    extends: ClassVar[tuple[str, ...]] = ("dflash",)

    head: DFlash2Shape
    token_weight: Weight = 0.0
    target_weight: Weight = 1.0
    selector_weight: Weight = Field(1.0, description="weight of the selector's cross-entropy")
    trains: Literal["all", "selector"] = Field(
        "all", description="selector: the rest of the head in init_from stays as it is"
    )

    @property
    def trains_lm_head(self) -> bool:
        return True  # the selector, outside of the module's forward

    @model_validator(mode="after")
    def _trains_its_selector(self) -> Self:
        for key in ("draft_vocab", "loss_vocab"):
            if (value := getattr(self, key)) is not None:
                raise ValueError(f"{key} is {value}, and the selector chooses among all tokens; leave it out")
        if not self.selector_weight:
            raise ValueError("selector_weight is 0, which trains no selector; train a DFlash head, or set a weight")
        if self.trains == "selector" and self.init_from is None:
            raise ValueError("trains is selector, and the rest of the head must be a trained one; set init_from")
        return self


if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(DFlash2Config, __doc__)

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafters.heads.dflash2.module import CODEBOOKS
from drafters.model.ends import FrozenEnds
from train.core.losses import Pairs
from train.data.packing import Batch
from train.dflash import DFlashTask

SELECTOR = "candidate_selector."


class DFlash2Task(DFlashTask):
    """DFlash's blocks with logits z_k and the state h_k of slot k, the text's tokens t, p of the target:

    C_k = the likeliest tokens by z_k; if t_k is none of them, it replaces the last one
    s_k = z_k[c] + sum_r predecessor[t_{k-1}]_r hidden_projection(h_k)_r successor[c]_r,  c in C_k
    L   = sum_k w_k (CrossEntropy(p_k, softmax(z_k)) + selector_weight CrossEntropy(t_k, softmax(s_k)))

    as speculators, which takes the target's first choice for t_k. The second term also trains the backbone. With
    ``trains: selector`` the selector's weights are the only ones that learn.
    """

    schema: ClassVar[type[DFlash2Config]] = DFlash2Config
    config: DFlash2Config

    def __init__(self, config: DFlash2Config, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        head: Any = self.module
        self.selector, self.heads.rescored = head.candidate_selector, self.rescored
        self.lm_heads = (*self.lm_heads, *CODEBOOKS)  # rows of tokens

    def build(self) -> nn.Module:
        module = super().build()
        if self.config.trains == "selector":
            for name, weights in module.named_parameters():
                weights.requires_grad_(name.startswith(SELECTOR))
        return module

    def states(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.trains == "all"):
            return super().states(module, batch)

    def conditional(self, states: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"previous": self.tokens_before_slots(batch).flatten()[batch.places]}

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        frozen = self.config.trains == "selector"
        losses = {"loss": pairs.predictions.new_zeros(())} if frozen else super().losses(pairs)
        if pairs.previous is None:  # of a perfect drafter
            return losses
        each = self.selector_loss(pairs)
        selector = (each if pairs.weights is None else each * pairs.weights[0]).sum()
        return {"loss": losses["loss"] + self.config.selector_weight * selector, "selector_loss": selector}

    def selector_loss(self, pairs: Pairs) -> Tensor:
        """``[n]``; the candidates' rows of the LM head are gathered in parts, and again in the backward pass."""
        states, tokens, previous = pairs.predictions[0], pairs.tokens, pairs.previous
        assert tokens is not None and previous is not None
        candidates = self.heads.likeliest(states, self.config.head.selector_top_k)
        missing = (candidates != tokens[:, None]).all(-1)
        candidates[:, -1] = torch.where(missing, tokens, candidates[:, -1])
        place = (candidates == tokens[:, None]).int().argmax(-1)
        size = self.heads.rows_at_once(self.heads.target)
        parts = zip(*(each.split(size) for each in (states, candidates, previous)), strict=True)
        scores: list[Any] = [checkpoint(self.scores, *part, use_reentrant=False) for part in parts]
        return F.cross_entropy(torch.cat(scores), place, reduction="none")

    def scores(self, states: Tensor, candidates: Tensor, previous: Tensor) -> Tensor:
        """The selector's, ``[n, k]``."""
        scores: Tensor = self.selector(self.heads.target.of(states, candidates), candidates, states, previous)
        return scores

    def rescored(self, logits: Tensor, states: Tensor, previous: Tensor) -> Tensor:
        """Scores of all tokens as they draft: -inf but for the candidates, ``[n, V]``."""
        unary, candidates = logits.topk(self.config.head.selector_top_k, dim=-1)
        scores = self.selector(unary, candidates, states, previous)
        return scores.new_full(logits.shape, -torch.inf).scatter_(-1, candidates, scores)


TASK = DFlash2Task
