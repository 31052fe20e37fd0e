"""Fine-tune the MTP layers that a target ships, or train new ones from nothing for a target without any.

    deepspeed train/mtp.py --config configs/mtp/stdlib.yaml [--resume] [key=value ...]
    python train/mtp.py --config configs/mtp/stdlib.yaml --dry-run    # check; estimate memory, disk, time
    python -m drafters.stitch runs/mtp --out FOLDER    # the target with the trained layer in its own files

Its options, processes and files are those of train/eagle.py.
"""

import sys
from pathlib import Path
from typing import ClassVar, Literal, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs as a script

from pydantic import Field, model_validator

from drafters.heads.mtp.shape import MTPShape
from train.core.config import Decay, TrainConfig
from train.preflight.command import program


class MTPConfig(TrainConfig):
    """The keys of an MTP run."""

    drafter: ClassVar[str] = "mtp"

    head: MTPShape
    start: Literal["target", "regression", "random"] = Field(
        "target", description="first weights: of the layer in the target's own files, or of a new one; or init_from"
    )
    unroll: int = Field(3, ge=1, le=8, description="steps from each trained position; FastMTP and speculators take 3")
    unroll_from: float = Field(0.0, ge=0, lt=1, description="share of the run that trains only the first step")
    step_decay: Decay = Field(0.6, description="weight of each step's loss, as a share of the one before")

    @model_validator(mode="after")
    def _has_a_step_for_each_layer(self) -> Self:
        if (layers := self.head.layers) > 1 and (self.unroll != layers or self.unroll_from):
            raise ValueError(
                f"unroll is {self.unroll} and unroll_from is {self.unroll_from}, and of {layers} layers (head.layers) "
                f"each trains one step; set unroll={layers} unroll_from=0"
            )
        return self

    @property
    def one_pass_until(self) -> float:
        return self.unroll_from

    @property
    def starts_in_target(self) -> bool:
        return self.start == "target" and self.init_from is None


if __name__ == "__main__":  # before torch is imported: a mistyped key is answered at once
    program(MTPConfig, __doc__)

from typing import Any

import torch
from torch import Tensor

from drafters.heads.mtp.own import find_own, load_own
from drafters.hub.checkpoint import load_state
from drafters.model.ends import FrozenEnds, load_norm
from drafters.model.runner import identity
from train.core.losses import Pairs
from train.core.task import Ratio, target_states
from train.core.unroll import UnrolledTask
from train.data.packing import Batch, Source
from train.data.regression import fit_fc
from train.watch.alpha import chain_figures


class MTPTask(UnrolledTask):
    """FastMTP (arXiv 2509.18362), K steps from every index, f the target's hidden states, a the layer, p the target's
    distribution in place of the text's token:

    a^0_i = layer(f_1 .. f_i, t_2 .. t_{i+1}),  a^n_i = layer(f_1 .. f_i, a^0_i .. a^{n-1}_i, t ..)
    of several layers:  a^n_i = layer_n(a^{n-1}_1 .. a^{n-1}_i, t_{n+2} .. t_{i+n+1})
    L     = sum_n w_n CrossEntropy(p_{i+n+2}, q^n_i),  w_n = 0.6^n / sum_m 0.6^m

    The gradient flows through what is fed back. Embedding and LM head are frozen.
    """

    schema = MTPConfig
    config: MTPConfig
    detach = False
    drafts: ClassVar[dict[str, dict[str, Any]]] = {"chain": {"tree": "chain"}, "tree": {"tree": "dynamic"}}
    constant_inputs = ()

    def __init__(self, config: MTPConfig, ends: FrozenEnds) -> None:
        super().__init__(config, ends)
        self.by_layer = config.head.layers > 1
        self.predictions = config.unroll
        self.passes = 1 if self.by_layer else config.unroll

    def load(self) -> None:
        """With ``start: target``, read the layer of the target's files; raises as ``check_start``."""
        if self.config.starts_in_target:
            self.check_start(self.config)
            _, weights = load_own(self.config.target, self.config.revision)
            load_state(self.drafting_module, weights, f"the MTP layers of {self.config.target}")

    @classmethod
    def check_start(cls, config: Any) -> str:
        """As the base class.

        Raises:
            ValueError: there is no layer, one of another kind, or one that does not fit the target's family.
        """
        keys, _ = find_own(config.target, config.revision)
        wrong = [key for key, value in keys.items() if getattr(config.head, key) != value]
        if wrong:
            more = f" unroll={keys['layers']}" if "layers" in wrong and keys["layers"] > 1 else ""
            raise ValueError(
                f"head.{wrong[0]} is {getattr(config.head, wrong[0])}, but the MTP layers of {config.target} have "
                f"{keys[wrong[0]]}; set {' '.join(f'head.{key}={str(keys[key]).lower()}' for key in wrong)}{more}, or "
                "start=regression for new layers"
            )
        return f"the MTP layers in the target's files: {keys['layers']} of kind {keys['kind']}"

    def fit(self, train: Source) -> None:
        """Let ``fc`` predict the next feature linearly; the norm behind the layer begins as the target's last one."""
        norm = load_norm(self.config.target, "float32", self.ends.embed.weight.device, self.config.revision)
        head: Any = self.module
        head.norm.load_state_dict(norm.state_dict())
        fit_fc(self, train, 0.0, lambda *inputs: head.enter(*inputs, identity), norm)
        first = {
            name: value for name, value in head.state_dict().items() if not name.startswith(("layers.", "others."))
        }
        for parts in head.others:
            parts.load_state_dict(first)

    def pairs(self, module: Any, batch: Batch, seed: int | None = None) -> Pairs:
        targets = target_states(batch, self.ahead).flatten(0, 1)[batch.rows]
        return Pairs(self.chains(module, batch, seed), targets)

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """L; and the loss of each step."""
        each = self.heads.classification(pairs)
        decay = self.config.step_decay ** torch.arange(len(each), device=each.device)
        names = {f"step_{n}_loss": part for n, part in enumerate(each.unbind())}
        return {"loss": (decay / decay.sum() * each).sum()} | names

    def heldout(self, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
        return chain_figures(self, module, batch, pairs)

    def features(self, batch: Batch) -> Tensor:
        state = self.config.head.state
        return batch.features if state is None else batch.taps[state]

    def scored(self, outputs: Tensor, step: int = 0) -> Tensor:
        head: Any = self.module
        return head.parts(step).scored(outputs)


TASK = MTPTask
