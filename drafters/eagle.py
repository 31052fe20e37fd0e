"""EAGLE: a head that extrapolates the target's features, one decoder layer deep (Li et al. 2024; EAGLE-2's dynamic
tree).

At index i the head takes feature_i and the embedding of token_{i+1} and predicts feature_{i+1}, whose logits are
those of token_{i+2}: the token sampled at i + 1 is known, which resolves the feature's uncertainty (paper, section
3.1).
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig

from .base import LearnedDrafter
from .decoding.acceptance import Verdict
from .decoding.draft_tree import DraftTree
from .decoding.loop import DecodeState, last_of, padded
from .drafting.tree_plan import EAGLE_TREE, TreePlan, grow_dynamic, grow_static
from .model.draft_head import DraftHeadOptions, quantize_layers
from .model.kv_cache import KVCache
from .model.layers import check_head, layer_kind, made
from .model.rows import CHAIN, Rows
from .model.target import FeatureOutput, TargetModel


class EagleHead(nn.Module):
    """``fc`` over cat(embedding, feature), then one decoder layer of the target's kind without its input layernorm.

    No final norm; the embedding and the LM head are the target's. Parameter names are those of the released
    checkpoints.

    Raises:
        ValueError: no head can be made of the target's kind of layers.
    """

    inputs = 2  # hidden states that it takes

    def __init__(self, target_config: PretrainedConfig) -> None:
        super().__init__()
        kind = layer_kind(target_config)
        config: Any = kind.config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        layer: Any = made(config, kind.decoder_layer, config, layer_idx=0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        self.rotary_emb = kind.rotary(config)  # type: ignore[call-arg, arg-type]
        for weights in self.parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)
        check_head(self, config)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Features ``[B, T, H]`` and the next tokens' embeddings ``[B, T, H]`` -> predicted next features ``[B, T,
        H]``.

        ``attention_mask`` is bool ``[B, 1, T, S]``; None is causal.
        """
        hidden = self.fc(torch.cat([embeddings, features], dim=-1))
        return self.layers[0](
            hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(hidden, position_ids),
            past_key_values=cache,
            use_cache=cache is not None,
        )


class EagleOptions(DraftHeadOptions):
    """``tree``: chain and dynamic are ``depth`` deep, by default 5 and 6; static is the paper's tree of Figure 9 unless
    ``paths`` says else.

    ``top_k``: children considered a node, and nodes extended a level, of the dynamic tree; ``nodes``: how many it
    keeps. ``paths``: a static tree as paths of child ranks, for example ``[[0], [1], [0, 0]]``.

    The dynamic tree's defaults are those of EAGLE-2's released evaluation. What it calls depth 5 are levels after the
    root's own children, so 6 in all, and its 60 tokens count the root.
    """

    tree: Literal["chain", "static", "dynamic"] = "dynamic"
    depth: int | None = Field(default=None, ge=1)
    top_k: int = Field(default=10, ge=1)
    nodes: int = Field(default=59, ge=1)
    paths: list[list[int]] | None = None


DEPTHS = {"chain": 5, "static": 5, "dynamic": 6}


class EagleDrafter(LearnedDrafter):
    """Drafts a chain, the paper's static tree, or EAGLE-2's dynamic tree.

    Raises:
        ValueError: ``paths`` that are no tree.
    """

    name = "eagle"
    options = EagleOptions
    max_batch = None

    def __init__(self, target: TargetModel, module: EagleHead, options: EagleOptions) -> None:
        super().__init__(target, module, options)
        self.lm_head = self.draft_head(options)
        self.tree, self.top_k, self.nodes = options.tree, min(options.top_k, self.lm_head.width), options.nodes
        self.depth, self._own_depth = options.depth or DEPTHS[self.tree], options.depth
        self.paths = None if self.tree == "chain" else options.paths
        chain = [[0] * level for level in range(1, self.depth + 1)]
        self.plan = TreePlan(chain if self.tree == "chain" else self.paths or EAGLE_TREE, target.device)
        # The head's cache also holds the forwarded nodes of the levels before the last.
        dynamic = max(self.nodes, self.top_k * self.depth)
        self.max_draft = dynamic if self.tree == "dynamic" else self.plan.size
        head: Any = self.module
        fc = target.runner.linear(head.fc)
        self._head = target.runner.part(
            head.layers, lambda features, tokens: fc(torch.cat([target.embed(tokens), features], dim=-1))
        )
        if options.draft_dtype is not None:
            quantize_layers(self._head, options.draft_dtype, fc)
        self._cache = KVCache.nothing()
        self._features: Tensor  # [B, R, H] true features that the head has not taken in yet
        self._counts: list[int]  # how many of them each row has, the rest being filling

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        return EagleHead(target_config)

    def drafter_config(self) -> dict[str, Any]:
        options: dict[str, Any] = {"tree": self.tree, "top_k": self.top_k, "nodes": self.nodes}
        # A default depth is the tree's own: saved, it would be another tree's, too, that is asked for at loading.
        options |= {} if self._own_depth is None else {"depth": self._own_depth}
        return options | ({"paths": self.paths} if self.paths else {}) | self.lm_head.options()

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        target, batch = self.target, state.batch
        self._cache.release()  # so that its memory can be taken again
        self._cache = target.new_cache(batch, state.cache.capacity, layers=1)
        prompts = [tokens[1:length] for tokens, length in zip(state.tokens, state.prompt_lengths, strict=True)]
        if any(prompts):
            self._extend(output.features[:, :-1], padded(prompts, target.device))
            self._cache.commit_first([len(prompt) for prompt in prompts])
        self._features = last_of(output.features, state.prompt_lengths)[:, None]
        self._counts = [1] * batch

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        whole, features, counts = self._cache, self._features, self._counts
        self._cache = KVCache.nothing()
        self.begin(part, output)
        for number, row in enumerate(rows):
            whole.copy_row(row, self._cache, number)
            features[row, 0], counts[row] = self._features[number, 0], 1
        self._cache.release()
        self._cache, self._features, self._counts = whole, features[:, : max(counts)], counts

    def propose(self, state: DecodeState) -> DraftTree:
        # Re-ingest what was committed, with true features: (feature_i, token_{i+1}) up to the root.
        pairs = zip(state.tokens, self._counts, strict=True)
        tokens = padded([row[len(row) - count :] for row, count in pairs], self.target.device)
        predicted = last_of(self._extend(self._features, tokens), self._counts)[:, None]
        self._cache.commit_first(self._counts)
        depth = state.longest_draft(self.depth)
        if depth < 1:
            return DraftTree.empty(state.batch, self.target.device)
        head = self.lm_head
        if self.tree == "dynamic":
            draft = grow_dynamic(predicted, self._extend_tree, head, depth, self.top_k, self.nodes)
        else:
            draft = grow_static(predicted, self._extend_tree, head, self.plan, state.sampling, state.generator)
        draft.tokens, draft.q = head.tokens(draft.tokens), None if draft.q is None else head.spread(draft.q)
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        self._counts = [len(rows) for rows in verdict.rows]  # none for a finished row
        rows = padded(verdict.rows, output.features.device)[..., None]
        self._features = output.features.gather(1, rows.expand(-1, -1, output.features.shape[2]))

    def _extend_tree(self, features: Tensor, places: Tensor, rows: Rows) -> Tensor:
        """``_extend`` by nodes of a tree that grows of places among the LM head's logits."""
        return self._extend(features, self.lm_head.tokens(places), rows)

    def _extend(self, features: Tensor, tokens: Tensor, rows: Rows = CHAIN) -> Tensor:
        """Run the head over rows ``[B, R]``; predicted features ``[B, R, H]``."""
        return self.target.runner.run(self._head, [features, tokens], self._cache, rows)[0]
