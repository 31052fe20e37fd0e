"""Kangaroo: draft with the target's own shallow layers and a trained adapter, exit early twice (Liu et al. 2024).

The shallow layers' hidden states and keys/values are reused: verification resumes at ``exit_layer``.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig

from .base import LearnedDrafter
from .decoding.acceptance import Verdict
from .decoding.draft_tree import DraftTree
from .decoding.loop import DecodeState
from .model.draft_head import DraftHeadOptions, quantize_layers
from .model.kv_cache import KVCache
from .model.layers import AttentionLayer, check_head, layer_kind
from .model.rows import Rows
from .model.target import FeatureOutput, TargetModel


class KangarooAdapter(nn.Module):
    """``norm(x + Attention(RMSNorm(x)))``: 4 H^2 + 2 H parameters where keys and values have as many heads as queries.

    Parameter names are those of the released checkpoints.

    Raises:
        ValueError: no adapter can be made of the target's kind of layers.
    """

    inputs = 1  # hidden states that it takes

    def __init__(self, target_config: PretrainedConfig) -> None:
        super().__init__()
        kind = layer_kind(target_config)
        config: Any = kind.config
        layer = AttentionLayer(kind)
        self.layers = nn.ModuleList([layer])
        self.norm = kind.norm(config.hidden_size, eps=kind.eps)
        self.rotary_emb = kind.rotary(config)
        for weights in layer.self_attn.parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)
        check_head(self, config)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Hidden states ``[B, T, H]`` after ``exit_layer`` -> states for the LM head ``[B, T, H]``.

        At index i the LM head's logits are of token i + 1, as the target's own are. ``attention_mask`` is bool
        ``[B, 1, T, S]``; None is causal.
        """
        after = self.layers[0](
            hidden,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(hidden, position_ids),
            past_key_values=cache,
        )
        return self.norm(after)


class KangarooOptions(DraftHeadOptions):
    """``eta``: drafting stops after a token whose top-1 probability is eta or less; 0 never stops early."""

    exit_layer: int = Field(ge=1)
    eta: float = Field(default=0.4, ge=0.0, lt=1.0)
    max_draft_tokens: int = Field(default=6, ge=1)


class KangarooDrafter(LearnedDrafter):
    """Double early exit: from the layers at ``exit_layer``, from drafting at the first uncertain token.

    Raises:
        ValueError: ``exit_layer`` is not below the target's number of layers.
    """

    name = "kangaroo"
    options = KangarooOptions

    def __init__(self, target: TargetModel, module: KangarooAdapter, options: KangarooOptions) -> None:
        super().__init__(target, module, options)
        self.exit_layer, self.eta, self.max_draft_tokens = options.exit_layer, options.eta, options.max_draft_tokens
        if self.exit_layer >= target.num_layers:
            raise ValueError(
                f"exit_layer must be between 1 and {target.num_layers - 1}, the layers of {target.name} less one, "
                f"found {self.exit_layer}"
            )
        self.max_draft, self.taps = self.max_draft_tokens, (self.exit_layer,)
        adapter: Any = self.module
        self._adapter = target.runner.part(adapter.layers, leave=target.runner.norm(adapter.norm))
        self.lm_head = self.draft_head(options)
        if options.draft_dtype is not None:
            quantize_layers(self._adapter, options.draft_dtype)
        self._cache = KVCache.nothing()
        self._behind: Tensor  # [1, R, H] accepted exit states that the adapter has not taken in yet

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        return KangarooAdapter(target_config)

    def drafter_config(self) -> dict[str, Any]:
        options = {"exit_layer": self.exit_layer, "eta": self.eta, "max_draft_tokens": self.max_draft_tokens}
        return options | self.lm_head.options()

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self._cache.release()  # so that its memory can be taken again
        self._cache = self.target.new_cache(1, state.cache.capacity, layers=1)
        prompt = output.taps[self.exit_layer]
        self._adapt(prompt)
        self._behind = prompt[:, :0]

    def propose(self, state: DecodeState) -> DraftTree:
        limit = min(self.max_draft_tokens, state.room() - 1)
        states = [self._shallow(state, state.roots, 0)]
        tokens: list[Tensor] = []
        q: list[Tensor] = []
        rows = torch.cat([self._behind, states[0]], dim=1)
        while len(tokens) < limit:
            logits = self._adapt(rows)
            tokens.append(self.lm_head.tokens(state.sampling.pick(logits, state.generator, q))[:, None])
            states.append(self._shallow(state, tokens[-1], len(tokens)))
            rows = states[-1]
            # The second early exit reads one value a draft token: what is drafted next depends on it.
            if self.eta > 0 and logits.float().softmax(-1).amax().item() <= self.eta:
                break
        spread = self.lm_head.spread(torch.stack(q, 1)) if q else None
        draft = DraftTree.chain(torch.cat(tokens, 1), spread) if tokens else DraftTree.empty(1, self.target.device)
        draft.hidden, draft.resume_layer = torch.cat(states, dim=1), self.exit_layer
        return draft

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        known = len(state.tokens[0]) - 1  # exit states there are, one a token but the new root
        assert draft.hidden is not None
        self._cache.crop([min(self._cache.lengths[0], known)])
        missing = known - self._cache.lengths[0]
        accepted = draft.hidden[:, : len(verdict.rows[0])]
        self._behind = accepted[:, accepted.shape[1] - missing :]

    def _shallow(self, state: DecodeState, tokens: Tensor, offset: int) -> Tensor:
        """Exit states ``[1, 1, H]`` of one more row, its keys and values left in the target's cache."""
        return self.target.shallow(tokens, state.cache, self.exit_layer, Rows(offset=offset))

    def _adapt(self, rows: Tensor) -> Tensor:
        """Run the adapter over exit states ``[1, R, H]`` and keep their rows; logits of ``lm_head`` after the last."""
        output, _ = self.target.runner.run(self._adapter, [rows], self._cache)
        self._cache.commit_first([rows.shape[1]])
        return self.lm_head(output[:, -1])
