"""EAGLE and EAGLE-3: a head of few decoder layers extrapolates features, and drafts grow over what it predicts.

EAGLE (Li et al. 2024): at index i the head takes feature_i and the embedding of token_{i+1} and predicts feature_{i+1},
whose logits are those of token_{i+2}: the token sampled at i + 1 is known, which resolves the feature's uncertainty
(section 3.1). Figure 8's other inputs are a head's ``inputs``, to compare with.

EAGLE-3 (Li et al. 2025): states after a few, half and nearly all of the target's layers are concatenated, and ``fc``
makes a feature of them. The output goes through the head's own norm and LM head, and is the feature of the next step
(section 3.1, Figure 5). EAGLE-3.1 norms each state before ``fc``, and feeds back the output after the norm.

Drafts are a chain, EAGLE's static tree, EAGLE-2's dynamic tree, or what costs and acceptance favour.
"""

import warnings
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from drafters.config import SHIFTED, UNSHIFTED, Config, DraftSize
from drafters.drafting.grow import Slots
from drafters.drafting.head import StateHead
from drafters.drafting.passes import grow_by_passes
from drafters.drafting.tree_plan import EAGLE_TREE, TreePlan, chain_plan
from drafters.heads.eagle.forms import EAGLE_FORMS
from drafters.heads.eagle.module import EagleHead
from drafters.heads.eagle.shape import EagleShape
from drafters.heads.eagle3.forms import EAGLE3_FORMS
from drafters.heads.eagle3.module import Eagle3Head
from drafters.heads.eagle3.shape import Eagle3Shape
from drafters.learned import LearnedDrafter
from drafters.loop.state import DecodeState, last_of, padded
from drafters.loop.tree import DraftTree
from drafters.model import backend
from drafters.model.candidates import CandidateOptions, with_candidates
from drafters.model.draft_head import DraftHead, DraftHeadOptions, listed_head, own_head, quantize_layers
from drafters.model.layers import rope_of
from drafters.model.rows import CHAIN, Rows, Scope
from drafters.model.runner import Part, identity, model_time
from drafters.model.target import TargetModel
from drafters.policy.shape import PRIOR, Probability, Way
from drafters.policy.shaper import Shaper, by_costs, planned

DEPTHS = {"auto": 8, "chain": 5, "static": 5, "dynamic": 6}


class TreeOptions(Config):
    """Shape of the drafts of an EAGLE head.

    ``tree``: chain; static (the paper's Figure 9, or ``paths``); dynamic (EAGLE-2); auto: the chain or static tree of
    most expected tokens per second on this machine, or no draft where none is profitable.
    ``depth``: levels; by default 5 (chain), 6 (dynamic), at most 8 (auto), and at most an EAGLE-3 head's trained steps.
    ``nodes``, ``top_k``: nodes of the dynamic tree, and its children per node and extended nodes per level; for auto,
    the most of each. Defaults: EAGLE-2's evaluation, whose depth 5 leaves out the root's children.
    ``paths``: a static tree as paths of child ranks, for example ``[[0], [1], [0, 0]]``.
    ``acceptance``: prior of auto, by "greedy" and "sampled": for each depth, how often the candidate of each rank is
    right where those before it are wrong.
    """

    tree: Literal["auto", "chain", "static", "dynamic"] = "auto"
    depth: DraftSize | None = Field(default=None, ge=1)
    top_k: DraftSize = Field(default=10, ge=1)
    nodes: DraftSize = Field(default=59, ge=1)
    paths: list[list[DraftSize]] | None = None
    acceptance: dict[Way, list[list[Probability]]] | None = None


class EagleOptions(TreeOptions, DraftHeadOptions, CandidateOptions):
    """Options of the EAGLE drafter."""


class Eagle3Options(TreeOptions, CandidateOptions):
    """Options of the EAGLE-3 drafter. ``draft_dtype``: draft with an int8 copy of the head's layer and LM head."""

    draft_dtype: Literal["int8"] | None = None


class FeatureHead(StateHead):
    """An EAGLE head in the loop: it reads true features, and extends predicted ones.

    Args:
        part: the layers, from (features, tokens) to predicted features.
        lm_head: scores predicted features.
    """

    one_call: Any = None  # a pass of the head over a draft of one sequence

    def __init__(self, target: TargetModel, module: Any, part: Part, lm_head: DraftHead) -> None:
        super().__init__(target, module, len(part.layers), module.config)
        self.part, self.lm_heads = part, [lm_head]

    def read(self, features: Tensor, counts: list[int], state: DecodeState) -> Tensor:
        """Take in true features ``[B, R, ...]`` and the token after each; return the predicted next ``[B, 1, H]``."""
        predicted = self.extend(features, padded(self.following(counts, state), self.target.device))
        self.cache.commit_first(counts)
        return last_of(predicted, counts)[:, None]

    def following(self, counts: list[int], state: DecodeState) -> list[list[int]]:
        """The tokens after the next ``counts`` features of each sequence."""
        rows = zip(state.tokens, self.cache.lengths, counts, strict=True)
        return [tokens[length + 1 : length + 1 + count] for tokens, length, count in rows]

    def extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        """Run the layers over features and tokens ``[B, R]``: predicted features ``[B, R, H]``."""
        return self.target.runner.run(self.part, [features, tokens], self.cache, rows)[0]

    def slots(self, state: DecodeState, plan: TreePlan | None) -> Slots:
        return FeatureSlots(self, self.catch_up(state), plan)

    def grown(self, state: DecodeState, plan: TreePlan | None) -> DraftTree | None:
        if self.one_call is None or plan is None or state.batch > 1 or not state.sampling.greedy:
            return None
        ((features, counts),) = self.pending.take(state.finished, self.cache)
        tokens = self.following(counts, state)[0]
        return grow_by_passes(self.one_call, self.lm_head, plan, features[0], tokens, self.cache)


class FeatureSlots(Slots):
    """Nodes scored by the features that the head predicts for them.

    Args:
        predicted: ``[B, 1, H]``, for the root. plan: the nodes of the draft; None: they follow from the scores.
    """

    def __init__(self, head: FeatureHead, predicted: Tensor, plan: TreePlan | None) -> None:
        self._head, self._predicted, self._plan = head, predicted, plan
        self._depth = 0
        self._see: Tensor | None = None  # [B, n, nodes so far]
        self._depths: list[Tensor] = []  # [1, n] of each level

    def logits(self, depth: int) -> Tensor:
        self._depth = depth
        logits, self.places, self.among = self._head.lm_head.scored(self._predicted)
        return logits

    def follow(self, tokens: Tensor, parents: Tensor) -> None:
        # The head takes a node's token and the feature predicted for its parent.
        if parents.dim() == 1:
            features = self._predicted[:, parents]
        else:
            features = self._predicted.gather(1, parents[..., None].expand(-1, -1, self._predicted.shape[-1]))
        rows = self._rows(parents) if self._plan is None else self._plan.levels[self._depth].rows
        self._predicted = self._head.extend(features, self._head.lm_head.tokens(tokens), rows)

    def _rows(self, parents: Tensor) -> Rows:
        """Mask and positions of nodes that follow ``parents [B, n]``."""
        count, device = parents.shape[1], parents.device
        own_see = torch.eye(count, dtype=torch.bool, device=device).expand(len(parents), -1, -1)
        if self._see is None:
            see = own_see
        else:
            inherited = self._see.gather(1, parents[..., None].expand(-1, -1, self._see.shape[-1]))
            see = torch.cat([inherited, own_see], dim=-1)
        self._see = see
        self._depths.append(torch.full((1, count), self._depth, device=device))
        return Rows(see, torch.cat(self._depths, dim=1), see.shape[-1] - count)


class EagleFeatures(FeatureHead):
    """EAGLE's head. Unshifted, a feature goes through the tree with its own token's embedding, because a node's token
    is its children's input."""

    def __init__(self, target: TargetModel, module: EagleHead, options: EagleOptions) -> None:
        lm_head, width = with_candidates(listed_head(target, module, options), module, options), target.hidden_size
        self.inputs, self._width = module.shape.inputs, width
        fc = target.runner.linear(module.fc) if module.shape.has_fc else None
        unshifted = self.inputs == UNSHIFTED
        if unshifted:
            lm_head.enter = lambda states: states[..., :width]

        def enter(states: Tensor, tokens: Tensor) -> Tensor:
            embeddings = states[..., width:] if unshifted else target.embed(tokens)
            return module.enter(states[..., :width], embeddings, fc)

        rotary = None if module.shape.layer == "target" else rope_of(module.config)
        part = target.runner.part(list(module.layers), enter, rotary=rotary)
        if options.draft_dtype is not None:
            quantize_layers(part, options.draft_dtype, *([] if fc is None else [fc]))
        super().__init__(target, module, part, lm_head)
        self.layer = target.config if module.shape.layer == "target" else module.config
        if self.inputs == SHIFTED:
            self.one_call = backend.head_pass(part, fc, lm_head.product, target.embedding)

    def read(self, features: Tensor, counts: list[int], state: DecodeState) -> Tensor:
        if self.inputs == UNSHIFTED:
            rows = zip(state.tokens, self.cache.lengths, counts, strict=True)
            ids = padded([tokens[start : start + count] for tokens, start, count in rows], self.target.device)
            features = torch.cat([features, self.target.embed(ids)], dim=-1)
        return super().read(features, counts, state)

    def extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        """As the base class; unshifted, features come with the embeddings of their tokens, ``[B, R, 2 H]``."""
        predicted = super().extend(features, tokens, rows)
        return predicted if self.inputs != UNSHIFTED else torch.cat([predicted, self.target.embed(tokens)], dim=-1)


class Eagle3Features(FeatureHead):
    """EAGLE-3's head: ``fc`` fuses the true states; predicted features are fed back as they are."""

    def __init__(self, target: TargetModel, module: Eagle3Head, options: Eagle3Options) -> None:
        lm_head, runner = with_candidates(own_head(target, module, options.draft_dtype), module, options), target.runner
        norm, shape = runner.norm(module.norm), module.shape
        if not shape.norm_output:
            lm_head.enter = norm

        def enter(features: Tensor, tokens: Tensor) -> Tensor:
            return torch.cat([target.embed(tokens), features], dim=-1)

        leave = norm if shape.norm_output else identity
        scopes = [Scope(shape.sliding_window)] * shape.layers
        part = runner.part(list(module.layers), enter, leave, rope_of(module.config), scopes)
        if options.draft_dtype is not None:
            quantize_layers(part, options.draft_dtype)
        super().__init__(target, module, part, lm_head)

    def read(self, features: Tensor, counts: list[int], state: DecodeState) -> Tensor:
        with model_time():
            features = self.module.fused(features)
        return super().read(features, counts, state)


def shaped(options: TreeOptions, head: FeatureHead, levels: int) -> tuple[Shaper, int]:
    """The shaper of an EAGLE head's drafts, and the cache slots that the head needs for one.

    Raises:
        ValueError: ``paths`` that are no tree.
    """
    top_k, device = min(options.top_k, head.lm_head.width), head.target.device
    if options.tree == "auto":
        return by_costs(options.nodes, levels, min(top_k, len(PRIOR)), options.acceptance), 0
    if options.tree == "dynamic":  # the head's cache also holds the extended nodes
        return Shaper(levels, options.nodes, top_k, grows=True), top_k * levels
    if options.tree == "chain":
        return planned(chain_plan(levels, device)), 0
    return planned(TreePlan(options.paths or EAGLE_TREE, device)), 0


class EagleDrafter(LearnedDrafter):
    """Drafts with an EAGLE head.

    Raises:
        ValueError: ``paths`` that are no tree, or a static tree with more children of a node than draft tokens.
    """

    name = "eagle"
    shape: ClassVar[type[EagleShape]] = EagleShape
    module_class = EagleHead
    options: ClassVar[type[Config]] = EagleOptions
    card_title = "EAGLE autoregression head ([EAGLE](https://arxiv.org/abs/2401.15077))"
    forms = EAGLE_FORMS
    max_batch = None
    follows = True
    unread: ClassVar = {"auto": ("paths",), "chain": ("paths",), "static": ("depth",), "dynamic": ("paths",)}

    def __init__(self, target: TargetModel, module: nn.Module, options: Any) -> None:
        super().__init__(target, module, options)
        head = EagleFeatures(target, self.module, options)  # type: ignore[arg-type]
        self.hold(head, *shaped(options, head, options.depth or DEPTHS[options.tree]))


class Eagle3Drafter(LearnedDrafter):
    """Drafts with an EAGLE-3 head.

    Raises:
        ValueError: ``paths`` that are no tree, or a d2t that is not increasing or points outside of the vocabulary.
    """

    name = "eagle3"
    shape: ClassVar[type[Eagle3Shape]] = Eagle3Shape
    module_class = Eagle3Head
    options: ClassVar[type[Config]] = Eagle3Options
    card_title = "EAGLE-3 head ([EAGLE-3](https://arxiv.org/abs/2503.01840))"
    forms = EAGLE3_FORMS
    max_batch = None
    follows = True
    unread = EagleDrafter.unread

    def __init__(self, target: TargetModel, module: nn.Module, options: Any) -> None:
        super().__init__(target, module, options)
        head = Eagle3Features(target, self.module, options)  # type: ignore[arg-type]
        trained = head.module.shape.trained_steps
        usual = DEPTHS[options.tree] if trained is None else min(DEPTHS[options.tree], trained)
        self.hold(head, *shaped(options, head, options.depth or usual))
        if trained is not None and self.shaper.depth > trained:
            less = f"paths of at most {trained}" if options.tree == "static" else f"depth={trained}"
            warnings.warn(
                f"drafts have {self.shaper.depth} levels, and the head was trained on {trained} steps: later ones are "
                f"accepted less often; compare with {less}",
                stacklevel=2,
            )
