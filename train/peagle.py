"""Train a P-EAGLE head: all tokens of a draft at once, from mask tokens behind each position of the target's answers.

    deepspeed train/peagle.py --config configs/peagle/stdlib.yaml [--resume] [key=value ...]

Its options, processes and files are those of train/eagle.py.
"""

import sys
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from train.configs import PEagleConfig
from train.preflight.command import program

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
        head: Any = self.module
        states = enumerate(self.depths(module, batch))
        predictions = [head.scored(each.flatten(0, 1)[batch.rows - d]) for d, each in states]
        targets = target_states(batch, self.ahead).flatten(0, 1)[batch.rows]
        weights = self.weights(targets)
        if seed is not None:
            weights = weights * self.sampled(batch, seed)
        return Pairs(torch.stack(predictions), targets, weights)

    def depths(self, module: Any, batch: Batch) -> list[Tensor]:
        """What each depth predicts from every index: ``[R, L, H]`` each."""
        head: Any = self.module
        lengths, states = batch.dialogue_lengths(), dict[int, list[States]]()
        features, tokens = self.fused(batch), self.ends.embed(batch.input_ids.roll(-1, dims=1))
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
        share = (self.config.keep ** depths.float()).clamp_min(self.config.keep_least)
        return (drawn[batch.rows - depths[:, None]] < share[:, None]).float() / share[:, None]

    def heldout(self, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
        """``step_n_top1`` and ``step_n_expected_acceptance`` of each depth on the text's tokens."""
        figures: dict[str, Ratio] = {}
        for n, (overlap, agree) in enumerate(zip(*self.heads.compare(pairs), strict=True)):
            figures |= {f"step_{n}_top1": mean(agree), f"step_{n}_expected_acceptance": mean(overlap)}
        return figures
