"""Kangaroo: draft with the target's shallow layers and a trained adapter, with double early exit (Liu et al. 2024).

Verification resumes at ``exit_layer`` and reuses the hidden states, keys and values of the shallow layers. The paper
drafts greedy chains; trees and sampled drafts are added here.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from drafters.config import Config, DraftSize
from drafters.drafting.grow import Slots
from drafters.drafting.head import Head
from drafters.drafting.tree_plan import TreePlan, chain_plan
from drafters.heads.kangaroo.forms import KANGAROO_FORMS
from drafters.heads.kangaroo.module import KangarooAdapter
from drafters.heads.kangaroo.shape import KangarooShape
from drafters.learned import LearnedDrafter
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree, tree_mask
from drafters.model.cache import KVCache
from drafters.model.check import check_parts
from drafters.model.draft_head import DraftHeadOptions, listed_head, quantize_layers
from drafters.model.rows import CHAIN, Rows
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.shaper import planned


class KangarooOptions(DraftHeadOptions):
    """Options of the Kangaroo drafter.

    ``eta``: drafting stops after a token whose confidence is not above eta; 0 never stops early.
    ``confidence``: top1 is the adapter's highest probability (the paper's); entropy is exp(-entropy) of its
    distribution, which is also 1/n for n equally likely tokens.
    ``max_draft_tokens``: most levels of a draft.
    ``paths``: draft a tree, each node given by the ranks of its ancestors and itself among their siblings, for example
    ``[[0], [1], [0, 0]]``; the confidence of its likeliest path decides when drafting stops. Null drafts a chain.
    """

    eta: float = Field(default=0.4, ge=0.0, lt=1.0)
    confidence: Literal["top1", "entropy"] = "top1"
    max_draft_tokens: DraftSize = Field(default=6, ge=1)
    paths: list[list[DraftSize]] | None = None


class AdapterHead(Head):
    """The adapter in the loop. One sequence, and drafts of one plan.

    Attributes:
        plan: the nodes of a whole draft.
    """

    def __init__(self, target: TargetModel, module: KangarooAdapter, options: KangarooOptions) -> None:
        super().__init__(target, module)
        self.exit_layer = module.shape.exit_layer
        check_parts(target, self.exit_layer)
        self.taps, self.options = (self.exit_layer,), options
        self.part = target.runner.part(self.module.layers, leave=target.runner.norm(self.module.norm))
        self.lm_heads = [listed_head(target, module, options, getattr(module, "lm_head", None))]
        if options.draft_dtype is not None:
            quantize_layers(self.part, options.draft_dtype)
        length = options.max_draft_tokens
        self.plan = TreePlan(options.paths, target.device) if options.paths else chain_plan(length, target.device)
        self.rows = list(_rows_by_level(self.plan, target.device))
        self._inner = {node + 1: place for place, node in enumerate(self.plan.inner)}  # target slot -> adapter slot
        self.cache = KVCache.nothing()
        self._unread: Tensor  # [1, R, H] accepted exit states that the adapter has not read
        self.draft: ExitSlots  # the latest

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self.cache.release()  # frees the memory before the new cache takes its own
        self.cache = self.target.new_cache(1, state.cache.capacity, layers=1)
        prompt = output.taps[self.exit_layer]
        self.adapt(prompt)
        self.cache.commit_first([prompt.shape[1]])
        self._unread = prompt[:, :0]

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        # The shallow layers read the root; the adapter reads the last accepted exit states, and the root's.
        root = self.target.shallow(state.roots, state.cache, self.exit_layer, CHAIN)
        rows = torch.cat([self._unread, root], dim=1)
        adapted = self.adapt(rows)[:, -1:]
        self.cache.commit_first([rows.shape[1]])
        self.draft = ExitSlots(self, state, root, adapted)
        return self.draft

    def follow(self, state: DecodeState, output: FeatureOutput, verdict: Verdict) -> None:
        accepted, count = verdict.rows[0][1:], self.draft.read  # the adapter has read the root
        read = [place for row in accepted if (place := self._inner.get(row, count)) < count]
        self.cache.commit([read])
        self._unread = self.draft.hidden[:, accepted[len(read) :]]

    def adapt(self, states: Tensor, rows: Rows = CHAIN) -> Tensor:
        """Run the adapter over exit states ``[1, R, H]``: states for ``lm_head``, ``[1, R, H]``."""
        return self.target.runner.run(self.part, [states], self.cache, rows)[0]


class ExitSlots(Slots):
    """Nodes scored by the adapter. A draft ends after a level whose likeliest path is uncertain.

    Attributes:
        read: inner nodes that the adapter has read. states: exit states of the root, and of each level's nodes.
    """

    def __init__(self, head: AdapterHead, state: DecodeState, root: Tensor, adapted: Tensor) -> None:
        self._head, self._state, self._adapted = head, state, adapted
        self.states, self.read, self._depth = [root], 0, min(head.options.max_draft_tokens, state.room() - 1)

    @cached_property
    def hidden(self) -> Tensor:
        """Exit states ``[1, 1 + N, H]`` of [root, nodes]."""
        return torch.cat(self.states, dim=1)

    def logits(self, depth: int) -> Tensor:
        self._logits = self._head.lm_head(self._adapted)  # [1, R, W]
        return self._logits

    def goes_on(self, tokens: Tensor) -> bool:
        head, level = self._head, len(self.states) - 1
        names = head.lm_head.tokens(tokens)
        self.states.append(head.target.shallow(names, self._state.cache, head.exit_layer, head.rows[level]))
        done = level + 1 == self._depth or not len(head.plan.levels[level].inner)
        return not (done or uncertain(self._logits[:, 0], head.options))

    def follow(self, tokens: Tensor, parents: Tensor) -> None:
        level = self._head.plan.levels[len(self.states) - 2]
        self._adapted = self._head.adapt(self.states[-1][:, level.inner], level.rows)
        self.read += len(level.inner)


def uncertain(logits: Tensor, options: KangarooOptions) -> bool:
    """The second early exit, after the node with these ``logits [1, W]``.

    It copies one value per level to the host, because the next level depends on it.
    """
    if options.eta == 0:
        return False
    if options.confidence == "top1":
        confidence = logits.float().softmax(-1).amax()
    else:
        log_q = logits.float().log_softmax(-1)
        confidence = (log_q.exp() * log_q).nan_to_num(0.0).sum().exp()  # 0 log 0 is 0
    return confidence.item() <= options.eta


class KangarooDrafter(LearnedDrafter):
    """Drafts with double early exit: from the layers at ``exit_layer``, and from drafting after an uncertain token.

    Raises:
        ValueError: ``exit_layer`` is not below the target's number of layers, or ``paths`` are no tree.
    """

    name = "kangaroo"
    shape: ClassVar[type[KangarooShape]] = KangarooShape
    module_class = KangarooAdapter
    options: ClassVar[type[Config]] = KangarooOptions
    card_title = "Kangaroo adapter ([Kangaroo](https://arxiv.org/abs/2404.18911))"
    forms = KANGAROO_FORMS

    head: AdapterHead

    def __init__(self, target: TargetModel, module: nn.Module, options: Any) -> None:
        super().__init__(target, module, options)
        head = AdapterHead(target, self.module, options)  # type: ignore[arg-type]
        self.hold(head, planned(head.plan))

    def propose(self, state: DecodeState) -> DraftTree:
        draft = super().propose(state)
        if draft.size:  # verification resumes from these states
            draft.extra.hidden, draft.extra.resume_layer = self.head.draft.hidden, self.head.exit_layer
        return draft


def _rows_by_level(plan: TreePlan, device: torch.device) -> Iterator[Rows]:
    """Per level, mask and positions of its nodes for the shallow layers, which read all nodes."""
    (see, depths), first = tree_mask(plan.parents, device), 1
    for level in plan.levels:
        last = first + len(level.rank)
        yield Rows(offset=first) if plan.is_chain else Rows(see[:, first:last, :last], depths[:, :last], first)
        first = last
