"""EAGLE: a head of one decoder layer extrapolates the target's features (Li et al. 2024; EAGLE-2's dynamic tree).

At index i the head takes feature_i and the embedding of token_{i+1} and predicts feature_{i+1}, whose logits are
those of token_{i+2}: the token sampled at i + 1 is known, which resolves the feature's uncertainty (paper, section
3.1). The paper's other inputs (Figure 8) are a head's ``inputs``, to compare with.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.config import SHIFTED, UNSHIFTED, Config, DraftSize, HeadInputs, HeadLayer
from drafters.drafting.passes import grow_by_passes
from drafters.drafting.pending import PendingFeatures, StateReader
from drafters.drafting.tree_plan import EAGLE_TREE, TreePlan, check_children, grow_dynamic, grow_static, tree_plan
from drafters.hub.declared import MLP, Layout, Recipe
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState, last_of, padded
from drafters.loop.tree import DraftTree
from drafters.model import backend
from drafters.model.cache import KVCache
from drafters.model.draft_head import DraftHeadOptions, quantize_layers
from drafters.model.layers import SERVED, check_head, layer_config, layer_kind, made, own_rope
from drafters.model.rows import CHAIN, Rows
from drafters.model.runner import Part
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.shape import PRIOR, Probability, ShapePolicy, Way


class EagleHead(nn.Module):
    """``fc`` over cat(embedding, feature), then a decoder layer, the target's or Llama's, without its input layernorm.

    No final norm; the embedding and the LM head are the target's. Parameter names are those of the released
    checkpoints. A head with one input only (token or feature) has no fc. ``bias``: of fc, as released heads for Vicuna
    and Llama 2 have one.

    Raises:
        ValueError: no head can be made of the target's kind of layers.
    """

    inputs = 2  # hidden states that it takes

    def __init__(
        self,
        target_config: PretrainedConfig,
        reads: HeadInputs = SHIFTED,
        bias: bool = False,
        layer: HeadLayer = "target",
    ) -> None:
        super().__init__()
        kind = layer_kind(target_config, layer)
        config: Any = kind.config
        self.reads, self.layer = reads, layer
        if reads in (SHIFTED, UNSHIFTED):
            self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        decoder: Any = made(config, kind.decoder_layer, config, layer_idx=0)
        decoder.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([decoder])
        self.rotary_emb = kind.rotary(config)  # type: ignore[call-arg, arg-type]
        for name, weights in self.named_parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)
            elif name == "fc.bias":
                nn.init.zeros_(weights)
        check_head(self, config)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Features ``[B, T, H]`` and the next tokens' embeddings ``[B, T, H]`` (unshifted: those tokens' own) ->
        predicted next features ``[B, T, H]``.

        ``attention_mask`` is bool ``[B, 1, T, S]``; None is causal.
        """
        hidden = self.enter(features, embeddings, getattr(self, "fc", None))
        return self.layers[0](
            hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(hidden, position_ids),
            past_key_values=cache,
            use_cache=cache is not None,
        )

    def enter(self, features: Tensor, embeddings: Tensor, fc: Callable[[Tensor], Tensor] | None) -> Tensor:
        """What the layer reads, ``[B, T, H]``."""
        if fc is not None:
            return fc(torch.cat([embeddings, features], dim=-1))
        return embeddings if self.reads == "token" else features


DEPTHS = {"auto": 8, "chain": 5, "static": 5, "dynamic": 6}


class TreeOptions(Config):
    """Shape of the drafts of an EAGLE head.

    ``tree``: chain; static (the paper's Figure 9, or ``paths``); dynamic (EAGLE-2); auto: the chain or static tree of
    most expected tokens per second on this machine, or no draft where none is profitable.
    ``depth``: levels; by default 5 (chain), 6 (dynamic), at most 8 (auto).
    ``nodes``, ``top_k``: of the dynamic tree, the nodes kept, and the children per node and nodes extended per level;
    of auto, the most. Defaults: EAGLE-2's evaluation, whose depth 5 leaves out the root's children.
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

    @property
    def levels(self) -> int:
        """Levels of a draft: ``depth``, or its default."""
        return self.depth or DEPTHS[self.tree]


class EagleOptions(TreeOptions, DraftHeadOptions):
    """Options of the EAGLE drafter.

    ``inputs``: what the head was trained to read; engines and released checkpoints know only the default. ``fc_bias``:
    its fc has a bias. ``layer``: the kind of its decoder layer.
    """

    inputs: HeadInputs = SHIFTED
    fc_bias: bool = False
    layer: HeadLayer = "target"


class EagleDrafter(StateReader):
    """Drafts a chain, a static tree, EAGLE-2's dynamic tree, or what the policy chooses.

    Raises:
        ValueError: ``paths`` that are no tree, or a static tree with more children of a node than draft tokens.
    """

    name = "eagle"
    options: ClassVar[type[Config]] = EagleOptions
    card_title = "EAGLE autoregression head ([EAGLE](https://arxiv.org/abs/2401.15077))"
    layout = Layout(
        "an EAGLE head",
        tensors={"fc.weight": "H 2H", **MLP},
        code="EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{out}', use_eagle3=False)",
        note="It reads the embedding from a target in several files (with an index), and fails for a single file.",
        readers=("official", "vllm", "sglang"),
        families=SERVED,
        options={"inputs": SHIFTED},
        bias="fc.bias",
    )
    recipe: ClassVar[Recipe | None] = Recipe(
        learning_rate=3.0e-5,
        rows={"EAGLE, auto": {"tree": "auto"}, "EAGLE, chain of 3": {"tree": "chain", "depth": 3}},
        small={"start": "regression"},
        short={"loss_vocab": 2048},
        certified={"tree": "chain", "depth": 3},
    )
    max_batch = None
    follows = True
    unread = {"auto": ("paths",), "chain": ("paths",), "static": ("depth",), "dynamic": ("paths",)}
    policy: ShapePolicy | None = None
    inputs: HeadInputs = SHIFTED

    def __init__(self, target: TargetModel, module: nn.Module, options: Any) -> None:
        super().__init__(target, module, options)
        self.given = options
        self.lm_head = self.draft_head(options)
        self.tree, self.top_k = options.tree, min(options.top_k, self.lm_head.width)
        self._layer = layer_config(target.config, cast(Any, module).layer)
        self._one_call: Any = None  # a pass of the head over a draft of one sequence
        self.depth = options.levels
        chain = [[0] * level for level in range(1, self.depth + 1)]
        self.plan = TreePlan(chain if self.tree == "chain" else options.paths or EAGLE_TREE, target.device)
        self.max_draft = self.plan.size
        if self.tree == "static":
            check_children(self.plan, self.lm_head.width)
        if self.tree == "dynamic":  # the head's cache also holds the extended nodes
            self.max_draft = max(options.nodes, self.top_k * self.depth)
        if self.tree == "auto":
            self.policy = ShapePolicy(options.nodes, self.depth, min(self.top_k, len(PRIOR)), options.acceptance)
            self.max_draft = options.nodes
        self._head = self._make_head(options)

    def _make_head(self, options: Any) -> Part:
        self.inputs = options.inputs
        target, head, unshifted = self.target, cast(Any, self.module), self.inputs == UNSHIFTED
        fc, width = target.runner.linear(head.fc) if hasattr(head, "fc") else None, target.hidden_size
        # Unshifted, a feature goes through the tree with its own token's embedding, because a node's token is its
        # children's input.
        if unshifted:
            self.lm_head.enter = lambda states: states[..., :width]

        def enter(states: Tensor, tokens: Tensor) -> Tensor:
            embeddings = states[..., width:] if unshifted else target.embed(tokens)
            return head.enter(states[..., :width], embeddings, fc)

        part = target.runner.part(head.layers, enter, rotary=own_rope(head, target.config))
        if options.draft_dtype is not None:
            quantize_layers(part, options.draft_dtype, *([] if fc is None else [fc]))
        if self.inputs == SHIFTED:
            self._one_call = backend.head_pass(part, fc, self.lm_head.product, target.embedding)
        return part

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        names = {"inputs": "reads", "fc_bias": "bias", "layer": "layer"}
        return EagleHead(target_config, **{names[key]: value for key, value in drafter_config.items() if key in names})

    def drafter_config(self) -> dict[str, Any]:
        # A default depth is not stored: another tree, chosen at loading, has another default.
        given = self.given.model_dump(exclude=set(DraftHeadOptions.model_fields), exclude_defaults=True)
        options = {"tree": self.tree, "top_k": self.top_k, "nodes": self.given.nodes, "layer": self.module.layer}
        return given | options | self.lm_head.options()

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self.lm_head.read(state.tokens)

    def _read_prompts(self, state: DecodeState, output: FeatureOutput) -> None:
        """Put the prompts' rows into a new cache, all but the last of each, whose features are pending."""
        layers, features = len(cast(Any, self.module).layers), self.true_features(output)
        self._cache = self.target.new_cache(state.batch, state.cache.capacity, layers, self._layer)
        self._pending = PendingFeatures(features, state.prompt_lengths)
        prompts = [tokens[1:length] for tokens, length in zip(state.tokens, state.prompt_lengths, strict=True)]
        if any(prompts):
            self._read(features[:, :-1], prompts, state)

    def propose(self, state: DecodeState) -> DraftTree:
        depth, head = state.longest_draft(self.depth), self.lm_head
        if self.policy is not None:
            self.plan = tree_plan(self.policy.paths(state), self.target.device)
        if depth < 1 or not self.plan.size:
            return state.nothing
        head.read(state.tokens)
        state.empty_finished(self._cache)
        pending = self._pending.take(state.finished, self._cache)
        if self._one_call is not None and state.batch == 1 and state.sampling.greedy and self.tree != "dynamic":
            ((features, (count,)),) = pending
            return grow_by_passes(self._one_call, head, self.plan, features[0], state.tokens[0][-count:], self._cache)
        for features, counts in pending:
            rows = zip(state.tokens, self._cache.lengths, counts, strict=True)
            following = [tokens[known + 1 : known + 1 + count] for tokens, known, count in rows]
            predicted = self._read(features, following, state)  # [B, 1, H]

        def extend(features: Tensor, places: Tensor, rows: Rows) -> Tensor:
            return self._extend(features, head.tokens(places), rows)

        if self.tree == "dynamic":
            draft = grow_dynamic(predicted, extend, head, depth, self.top_k, self.given.nodes)
        else:
            draft = grow_static(predicted, extend, head, self.plan, state.sampling, state.generator)
        draft.tokens, draft.q = head.tokens(draft.tokens), None if draft.q is None else head.spread(draft.q)
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        self._pending.add(self.true_features(output), verdict)
        if self.policy is not None:
            self.policy.learn(self.plan, draft.size, state, verdict)

    def _read(self, features: Tensor, following: list[list[int]], state: DecodeState) -> Tensor:
        """Take in true features ``[B, R, H]`` and the token after each; returns the predicted next ``[B, 1, H]``."""
        counts, device = list(map(len, following)), self.target.device
        if self.inputs == UNSHIFTED:
            rows = zip(state.tokens, self._cache.lengths, counts, strict=True)
            own = padded([tokens[start : start + count] for tokens, start, count in rows], device)
            features = torch.cat([features, self.target.embed(own)], dim=-1)
        predicted = self._extend(features, padded(following, device))
        self._cache.commit_first(counts)
        return last_of(predicted, counts)[:, None]

    def _extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        """Run the head over rows ``[B, R]``; predicted features ``[B, R, H]``, unshifted with the rows' embeddings."""
        predicted = self.target.runner.run(self._head, [features, tokens], self._cache, rows)[0]
        if self.inputs != UNSHIFTED:
            return predicted
        return torch.cat([predicted, self.target.embed(tokens)], dim=-1)
