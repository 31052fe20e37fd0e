"""DFlash: one pass of a small block-diffusion head drafts a whole block of tokens (Chen et al. 2026, arXiv 2602.06036).

The block is the last committed token, the *anchor*, and mask tokens after it. Each layer attends to features of all
tokens before the anchor, made of several of the target's states, and to the block itself (section 3.1). The slots of
the block are predicted at the same time, so that their distributions are marginals: drafts are a chain of independent
draws, or a tree of the likeliest paths (DDTree, arXiv 2604.12989).
"""

from typing import Annotated, Any, ClassVar, Literal, cast

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.config import Config, DraftLayer, DraftSize, Layers, LayerShape, Vocabulary, validate
from drafters.drafting.block_tree import Marginals, Slots, fill, grow_likeliest
from drafters.drafting.pending import PendingFeatures, StateReader
from drafters.drafting.tree_plan import TreePlan, chain_plan, tree_plan
from drafters.hub.declared import READERS, Layout, Recipe
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree
from drafters.model.block_backbone import BlockBackbone, ContextLayer, block_rows
from drafters.model.draft_head import DraftHead, quantize_layers
from drafters.model.layers import rope_of
from drafters.model.runner import Part, PartLayer
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.shape import PRIOR, ShapePolicy
from drafters.policy.truncation import Truncation


def _given(layout: Any) -> Any:
    if layout is None:
        raise ValueError(
            "a block does not tell its layout; set it to fill-in (slot k predicts the token k after the anchor, as "
            "DFlash) or to anchor-first (the token k + 1 after it, as DSpark)"
        )
    return layout


BlockLayout = Annotated[Literal["fill-in", "anchor-first"], BeforeValidator(_given)]


class BlockOptions(Config):
    """Options of a block drafter; the keys from ``layout`` on describe the head.

    ``tree``: chain; tree: the ``nodes`` likeliest nodes, with at most ``top_k`` candidates of a slot (or of each path,
    where a slot depends on those before it); auto: the chain or static tree of most expected tokens per second on this
    machine, or no draft where none is profitable.
    ``depth``: most tokens of a path; null: all of the block.
    ``truncate``: verify a position of a chain only while its expected gain is profitable.
    ``confidence_temperatures``: of each position, what ``truncate`` divides the logit of its estimated acceptance by;
    train.tools.calibrate fits them.
    ``draft_dtype``: draft with an int8 copy of the head's layers and LM head.
    ``layout``: fill-in: slot k of the block predicts the token k after the anchor, and slot 0 nothing (DFlash);
    anchor-first: slot k predicts the token k + 1 after it (DSpark). It has no default: with the wrong one, less than 1%
    of the drafts are accepted. Engines call anchor-first ``sample_from_anchor: true``.
    ``block_size``: rows of a block, the anchor's included.
    ``mask_token_id``: the token at the other rows.
    ``taps``: the target's states that it reads: 2 is the output of the second layer, transformers' hidden_states[2].
    DFlash's configs call it target layer 1.
    ``layer``, ``layers``: kind of its decoder layers, and their number.
    ``causal``: a row of a block attends only to the rows before it and itself.
    ``draft_vocab_size``: tokens of its own LM head; null: it drafts with the target's LM head.
    ``shape``: heads, MLP and RoPE of its layers where a released head has others than the target.
    """

    tree: Literal["auto", "chain", "tree"] = "auto"
    depth: DraftSize | None = Field(default=None, ge=1)
    nodes: DraftSize = Field(default=32, ge=1)
    top_k: DraftSize = Field(default=8, ge=1)
    truncate: bool = False
    confidence_temperatures: list[Annotated[float, Field(gt=0)]] | None = None
    draft_dtype: Literal["int8"] | None = None
    layout: BlockLayout = Field(default=None, validate_default=True)
    block_size: DraftSize = Field(ge=2)
    mask_token_id: Vocabulary = Field(ge=0)
    taps: list[Layers] = Field(min_length=1)
    layer: DraftLayer = "qwen3"
    layers: Layers = Field(default=5, ge=1)
    causal: bool = False
    draft_vocab_size: Vocabulary | None = Field(default=None, ge=1)
    shape: LayerShape = LayerShape()

    @model_validator(mode="after")
    def _truncates_chains(self) -> "BlockOptions":
        if self.truncate and self.tree != "chain":
            raise ValueError(f"truncate cuts chains, and tree is {self.tree}; set tree to chain, or truncate to false")
        return self

    @model_validator(mode="after")
    def _has_a_temperature_for_each_position(self) -> "BlockOptions":
        given, positions = self.confidence_temperatures, self.block_size - self.first_slot
        if given is not None and len(given) != positions:
            raise ValueError(
                f"confidence_temperatures has {len(given)} values, and a block predicts {positions} tokens; give one "
                "for each, or null"
            )
        return self

    @property
    def first_slot(self) -> int:
        """The first slot that predicts a token."""
        return 1 if self.layout == "fill-in" else 0

    @property
    def slots(self) -> int:
        """Tokens that a block predicts."""
        return self.block_size - self.first_slot


class DFlashDrafter(StateReader):
    """Drafts a chain, a tree, or what the policy chooses, of one pass over the block.

    Raises:
        ValueError: the mask token is not in the target's vocabulary, ``depth`` exceeds the block, or a d2t that is not
            increasing or points outside of the vocabulary.
    """

    name = "dflash"
    options: ClassVar[type[Config]] = BlockOptions
    card_title = "DFlash head ([DFlash](https://arxiv.org/abs/2602.06036))"
    layout = Layout(
        "a DFlash head",
        code="DFlashDraftModel.from_pretrained('{out}').spec_generate(target, input_ids, new_tokens, stop_token_ids)",
        note="`from dflash.model import DFlashDraftModel` (z-lab). The target is a model of transformers.",
        readers=tuple(READERS),
    )
    recipe: ClassVar[Recipe | None] = Recipe(
        learning_rate=6.0e-4,
        rows={"DFlash, auto": {"tree": "auto"}, "DFlash, chain of 3": {"tree": "chain", "depth": 3}},
        small={"layers": 1, "block_size": 8, "anchor_share": 0.25, "optimizer": "muon"},
        short={"draft_vocab": 4096},
        certified={"tree": "chain", "depth": 3},
    )
    max_batch = None
    follows = True
    unread = {"chain": ("nodes", "top_k")}
    policy: ShapePolicy | Truncation | None = None

    def __init__(self, target: TargetModel, module: nn.Module, options: Any) -> None:
        super().__init__(target, module, options)
        self.given = options
        self.taps = tuple(options.taps)
        self.depth = options.depth or options.slots
        _check(options, target)
        self.lm_head = self.draft_head(options)
        self.top_k = min(options.top_k, self.lm_head.width)
        self._block, self._context = self._parts()
        self._layer = cast(Any, module).config
        self._rows = block_rows(options.block_size, options.causal, target.device)
        masks = [options.mask_token_id] * (options.block_size - 1)
        self._masks = torch.tensor([masks], dtype=torch.long, device=target.device)
        nodes = self.depth if options.tree == "chain" else options.nodes
        self.max_draft = max(nodes, options.block_size - 1)  # the cache also holds the block
        if options.tree == "auto":
            self.policy = ShapePolicy(options.nodes, self.depth, min(self.top_k, len(PRIOR)))
        elif options.truncate:
            self.policy = Truncation(self.depth, self._has_confidence(), options.confidence_temperatures)
        self._used: TreePlan  # of the latest draft

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        given = validate(BlockOptions, drafter_config, source=f"options of drafter {cls.name!r}")
        return BlockBackbone(target_config, given.taps, given.layer, given.layers, given.draft_vocab_size, given.shape)

    def drafter_config(self) -> dict[str, Any]:
        return self.given.model_dump(exclude_defaults=True) | {"tree": self.given.tree, "layout": self.given.layout}

    def propose(self, state: DecodeState) -> DraftTree:
        depth = state.longest_draft(self.depth)
        self._used = plan = self._plan(depth, state)
        if depth < 1 or not plan.size:
            return state.nothing
        state.empty_finished(self._cache)
        for features, counts in self._pending.take(state.finished, self._cache):
            self._read(features, counts)
        slots = self.slots(self._states(state), state)
        if self.given.tree == "tree":
            draft = grow_likeliest(slots, depth, self.top_k, self.given.nodes)
        else:
            draft = fill(slots, plan, state.sampling, state.generator)
        if isinstance(self.policy, Truncation):
            count = self.policy.length(slots.certainty(), state)
            if not count:
                return state.nothing
            q = None if draft.q is None else draft.q[:, :count]
            draft = DraftTree.chain(draft.tokens[:, :count], q)
        draft.tokens, draft.q = (
            self.lm_head.tokens(draft.tokens),
            None if draft.q is None else self.lm_head.spread(draft.q),
        )
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        self.follow(state, output, verdict)
        if self.policy is not None:
            self.policy.learn(self._used, draft.size, state, verdict)

    def slots(self, states: Tensor, state: DecodeState) -> Slots:
        """Scores of the slots, from their states ``[B, D, H]``."""
        return Marginals(self.lm_head(states))

    def _states(self, state: DecodeState) -> Tensor:
        """One pass over the block: states of the slots that predict, ``[B, depth, H]``."""
        tokens = torch.cat([state.roots, self._masks.expand(state.batch, -1)], dim=1)
        states = self.target.runner.run(self._block, [tokens], self._cache, self._rows)[0]
        first = self.given.first_slot
        return states[:, first : first + self.depth]

    def _read(self, features: Tensor, counts: list[int]) -> None:
        """Put the first ``counts`` of the target's states ``[B, R, taps * H]`` into the cache."""
        if sum(counts):
            self.target.runner.run(self._context, [features], self._cache)
            self._cache.commit_first(counts)

    def _read_prompts(self, state: DecodeState, output: FeatureOutput) -> None:
        """Put the prompts' rows into a new cache, all but the last of each, which is pending."""
        features = self.true_features(output)
        self._cache = self.target.new_cache(state.batch, state.cache.capacity, self.given.layers, self._layer)
        self._pending = PendingFeatures(features, state.prompt_lengths)
        self._read(features[:, :-1], [length - 1 for length in state.prompt_lengths])

    def _plan(self, depth: int, state: DecodeState) -> TreePlan:
        if isinstance(self.policy, ShapePolicy):
            return tree_plan(self.policy.paths(state), self.target.device)
        return chain_plan(depth, self.target.device)

    def _has_confidence(self) -> bool:
        """True if the head has a trained estimate of acceptance."""
        return False

    def draft_head(self, options: Any, own: nn.Linear | None = None) -> DraftHead:
        return self.own_draft_head(options.draft_dtype)

    def _parts(self) -> tuple[Part, Part]:
        """What runs over a block, and what takes in committed tokens."""
        runner, head = self.target.runner, cast(Any, self.module)
        block = runner.part(head.layers, self.target.embed, runner.norm(head.norm), rope_of(head.config))
        fc, norm = runner.linear(head.fc), runner.norm(head.hidden_norm)
        layers = [PartLayer(ContextLayer(layer.self_attn, runner.linear), n) for n, layer in enumerate(head.layers)]
        context = Part(layers, lambda states: norm(fc(states)), rope=block.rope)
        if self.given.draft_dtype is not None:
            quantize_layers(block, self.given.draft_dtype, fc)
        return block, context


def _check(options: BlockOptions, target: TargetModel) -> None:
    if options.mask_token_id >= target.vocab_size:
        raise ValueError(
            f"mask_token_id is {options.mask_token_id:,}, and the vocabulary of {target.name} has "
            f"{target.vocab_size:,} tokens; give the id that the head was trained with"
        )
    if options.depth is not None and options.depth > options.slots:
        raise ValueError(
            f"depth is {options.depth}, and a block of {options.block_size} rows with layout {options.layout} predicts "
            f"{options.slots} tokens; use {options.slots} or less"
        )
