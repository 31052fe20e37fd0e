"""DFlash and DSpark: one pass of a small block-diffusion head drafts a whole block of tokens.

DFlash (Chen et al. 2026, arXiv 2602.06036): the block is the last committed token, the *anchor*, and mask tokens after
it. Each layer attends to features of all tokens before the anchor, made of several of the target's states, and to the
block itself (section 3.1). The slots of the block are predicted at the same time, so that their distributions are
marginals: drafts are a chain of independent draws, or a tree of the likeliest paths (DDTree, arXiv 2604.12989).

DSpark (DeepSeek 2026, 2607.05147): the *Markov head* adds ``W2 W1[x_{k-1}]`` to the logits of slot k, so that a token
depends on the one before it: drafts are drawn left to right, with the exact q, and the backbone still runs once. The
*confidence head* estimates whether the token of a slot will be accepted, from the slot's state and the token before it;
``truncate`` reads it.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from drafters.config import Config, DraftSize
from drafters.drafting.grow import Marginals, Slots, top_logit
from drafters.drafting.head import StateHead
from drafters.drafting.tree_plan import TreePlan
from drafters.heads.block.dspark import DSparkHead
from drafters.heads.block.forms import DFLASH_FORMS, DSPARK_FORMS
from drafters.heads.block.module import BlockBackbone, ContextLayer, block_rows
from drafters.heads.block.shape import BlockShape, DSparkShape
from drafters.learned import LearnedDrafter
from drafters.loop.state import DecodeState
from drafters.model.candidates import CandidateOptions, with_candidates
from drafters.model.draft_head import own_head, quantize_layers
from drafters.model.layers import rope_of
from drafters.model.runner import Part, PartLayer, model_time
from drafters.model.target import TargetModel
from drafters.policy.shape import PRIOR
from drafters.policy.shaper import Shaper, by_costs
from drafters.policy.truncation import Truncation


class SlotOptions(CandidateOptions):
    """Options of a drafter whose head predicts all slots of a draft in one pass.

    ``tree``: chain; tree: the ``nodes`` likeliest nodes, with at most ``top_k`` candidates of a slot (or of each path,
    where a slot depends on those before it); auto: the chain or static tree of most expected tokens per second on this
    machine, or no draft where none is profitable.
    ``depth``: most tokens of a path; null: as many as the head was trained to predict.
    ``draft_dtype``: draft with an int8 copy of the head's layers and LM head.
    """

    tree: Literal["auto", "chain", "tree"] = "auto"
    depth: DraftSize | None = Field(default=None, ge=1)
    nodes: DraftSize = Field(default=32, ge=1)
    top_k: DraftSize = Field(default=8, ge=1)
    draft_dtype: Literal["int8"] | None = None

    def shaper(self, slots: int, choices: int) -> Shaper:
        """The shaper of drafts from ``slots`` of ``choices`` tokens each; raises ValueError for a larger ``depth``."""
        depth, top_k = self.depth or slots, min(self.top_k, choices)
        if depth > slots:
            raise ValueError(f"depth is {depth}, and the head predicts {slots} tokens at once; use {slots} or less")
        if self.tree == "auto":
            return by_costs(self.nodes, depth, min(top_k, len(PRIOR)))
        return Shaper(depth, self.nodes, top_k, grows=True) if self.tree == "tree" else Shaper(depth, depth)


class BlockOptions(SlotOptions):
    """Options of a block drafter.

    ``truncate``: verify a position of a chain only while its expected gain is profitable.
    ``confidence_temperatures``: divisor, at each position, of the logit of the acceptance that ``truncate`` estimates;
    train.tools.calibrate fits them.
    """

    truncate: bool = False
    confidence_temperatures: list[Annotated[float, Field(gt=0)]] | None = None

    @model_validator(mode="after")
    def _truncates_chains(self) -> Self:
        if self.truncate and self.tree != "chain":
            raise ValueError(f"truncate cuts chains, and tree is {self.tree}; set tree to chain, or truncate to false")
        return self


class BlockHead(StateHead):
    """A block head in the loop: it reads true states, and answers with the slots of one pass over a block."""

    def __init__(self, target: TargetModel, module: BlockBackbone, options: BlockOptions) -> None:
        super().__init__(target, module, module.shape.layers, module.config, module.shape.reach)
        shape, runner, head = module.shape, target.runner, self.module
        self.lm_heads = [with_candidates(own_head(target, module, options.draft_dtype), module, options)]
        self.block = runner.part(
            head.layers,
            lambda tokens: head.embedded(target.embed(tokens)),
            runner.norm(head.norm),
            rope_of(head.config),
            head.scopes,
        )
        fc, norm = runner.linear(head.fc), runner.norm(head.hidden_norm)
        layers = [PartLayer(ContextLayer(layer.self_attn, runner.linear), n) for n, layer in enumerate(head.layers)]
        self.context = Part(layers, lambda states: norm(fc(states)), rope=self.block.rope)
        if options.draft_dtype is not None:
            quantize_layers(self.block, options.draft_dtype, fc)
        self._rows = block_rows(shape.rows, shape.causal is True, target.device)
        masks = [shape.mask_token_id] * (shape.rows - 1)
        self._masks = torch.tensor([masks], dtype=torch.long, device=target.device)
        self._depth = options.depth or shape.slots

    @property
    def choices(self) -> int:
        """Tokens that a slot can draft."""
        return self.lm_head.width

    def read(self, features: Tensor, counts: list[int], state: DecodeState) -> None:
        """Put the first ``counts`` of the target's states ``[B, R, taps * H]`` into the cache."""
        if sum(counts):
            self.target.runner.run(self.context, [features], self.cache)
            self.cache.commit_first(counts)

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        self.catch_up(state)
        return self.scored(self.states(state), state)

    def states(self, state: DecodeState) -> Tensor:
        """One pass over the block: states of the slots that predict, ``[B, depth, H]``."""
        tokens = torch.cat([state.roots, self._masks.expand(state.batch, -1)], dim=1)
        states = self.target.runner.run(self.block, [tokens], self.cache, self._rows)[0]
        first = self.module.shape.first_slot
        return states[:, first : first + self._depth]

    def scored(self, states: Tensor, state: DecodeState) -> Slots:
        """Slots of these states ``[B, D, H]``."""
        return Marginals(*self.lm_head.scored(states))


class MarkovBlock(BlockHead):
    """A DSpark head in the loop."""

    def __init__(self, target: TargetModel, module: DSparkHead, options: BlockOptions) -> None:
        super().__init__(target, module, options)
        self.markov_w2 = target.runner.linear(module.markov_head.markov_w2)
        if options.draft_dtype is not None:
            quantize_layers(None, options.draft_dtype, self.markov_w2)

    def scored(self, states: Tensor, state: DecodeState) -> Slots:
        logits, places, among = self.lm_head.scored(states)
        return MarkovSlots(self, logits, states, state.roots, places, among)


class MarkovSlots(Slots):
    """Slots whose scores depend on the tokens before them: DSpark's Markov head over a block of D slots.

    Args:
        logits: ``[B, D, W]`` of the backbone, before the correction. states: ``[B, D, H]`` of the slots.
        anchors: ``[B, 1]``, the last committed tokens.
        places: ``[B, D, k]`` of the logits among ``among`` tokens; None: they are of all W.
    """

    def __init__(
        self,
        head: MarkovBlock,
        logits: Tensor,
        states: Tensor,
        anchors: Tensor,
        places: Tensor | None = None,
        among: int = 0,
    ) -> None:
        self._head, self._logits, self._states = head, logits, states
        self._places, self.among = places, among
        self._module: DSparkHead = head.module
        self._tokens, self._memory = anchors, self._module.markov_head.no_memory(states[:, :1])
        self._previous: list[Tensor] = []  # by slot, the tokens before it
        self._corrected: list[Tensor] = []

    def logits(self, depth: int) -> Tensor:
        """Scores ``[B, n, W]`` of the children of n nodes: slot ``depth``'s, corrected by each node's token."""
        states = self._states[:, depth : depth + 1].expand(-1, self._tokens.shape[1], -1)
        with model_time():
            latent, self._memory = self._module.markov_head.step(self._tokens, states, self._memory)
            corrected = self._logits[:, depth : depth + 1] + self._correction(depth, latent)
        self._previous.append(self._tokens)
        self._corrected.append(corrected)
        return corrected

    def _correction(self, depth: int, latent: Tensor) -> Tensor:
        """``W2`` of ``latent [B, n, r]``, ``[B, n, W]``, or of the candidates only."""
        if self._places is None:
            return self._head.markov_w2(latent)
        places = self._places[:, depth]  # [B, k]
        self.places = places[:, None].expand(-1, latent.shape[1], -1)
        return latent @ self._module.markov_head.markov_w2.weight[places].transpose(-1, -2)

    def follow(self, tokens: Tensor, parents: Tensor) -> None:
        """As the base class; the nodes take over their parents' memory of the rnn."""
        self._tokens = self._head.lm_head.tokens(tokens)
        rows = parents.expand_as(tokens)[..., None]
        self._memory = self._memory.gather(1, rows.expand(-1, -1, self._memory.shape[-1]))

    def certainty(self) -> Tensor:
        """Estimated acceptance ``[B, D]`` of a chain's slots so far, as logits: of the confidence head, or of max q."""
        if self._module.confidence_head is None:
            return top_logit(torch.cat(self._corrected, dim=1))
        previous = torch.cat(self._previous, dim=1)
        return self._module.confidence(self._states[:, : previous.shape[1]], previous)


def shaped(options: BlockOptions, head: BlockHead) -> Shaper:
    """The shaper of a block head's drafts.

    Raises:
        ValueError: ``depth`` exceeds the block, or there is not one confidence temperature for each position.
    """
    shape: BlockShape = head.module.shape
    temperatures = options.confidence_temperatures
    if temperatures is not None and len(temperatures) != shape.slots:
        raise ValueError(
            f"confidence_temperatures has {len(temperatures)} values, and a block predicts {shape.slots} tokens; give "
            "one for each, or null"
        )
    shaper = options.shaper(shape.slots, head.choices)
    if options.truncate:
        trained = isinstance(shape, DSparkShape) and shape.confidence_head
        shaper.policy = Truncation(shaper.depth, trained, temperatures)
    return shaper


class BlockDrafter(LearnedDrafter):
    """Drafts a chain, a tree, or what the policy chooses, of one pass over the block.

    Class attributes:
        head_class: class of the head in the loop.

    Raises:
        ValueError: ``depth`` exceeds the block, or a d2t that is not increasing or points outside of the vocabulary.
    """

    head_class: ClassVar[type[BlockHead]] = BlockHead
    options: ClassVar[type[Config]] = BlockOptions
    max_batch = None
    follows = True
    unread: ClassVar = {"chain": ("nodes", "top_k")}

    def __init__(self, target: TargetModel, module: nn.Module, options: Any) -> None:
        super().__init__(target, module, options)
        head = self.head_class(target, self.module, options)  # type: ignore[arg-type]
        self.hold(head, shaped(options, head), head.module.shape.rows - 1)  # the cache also holds the block


class DFlashDrafter(BlockDrafter):
    """Drafts from marginals of the slots."""

    name = "dflash"
    shape: ClassVar[type[BlockShape]] = BlockShape
    module_class = BlockBackbone
    card_title = "DFlash head ([DFlash](https://arxiv.org/abs/2602.06036))"
    forms = DFLASH_FORMS


class DSparkDrafter(BlockDrafter):
    """Drafts each token given the one before it."""

    name = "dspark"
    shape: ClassVar[type[DSparkShape]] = DSparkShape
    module_class = DSparkHead
    head_class = MarkovBlock
    card_title = "DSpark head ([DSpark](https://arxiv.org/abs/2607.05147))"
    forms = DSPARK_FORMS
