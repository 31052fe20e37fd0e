"""Train a P-EAGLE head: all tokens of a draft at once, from mask tokens behind each position of the target's answers.

    deepspeed train/peagle.py --config configs/peagle/stdlib.yaml [--resume] [key=value ...]

Its options, processes and files are those of train/eagle.py.
"""

import sys
from pathlib import Path
from typing import Any, ClassVar, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from drafters.heads.peagle.shape import PEagleShape
from train.configs import Eagle3Config
from train.preflight.command import program


class PEagleConfig(Eagle3Config):
    """The keys of a P-EAGLE run: those of EAGLE-3, whose steps are the head's depths.

    COD sampling: a share of max(down_sample_ratio^d, down_sample_ratio_min) of the positions trains depth d; those that
    train a depth train the ones before it, too. The keys have speculators' names.
    """

    drafter: ClassVar[str] = "peagle"

    head: PEagleShape
    ttt_steps: int = Field(1, ge=1, le=1, description="not of this head: its depths are trained")
    ttt_from: float = Field(0.0, ge=0, le=0, description="not of this head")
    step_decay: float = Field(1.0, ge=0.01, le=1, description="weight of a depth's loss, as a share of the one before")
    down_sample_ratio: float = Field(0.7, gt=0, le=1, description="share of a depth's positions that train the next")
    down_sample_ratio_min: float = Field(0.2, ge=0, le=1, description="share of all positions that train every depth")

    @property
    def shape(self) -> PEagleShape:
        return self.head.model_copy(update={"draft_vocab_size": self.draft_vocab})

    @model_validator(mode="after")
    def _has_room_for_its_depths(self) -> Self:
        if (window := self.head.sliding_window) is not None and window <= self.head.depths:
            raise ValueError(
                f"sliding_window is {window}, and a draft of depths={self.head.depths} has to fit into it; set "
                f"sliding_window={self.head.depths + 1} or more"
            )
        return self


if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(PEagleConfig, __doc__)

import torch
from torch import Tensor

from drafters.model.ends import FrozenEnds
from train.core.attention import Chains, States
from train.core.losses import Pairs
from train.core.task import Ratio, mean, target_states
from train.data.packing import Batch
from train.eagle3 import Eagle3Task


class PEagleTask(Eagle3Task):
    """K depths from every index, g the target's states, m the mask token, h the learned state:

    a^0_i = head(fc(g)_1 .. fc(g)_i, t_2 .. t_{i+1})
    a^d_i = head(fc(g)_1 .. fc(g)_i, h .. h; t_2 .. t_{i+1}, m .. m),  d times h and m, at positions up to i + d
    L     = mean over d of KL(p_{i+d+2}, q^d_i),  over the positions that COD sampling draws

    As in EAGLE-3's training, depth d is trained at the index i - d, so that all depths predict one token.
    """

    schema: ClassVar[type[PEagleConfig]] = PEagleConfig
    config: PEagleConfig
    drafts: ClassVar[dict[str, dict[str, Any]]] = {"chain": {"tree": "chain"}, "tree": {"tree": "tree"}}

    def __init__(self, config: PEagleConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        self.predictions = self.passes = config.head.depths

    def pairs(self, module: Any, batch: Batch, seed: int | None = None) -> Pairs:
        states = enumerate(self.depths(module, batch))
        predictions = [self.scored(each.flatten(0, 1)[batch.rows - d]) for d, each in states]
        targets = target_states(batch, self.ahead).flatten(0, 1)[batch.rows]
        weights = self.weights(targets, self.passes)
        if seed is not None:
            weights = weights * self.sampled(batch, seed)
        return Pairs(torch.stack(predictions), targets, weights)

    def depths(self, module: Any, batch: Batch) -> list[Tensor]:
        """What each depth predicts from every index: ``[R, L, H]`` each."""
        head: Any = self.module
        lengths, states = batch.dialogue_lengths(), dict[int, list[States]]()
        features, tokens = self.features(batch), self.ends.embed(batch.input_ids.roll(-1, dims=1))
        masks = self.ends.embed(torch.full_like(batch.input_ids, self.config.head.mask_token_id))
        outputs = []
        for depth in range(self.passes):
            chains = Chains(lengths, depth, states)
            outputs.append(module(features, tokens, batch.position_ids + depth, chains, chains))
            features, tokens = head.masked().expand_as(features), masks
        return outputs

    def sampled(self, batch: Batch, seed: int) -> Tensor:
        """``[K, n]``: 1 where COD sampling trains a depth; what trains a depth trains those before it, too."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(batch.input_ids.numel(), generator=generator).to(batch.rows.device)
        depths = torch.arange(self.passes, device=batch.rows.device)
        share = (self.config.down_sample_ratio ** depths.float()).clamp_min(self.config.down_sample_ratio_min)
        return (drawn[batch.rows - depths[:, None]] < share[:, None]).float() / share[:, None]

    def heldout(self, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
        """``step_n_top1`` and ``step_n_expected_acceptance`` of each depth on the text's tokens."""
        figures: dict[str, Ratio] = {}
        for n, (overlap, agree) in enumerate(zip(*self.heads.compare(pairs), strict=True)):
            figures |= {f"step_{n}_top1": mean(agree), f"step_{n}_expected_acceptance": mean(overlap)}
        return figures


TASK = PEagleTask
