"""A method's training: a Task. Each train/<method>.py derives one; the loop, the watchers and the checks use it.

A task returns sums and counts, never means: the loop adds them up over micro-batches and ranks before it divides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from drafters.base import Drafter
from drafters.hub.checkpoint import BaseHead, TargetIdentity
from drafters.methods import drafter_class
from drafters.model.ends import FrozenEnds
from drafters.model.target import TargetModel
from train.core.attention import check_dialogues, take_dialogues
from train.core.config import TrainConfig
from train.core.lm_heads import LMHeads
from train.core.lora import with_lora
from train.core.losses import Pairs
from train.core.weights import exported, shape_of, write_checkpoint

if TYPE_CHECKING:
    from train.core.engine import Engine
    from train.data.packing import Batch, Rewrite, Source, TrainData


@dataclass
class Ratio:
    """A mean before the division: ``total`` over ``count``, scalars."""

    total: Tensor
    count: Tensor


def mean(values: Tensor) -> Ratio:
    """The mean of all ``values``."""
    return Ratio(values.sum(), torch.tensor(values.numel(), device=values.device))


class Task:
    """One drafter's training.

    Class attributes:
        schema: the run's configuration; its ``drafter`` names the method.
        ahead: row i of the prediction is about token i + ahead.
        drafts: the kinds of draft that tau is measured with, and the drafter's options for each.
        constant_inputs: weights whose input is constant, so that their backward pass has one product less.

    Attributes:
        module: what is trained; ``drafting_module`` is the part of it that a drafter's checkpoint holds.
        heads: the LM heads of target and drafter.
        predictions: S, predictions of each trained token.
        passes: forwards of the module in one step.
        earliest: the first token of a dialogue that all S predictions can be about.
        against_logits: the loss compares with the target's logits; else the targets of training are the text's tokens.
        layers_config: the configuration of the module's layers.
        lm_heads: names of weights that are LM heads or embeddings; the module's forward takes no product with them.
        draft_ids: int32 ``[N]``, the tokens of the config's ``draft_vocab``, else those of ``init_from``, or None.
        pair: tensors of the candidates of ``init_from``. rows_options: its options about draft tokens and candidates.
        block_rows, slots: of a block drafter, the rows of a block, and those that predict.
        reach: tokens before a block that it attends to; None: all.
        done: share of the run so far; the loop sets it before each step, and elsewhere it is 1.
        base: with the config's ``lora``, the drafter that the adapter is for.
        head: the shape of the trained head; where ``init_from`` has layers of other sizes than the target, with those.
    """

    schema: ClassVar[type[TrainConfig]]
    ahead: ClassVar[int]
    drafts: ClassVar[dict[str, dict[str, Any]]] = {"chain": {}}
    constant_inputs: tuple[str, ...] = ()
    predictions = passes = 1
    against_logits = True
    lm_heads: tuple[str, ...] = ()
    draft_ids: Tensor | None = None
    block_rows: int | None = None
    reach: int | None = None
    slots = 1
    base: BaseHead | None = None
    pair: Mapping[str, Tensor] = MappingProxyType({})
    rows_options: Mapping[str, Any] = MappingProxyType({})
    done = 1.0
    config: TrainConfig
    module: nn.Module

    def __init__(self, config: TrainConfig, ends: FrozenEnds) -> None:
        config = config.settled(lambda: ends.config.num_hidden_layers)
        self.config, self.ends, self.layers_config = config, ends, ends.config
        self.drafter: type[Any] = drafter_class(config.measured_by["drafter"])
        self.head = shape_of(config)
        self.heads = LMHeads(config, ends.lm_head)
        self.earliest = self.ahead
        torch.manual_seed(config.seed)
        self.module = self.drafting_module = self.build()
        self.check_attention()

    @classmethod
    def of(cls, config: TrainConfig) -> type[Task]:
        """This class, or a subclass for such a config."""
        return cls

    @property
    def one_pass(self) -> bool:
        """Whether the current step trains only the first of the passes."""
        return self.done < self.config.one_pass_until

    # ------------------------------------------------------------------------------------------- the module

    def build(self) -> nn.Module:
        """The module with random weights, which takes packed dialogues."""
        module: nn.Module = self.drafter.build_module(self.ends.config, self.head)
        take_dialogues(module)
        if self.config.lora is not None:
            with_lora(module, self.config.lora, self.config.init_from)
        return module

    def check_attention(self) -> None:
        """Raise ValueError if the module's attention does not take packed dialogues."""
        check_dialogues(self.module, self.ends.config)

    def load(self) -> None:  # noqa: B027 (most methods have nothing to load)
        """Read weights that are not random into the module."""

    @classmethod
    def check_start(cls, config: TrainConfig) -> str:
        """With the config's ``starts_in_target``: a line on the weights there; raises ValueError if they do not fit."""
        return ""

    def fit(self, train: Source) -> None:  # noqa: B027
        """With the config's ``solves_weights``: solve for some new weights from the training data."""

    def describe(self, train: Source) -> str | None:
        """One line on what of the training data is trained on, if not all answers; raises ValueError if nothing is."""
        return None

    def rate_factors(self, step: int) -> dict[str, float]:
        """By prefix of weights' names, their factor on the learning rate after ``step`` steps; other weights: 1."""
        return {}

    # ------------------------------------------------------------------------------------------- one micro-batch

    def rows(self, batch: Batch, seed: int | None = None) -> Tensor:
        """Flat indices int64 ``[n]`` into ``[R * L]`` of the trained positions; ``batch`` is on the CPU.

        Position i is trained if the token that it predicts, i + ahead, belongs to an answer. A method that trains on
        random positions draws them by ``seed``, which is None on held-out text.
        """
        return batch.shifted(batch.loss_mask, self.ahead).flatten().nonzero().squeeze(1)

    def choose(self, batch: Batch, seed: int | None = None) -> Batch:
        """``batch`` with its trained positions; arguments as for ``rows``."""
        return replace(batch, rows=self.rows(batch, seed))

    def most_rows(self, lengths: list[int]) -> tuple[int, int]:
        """Rows of a forward over dialogues of these lengths, and how many tokens are predicted, at most."""
        return sum(lengths), sum(lengths)

    def pairs(self, module: Any, batch: Batch, seed: int | None = None) -> Pairs:
        """Predictions, targets and weights of the trained positions ``batch.rows``.

        ``seed``: of all that is random in it; None on held-out text, where nothing is.
        """
        inputs = batch if seed is None else self.with_noise(batch, seed)
        predicted = self.predict(module, inputs)
        several = predicted if predicted.dim() == 4 else predicted[None]
        targets = target_states(batch, self.ahead).flatten(0, 1)[batch.rows]
        if seed is not None and not self.against_logits:
            targets = self.heads.places(text_tokens(batch, self.ahead).flatten()[batch.rows])
        return Pairs(several.flatten(1, 2)[:, batch.rows], targets)

    def with_noise(self, batch: Batch, seed: int) -> Batch:
        """The batch that the module reads in training instead of ``batch``."""
        return batch

    def predict(self, module: Callable[..., Tensor], batch: Batch) -> Tensor:
        """The module's outputs as they enter the LM head, ``[R, L, h]``; or S of them, ``[S, R, L, h]``.

        A task with its own ``pairs`` may lack it. ``train.tools.throughput`` then has no plain formulation of it.
        """
        raise NotImplementedError(f"{type(self).__name__} predicts by pairs")

    def losses(self, pairs: Pairs) -> dict[str, Tensor]:
        """Named sums over the n tokens; "loss" is differentiated, the others are logged."""
        return {"loss": self.heads.classification(pairs).sum()}

    def judged(self, pairs: Pairs) -> Pairs:
        """The predictions that draft, beside the features of the target that will verify them."""
        return pairs

    def answers(self, module: Any, batch: Batch, tokens: Tensor) -> Pairs:
        """The predictions that draft ``tokens``, int64 ``[n]``, indices into a batch of one dialogue, beside the
        features of the target that will verify them."""
        pairs = self.pairs(module, replace(batch, rows=tokens - self.ahead))
        return self.judged(replace(pairs, targets=batch.features[0, tokens - 1]))

    def heldout(self, module: Any, batch: Batch, pairs: Pairs) -> dict[str, Ratio]:
        """Figures on held-out text beside the losses.

        ``expected_acceptance``: mean of sum_x min(p, q), the acceptance rate of sampled drafting (temperature 1).
        ``top1_agreement``: share of positions where drafter and target rank the same token first: the acceptance rate
        of greedy drafting.
        """
        overlap, agree = self.heads.compare(self.judged(pairs))
        return {"expected_acceptance": mean(overlap), "top1_agreement": mean(agree)}

    # ------------------------------------------------------------------------------------------- around the steps

    def rewriter(self, data: TrainData, engine: Engine, step: Callable[[], int]) -> Rewrite | None:
        """A function that replaces texts of the training data; ``step`` returns the number of steps so far."""
        return None

    def drafters(self, target: TargetModel, weights: dict[str, Tensor]) -> dict[str, Drafter]:
        """Drafters with copies of ``weights`` for the decoding loop, by kind of draft; a running state takes chains."""
        whole, common = exported(self, weights)
        return {
            kind: self.drafter.from_weights(target, whole, common | options)
            for kind, options in self.drafts.items()
            if kind == "chain" or not target.chains_only
        }

    def export(self, weights: dict[str, Tensor], target: TargetIdentity, training: dict[str, Any]) -> None:
        """Write the drafter as it is now into the top of the run folder; ``training``: its provenance."""
        write_checkpoint(self, weights, target, training)


def target_states(batch: Batch, ahead: int) -> Tensor:
    """The target's features for the tokens that row i is about, i + ahead: ``[R, L, H]``."""
    return batch.features.roll(1 - ahead, dims=1) if ahead > 1 else batch.features


def text_tokens(batch: Batch, ahead: int) -> Tensor:
    """The text's tokens that row i is about, i + ahead: int64 ``[R, L]``."""
    return batch.input_ids.roll(-ahead, dims=1)


def task_class(method: str) -> type[Task]:
    """``TASK`` in ``train/<method>.py``."""
    task: type[Task] = import_module(f"train.{method}").TASK
    return task


def make_task(config: TrainConfig, ends: FrozenEnds) -> Task:
    """The task of the method that ``config`` trains, with a new module."""
    return task_class(config.drafter).of(config)(config, ends)
