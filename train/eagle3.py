"""Train an EAGLE-3 head (or 3.1): cross-entropy of what it drafts on its own steps, the training-time test.

    deepspeed train/eagle3.py --config configs/eagle3/stdlib.yaml [--resume] [key=value ...]
    python train/eagle3.py --config configs/eagle3/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    deepspeed train/eagle3.py --config configs/eagle3/stdlib.yaml --overfit 8    # can it learn 8 dialogues?

Processes and files are those of train/eagle.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from train.configs import Eagle3Config
from train.preflight.command import program

if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(Eagle3Config, __doc__)

from typing import Any, ClassVar

import torch
from torch import Tensor

from drafters.model.ends import FrozenEnds
from train.core.losses import Pairs
from train.core.task import Ratio, target_states
from train.core.unroll import UnrolledTask
from train.data.packing import Batch
from train.watch.alpha import chain_figures

CHAIN_DEPTH = 5  # of the chain that tau is measured with


class Eagle3Task(UnrolledTask):
    """Sections 3.1 and 3.2 of the paper (Li et al. 2025), S steps from every index, g the target's states, a the head:

    a^0_i = head(fc(g)_1 .. fc(g)_i, t_2 .. t_{i+1}),  a^n_i = head(fc(g)_1 .. fc(g)_i, a^0_i .. a^{n-1}_i, t ..)
    p     = softmax over the draft vocabulary of the target's logits,  q^n of the head's
    L     = sum_n w^n CrossEntropy(p_{i+n+2}, q^n_i),  w = step_decay, or the config's classification_loss

    The gradient flows through what is fed back. As in the official code, ``mask_uncovered`` leaves out positions whose
    likeliest token is no draft token; it needs the target's whole LM head.
    In the first ``ttt_from`` of the run only step 0 is trained, which sees several times the positions in a minute.
    """

    schema: ClassVar[type[Eagle3Config]] = Eagle3Config
    config: Eagle3Config
    detach = False
    drafts: ClassVar[dict[str, dict[str, Any]]] = {
        "chain": {"tree": "chain", "depth": CHAIN_DEPTH},
        "tree": {"tree": "dynamic"},
    }

    def __init__(self, config: Eagle3Config, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        self.predictions = self.passes = config.ttt_steps
        head: Any = self.module
        self.layers_config = head.config
        if config.head.own_lm_head:
            self.heads.drafter_heads, self.lm_heads = [head.lm_head], ("lm_head.weight",)
        if config.lm_head_start == "target" and config.draft_vocab is None:
            head.lm_head.weight.data.copy_(ends.lm_head.scaled)

    def pairs(self, module: Any, batch: Batch, seed: int | None = None) -> Pairs:
        targets = target_states(batch, self.ahead).flatten(0, 1)[batch.rows]
        return Pairs(self.chains(module, batch, seed), targets, self.weights(targets, self.passes_of(seed)))

    def weights(self, targets: Tensor, passes: int) -> Tensor:
        """``[passes, n]``: step_decay ^ step, and 0 where the target's likeliest token is no draft token."""
        decay = self.config.step_decay ** torch.arange(passes, device=targets.device, dtype=torch.float32)
        drafted = targets.new_ones(len(targets), dtype=torch.float32)
        if self.heads.ids is not None and self.config.mask_uncovered:
            drafted = torch.isin(self.heads.first_choice(targets), self.heads.ids.to(targets.device)).float()
        return decay[:, None] * drafted

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """L; and the loss of each step, which does not count for less than the first one's."""
        each = self.heads.classification(pairs)
        names = {f"step_{n}_loss": part / self.config.step_decay**n for n, part in enumerate(each.unbind())}
        return {"loss": each.sum()} | names

    def heldout(self, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
        return chain_figures(self, module, batch, pairs)

    def features(self, batch: Batch) -> Tensor:
        """fc(g), ``[R, L, H]``."""
        head: Any = self.module
        return head.fused(torch.cat([batch.taps[tap] for tap in self.config.taps], dim=-1))

    def scored(self, outputs: Tensor, step: int = 0) -> Tensor:
        head: Any = self.module
        return head.scored(outputs)


TASK = Eagle3Task
