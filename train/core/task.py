"""What the loop knows of a drafter's training: a Task. Each method derives its own, in the file that bears its name.

That file (train/eagle.py, say) also holds the configuration, and a mistyped key should not have to wait for torch: this
module and those import it within functions.

A task returns sums and counts, never means: the loop adds them up over micro-batches and ranks before it divides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from drafters.methods import drafter_class, method_names
from train.core.config import TrainConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from transformers import PretrainedConfig

    from drafters.base import Drafter
    from drafters.hub.checkpoint import BaseHead, TargetIdentity
    from drafters.model.ends import FrozenEnds
    from drafters.model.target import TargetModel
    from train.core.engine import Engine
    from train.data.packing import Batch, Rewrite, Source, TrainData


@dataclass
class Ratio:
    """A mean before the division: ``total`` over ``count``, scalars."""

    total: Tensor
    count: Tensor


class Task(ABC):
    """One drafter's training.

    Class attributes:
        schema: the run's configuration; its ``drafter`` names the method.
        ahead: row i of the prediction is about token i + ahead.
        drafts: the kinds of draft that tau is measured with, and the drafter's options for each.

    Attributes:
        module: what is trained.
        earliest: the first token of a dialogue that all of it can predict; by default ``ahead``.
        constant_inputs: weights whose input is constant, so that their backward pass has one product less.
        own: LM heads of the drafter's own, one for each prediction of a row; else they go through the target's.
        lm_heads: the names of their weights, and of an embedding, with which no product is taken.
        lm_head_products: of a row with LM heads: logits of the target, logits of the drafter, and (q - p) W.
        draft_ids: int32 ``[N]``, of the config's ``draft_vocab`` tokens; None without it.
        loss_ids: the same of its ``loss_vocab``.
        base: with the config's ``lora``, the drafter that it is for, once ``init_from`` has read it.
    """

    schema: ClassVar[type[TrainConfig]]
    ahead: ClassVar[int]
    drafts: ClassVar[dict[str, dict[str, Any]]] = {"chain": {}}
    constant_inputs: tuple[str, ...] = ()
    own: Sequence[nn.Linear] = ()
    lm_heads: tuple[str, ...] = ()
    lm_head_products = 3
    config: TrainConfig
    module: nn.Module
    draft_ids: Tensor | None = None
    loss_ids: Tensor | None = None
    base: BaseHead | None = None

    def __init__(self, config: TrainConfig, ends: FrozenEnds) -> None:
        import torch

        self.config, self.ends = config, ends
        self.earliest = self.ahead
        self.drafter: type[Any] = drafter_class(config.measured_by["drafter"])
        torch.manual_seed(config.seed)
        self.module = self.build()

    @classmethod
    def of(cls, config: TrainConfig) -> type[Task]:
        """This class, or one derived from it for such a config."""
        return cls

    def build(self) -> nn.Module:
        """What is trained, with weights drawn at random; it takes packed dialogues."""
        import torch

        from train.core.attention import use_dialogue_attention
        from train.core.lora import with_lora

        module = self.new_module()
        use_dialogue_attention(module, self.ends.config)
        if self.config.lora is not None and torch._guards.detect_fake_mode() is None:  # in which peft fails
            with_lora(module, self.config.lora, self.config.init_from)
        return module

    def new_module(self) -> nn.Module:
        """One with random weights."""
        module: nn.Module = self.drafter.build_module(self.ends.config, self.drafter_config())
        return module

    def load(self) -> None:  # noqa: B027 (most have nothing to load)
        """Give ``module`` the weights that training begins with, where they are not drawn."""

    def init_from(self, checkpoint: str) -> None:
        """Take the weights of a trained drafter in place of new ones: of the same target, or of one that it was tuned
        from (only the shapes have to fit). Its draft vocabulary is not taken over.

        With ``lora``, of which it is the base, it keeps what it drafts with.

        Raises:
            ValueError: nothing loadable there, another method's drafter, other shapes, or an adapter of an adapter.
        """
        from drafters.hub.checkpoint import BaseHead, load_checkpoint, load_state
        from drafters.model.draft_head import DRAFT_IDS
        from drafters.model.head_adapter import fingerprint, load_head
        from train.core.lora import load_base

        if self.config.lora is None:
            found, weights = load_head(checkpoint)
        else:
            found, weights = load_checkpoint(checkpoint)
            if "base" in found:
                raise ValueError(
                    f"init_from: {checkpoint} is an adapter itself, of {found['base']['name']!r}; name that"
                )
            self.base = BaseHead(name=checkpoint, fingerprint=fingerprint(weights))
        if found["drafter_type"] != self.config.drafter:
            raise ValueError(
                f"init_from: {checkpoint} holds a drafter of type {found['drafter_type']!r}, and this trains "
                f"{self.config.drafter!r}; name one of these, or start: deepspeed train/{found['drafter_type']}.py"
            )
        for key, older in (("inputs", None), ("fc_bias", None), ("layer", "target")):
            theirs, ours = (config.get(key, older) for config in (found["drafter"], self.drafter_config()))
            if theirs != ours:  # weights of the same shapes, perhaps
                raise ValueError(
                    f"init_from: the head in {checkpoint} has {key}: {theirs or 'the default'}, and this trains one "
                    f"with {key}: {ours or 'the default'}; set the same, or another init_from"
                )
        ids, source = weights.pop(DRAFT_IDS, None), f"init_from: {checkpoint}"
        if self.config.lora is None:
            load_state(self.drafting_module, weights, source)
            return
        if ids is not None and (count := found["drafter"].get("draft_vocab")):
            self.draft_ids = ids[:count]
        plain = self.new_module()
        load_state(plain, weights, source)
        load_base(self.module, plain.state_dict())

    @property
    def fits(self) -> bool:
        """Whether ``fit`` does anything."""
        return False

    def fit(self, train: Source) -> None:  # noqa: B027 (most draw all of them)
        """Set new weights that are solved for, from the training data, before the first step."""

    @property
    def drafting_module(self) -> nn.Module:
        """What of the module drafts, and is a drafter's checkpoint."""
        return self.module

    def rate_factors(self, step: int) -> dict[str, float]:
        """Of the weights whose names begin so, their share of the learning rate after ``step`` steps; of others, 1."""
        return {}

    @abstractmethod
    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        """What the drafter gives to the LM head, ``[R, L, H]``; or, of K predictions a row, ``[R, L, K, H]``."""

    def targets(self, batch: Batch) -> Tensor:
        """What the target gives to it for the same tokens, ``[R, L, H]``."""
        return batch.features.roll(1 - self.ahead, dims=1) if self.ahead > 1 else batch.features

    def rows(self, batch: Batch) -> Tensor:
        """Flat indices int64 ``[n]`` into ``[R * L]`` of the trained positions; ``batch`` is still on the CPU.

        Position i is trained where the token that it predicts, i + ahead, belongs to an answer.
        """
        return batch.shifted(batch.loss_mask, self.ahead).flatten().nonzero().squeeze(1)

    def with_noise(self, batch: Batch, seed: int) -> Batch:
        """The batch that is trained on in the place of ``batch``; held-out text is taken as it is."""
        return batch

    def losses(self, predicted: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Named sums over rows ``[n, H]``, predictions and targets; "loss" can be differentiated."""
        return {"loss": self.classification(predicted, target)}

    def ideal(self, target: Tensor) -> Tensor:
        """What a drafter equal to the target would predict where that gives ``target [n, H]``."""
        return target

    def floor(self, target: Tensor) -> Tensor:
        """The loss that it would have; through LM heads of its own, if they were the target's."""
        equal = copy(self)
        equal.own = ()
        return equal.losses(self.ideal(target), target)["loss"]

    def overlap(self, predicted: Tensor, target: Tensor) -> Tensor:
        """``[n]``: sum_x min(p, q), the acceptance rate of sampled drafting (temperature 1)."""
        from train.core.losses import overlap_and_agreement

        return overlap_and_agreement(predicted, target, self.ends.lm_head, self.chunk_rows, self.draft_lm_head)[0]

    def same_first(self, predicted: Tensor, target: Tensor) -> Tensor:
        """bool ``[n]``: whether drafter and target put the same token first."""
        import torch

        size, draft_head, head = self.chunk_rows, self.draft_lm_head, self.ends.lm_head
        pairs = zip(predicted.split(size), target.split(size), strict=True)
        return torch.cat([draft_head(ours).argmax(-1) == head(theirs).argmax(-1) for ours, theirs in pairs])

    def heldout(self, module: Any, batch: Batch, predicted: Tensor, target: Tensor) -> dict[str, Ratio]:
        """How good the drafter is on held-out text, beside the losses and on the same rows.

        ``expected_acceptance``: mean of sum_x min(p, q), the acceptance rate of sampled drafting (temperature 1).
        ``top1_agreement``: share of positions where both put the same token first, that of greedy drafting.
        """
        import torch

        from train.core.losses import overlap_and_agreement

        head = self.ends.lm_head
        overlap, agree = overlap_and_agreement(predicted, target, head, self.chunk_rows, self.draft_lm_head)
        count = torch.tensor(len(predicted), device=predicted.device)
        return {"expected_acceptance": Ratio(overlap.sum(), count), "top1_agreement": Ratio(agree.sum(), count)}

    def drafter_config(self) -> dict[str, Any]:
        """The ``drafter`` section of the checkpoint's config.json."""
        return {}

    @property
    def unroll(self) -> int:
        """Predictions that each trained position gets."""
        return 1

    # ------------------------------------------------------------------------------------------- the same for all

    def pairs(self, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Predictions and targets ``[n, H]`` of the trained ``rows``."""
        inputs = batch if noise_seed is None else self.with_noise(batch, noise_seed)
        return self.predict(module, inputs).flatten(0, 1)[rows], self.targets(batch).flatten(0, 1)[rows]

    def loss_sums(self, module: Any, batch: Batch, rows: Tensor, noise_seed: int | None = None) -> dict[str, Tensor]:
        """``losses`` over ``rows``."""
        return self.losses(*self.pairs(module, batch, rows, noise_seed))

    def classification(self, predicted: Tensor, target: Tensor) -> Tensor:
        """The config's ``classification_loss`` against the target's own distribution, summed over rows ``[n, H]``; of
        several predictions ``[S, n, H]`` against the same targets, S sums.

        With ``loss_vocab`` both distributions are over its tokens alone, as those of a drafter with such a
        ``draft_vocab`` are. The LM head is most of a small head's training, and its cost falls with its rows.
        """
        from train.core import losses

        config, head = self.config, self.loss_head
        divergence: Any = getattr(losses, config.classification_loss)
        if config.classification_loss == "lk_lambda":
            divergence = partial(divergence, eta=config.lk_eta)
        top_k = losses.TopK(config.top_k, config.top_k_weight) if config.top_k_weight else None
        own = [self.loss_rows(part.weight) for part in self.own]
        return losses.divergence_sum(predicted, target, head, divergence, top_k, self.chunk_rows_of(head), own)

    @cached_property
    def loss_head(self) -> nn.Linear:
        """The LM head's rows of ``loss_ids``: a copy, on the device where it is first asked for."""
        from torch import nn

        head = self.ends.lm_head
        if self.loss_ids is None:
            return head
        ids = self.loss_ids.to(head.weight.device)
        part = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
        part.weight = nn.Parameter(head.weight[ids], requires_grad=False)
        if head.bias is not None:
            part.bias = nn.Parameter(head.bias[ids], requires_grad=False)
        return part

    def loss_rows(self, weight: Tensor) -> Tensor:
        """An LM head's ``weight [V, h]`` of the tokens that the loss is over."""
        return weight if self.loss_ids is None else weight[self.loss_ids.to(weight.device)]

    def places(self, tokens: Tensor) -> Tensor:
        """``tokens`` int64 among those of ``loss_head``, -1 for others."""
        if self.loss_ids is None:
            return tokens
        places = tokens.new_full((self.ends.lm_head.out_features,), -1)
        ids = self.loss_ids.to(tokens)
        return places.scatter_(0, ids, ids.new_ones(len(ids)).cumsum(0) - 1)[tokens]

    def rewriter(self, data: TrainData, engine: Engine, step: Callable[[], int]) -> Rewrite | None:
        """What gives the training other texts than the data's; ``step``: the number of steps taken so far."""
        return None

    @property
    def layers_config(self) -> PretrainedConfig:
        """The configuration of the module's layers."""
        return self.ends.config

    @property
    def row_flops(self) -> int:
        """FLOPs of the loss, for each trained position: ``lm_head_products``."""
        head = self.ends.lm_head
        return self.lm_head_products * 2 * (self.config.loss_vocab or head.out_features) * head.in_features

    @property
    def draft_lm_head(self) -> nn.Linear:
        """The LM head that a single prediction goes through."""
        return self.ends.lm_head

    def drafters(self, target: TargetModel, weights: dict[str, Tensor]) -> dict[str, Drafter]:
        """Drafters with copies of ``weights`` for the decoding loop, by kind of draft."""
        whole, common = self.exported(weights)
        return {
            kind: self.drafter.from_weights(target, whole, common | options) for kind, options in self.drafts.items()
        }

    def exported(self, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What a checkpoint of ``weights`` holds, and its ``drafter`` section: with ``draft_vocab`` the ids, too."""
        from drafters.model.draft_head import DRAFT_IDS

        if self.config.lora is not None:
            exact = {name: value.float() for name, value in weights.items()}
            weights = self.adapter(exact).merge_and_unload().state_dict()
        if self.draft_ids is None:
            return weights, self.drafter_config()
        return weights | {DRAFT_IDS: self.draft_ids}, self.drafter_config() | {"draft_vocab": len(self.draft_ids)}

    def adapter(self, weights: dict[str, Tensor]) -> Any:
        """peft's model with copies of ``weights``, around a new module."""
        import torch

        from train.core.lora import copy_weights, with_lora

        assert self.config.lora is not None
        with torch.random.fork_rng(devices=[]):
            model = with_lora(self.new_module(), self.config.lora, self.config.init_from)
        copy_weights(model.get_base_model(), weights)
        return model.eval()

    def export(self, weights: dict[str, Tensor], target: TargetIdentity, training: dict[str, Any]) -> None:
        """Write what was trained, as it is now, into the top of the run folder; ``training``: its provenance."""
        from drafters.hub import checkpoint
        from train.core.lora import save_adapter

        config = {
            "drafter_type": self.config.drafter,
            "format_version": checkpoint.FORMAT_VERSION,
            "drafter": self.drafter_config(),
            "target": target.model_dump(),
            "training": training,
        }
        if self.base is not None:
            save_adapter(self.adapter(weights), config | {"base": self.base.model_dump()}, self.config.out)
            return
        whole, options = self.exported(weights)
        checkpoint.save_checkpoint(self.config.out, whole, config | {"drafter": options})

    @property
    def chunk_rows(self) -> int:
        """Rows of [rows, vocabulary] logits to hold at once: the config's, or what suits the LM head's device."""
        return self.chunk_rows_of(self.ends.lm_head)

    def chunk_rows_of(self, head: nn.Linear) -> int:
        """``chunk_rows`` for an LM head of another vocabulary."""
        from train.core.losses import default_chunk_rows

        return self.config.loss_chunk_rows or default_chunk_rows(head)


def trained_methods() -> list[str]:
    """The methods that can be trained: those with a file in this package, too."""
    folders = import_module("train").__path__
    return [name for name in method_names() if any((Path(folder) / f"{name}.py").is_file() for folder in folders)]


def task_class(method: str) -> type[Task]:
    """The task in ``train/<method>.py``; its ``schema`` is the config's."""
    module = import_module(f"train.{method}")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__:
            return value
    raise ValueError(f"train/{method}.py holds no Task")


def make_task(config: TrainConfig, ends: FrozenEnds) -> Task:
    """The task of the method that ``config`` trains, with a new module."""
    return task_class(config.drafter).of(config)(config, ends)
