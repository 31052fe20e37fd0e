"""Kangaroo: draft with the target's shallow layers and a trained adapter, with double early exit (Liu et al. 2024).

Verification resumes at ``exit_layer`` and reuses the hidden states, keys and values of the shallow layers. The paper
drafts greedy chains; trees and sampled drafts are added here.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.config import DraftSize, Layers
from drafters.drafting.tree_plan import TreePlan, check_children, children_of
from drafters.hub.declared import Layout, Recipe
from drafters.learned import LearnedDrafter
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree, tree_mask
from drafters.model.cache import KVCache
from drafters.model.check import check_parts
from drafters.model.draft_head import DraftHeadOptions, quantize_layers
from drafters.model.layers import AttentionLayer, check_head, layer_kind, made
from drafters.model.rows import CHAIN, Rows
from drafters.model.target import FeatureOutput, TargetModel


class KangarooAdapter(nn.Module):
    """``norm(x + Attention(RMSNorm(x)))``: 4 H^2 + 2 H parameters with as many key and value heads as query heads.

    Parameter names are those of the released checkpoints.

    Args:
        ffn: use a whole decoder layer, with its MLP (an ablation in Table 2).
        own_lm_head: use an LM head of its own instead of the target's (an ablation in Table 2).

    Raises:
        ValueError: no adapter can be made from the target's kind of layers.
    """

    inputs = 1  # number of hidden states that ``forward`` takes

    def __init__(self, target_config: PretrainedConfig, ffn: bool = False, own_lm_head: bool = False) -> None:
        super().__init__()
        kind = layer_kind(target_config)
        config: Any = kind.config
        layer: Any = made(config, kind.decoder_layer, config, layer_idx=0) if ffn else AttentionLayer(kind)
        self.layers = nn.ModuleList([layer])
        self.norm = kind.norm(config.hidden_size, eps=kind.eps)
        self.rotary_emb = kind.rotary(config)
        for weights in layer.parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)
        if own_lm_head:
            self.lm_head = nn.Linear(config.hidden_size, target_config.vocab_size, bias=False)
        check_head(self, config)

    def forward(
        self, hidden: Tensor, position_ids: Tensor, attention_mask: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Hidden states ``[B, T, H]`` after ``exit_layer`` -> states for the LM head ``[B, T, H]``.

        Like the target's, the state at index i predicts token i + 1.

        Args:
            attention_mask: bool ``[B, 1, T, S]``; None is causal.
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
    """Options.

    ``exit_layer``: number of the target's shallow layers that draft.
    ``ffn``, ``own_lm_head``: parts of the adapter, see ``KangarooAdapter``.
    ``eta``: drafting stops after a token whose confidence is not above eta; 0 never stops early.
    ``confidence``: top1 is the adapter's highest probability (the paper's); entropy is exp(-entropy) of its
    distribution, which is also 1/n for n equally likely tokens.
    ``max_draft_tokens``: most levels of a draft.
    ``paths``: draft a tree, each node given by the ranks of its ancestors and itself among their siblings, for example
    ``[[0], [1], [0, 0]]``; the confidence of its likeliest path decides when drafting stops. Null drafts a chain.
    """

    exit_layer: Layers = Field(ge=1)
    ffn: bool = False
    own_lm_head: bool = False
    eta: float = Field(default=0.4, ge=0.0, lt=1.0)
    confidence: Literal["top1", "entropy"] = "top1"
    max_draft_tokens: DraftSize = Field(default=6, ge=1)
    paths: list[list[DraftSize]] | None = None


class KangarooDrafter(LearnedDrafter):
    """Drafts with double early exit: from the layers at ``exit_layer``, and from drafting after an uncertain token.

    Raises:
        ValueError: ``exit_layer`` is not below the target's number of layers, or ``paths`` are no tree.
    """

    name = "kangaroo"
    options = KangarooOptions
    card_title = "Kangaroo adapter ([Kangaroo](https://arxiv.org/abs/2404.18911))"
    layout = Layout(
        "a Kangaroo adapter",
        tensors={"layers.0.input_layernorm.weight": "H", "norm.weight": "H"},
        code="python -m evaluation.inference_kangaroo --model-path {target} --adapter-path {out} "
        "--exitlayer {exit_layer} --threshold 0.6 --steps 6 --dtype float16 --bench-name Kangaroo --model-id kangaroo",
        note="With another --exitlayer than {exit_layer} it drafts nonsense. The code reads only `pytorch_model.bin` "
        "(plain tensors here), and the LM head of a target whose weights are in several such files.",
        readers=("official",),
        options={"ffn": False, "own_lm_head": False},
        pickled=True,
        rope_theta=10000.0,
    )
    recipe = Recipe(
        learning_rate=5.0e-5,
        rows={"Kangaroo": {}},
        knobs={"eta": [0.2, 0.4, 0.6, 0.8], "max_draft_tokens": [2, 4, 6]},
        start={"max_draft_tokens": 4},
    )

    def __init__(self, target: TargetModel, module: KangarooAdapter, options: KangarooOptions) -> None:
        super().__init__(target, module, options)
        self.given, self.exit_layer, self.max_draft_tokens = options, options.exit_layer, options.max_draft_tokens
        if self.exit_layer >= target.num_layers:
            most = target.num_layers - 1
            raise ValueError(f"exit_layer must be between 1 and {most} for {target.name}, found {self.exit_layer}")
        check_parts(target, self.exit_layer)
        chain = [[0] * level for level in range(1, self.max_draft_tokens + 1)]
        self.plan = TreePlan(options.paths or chain, target.device)
        self._rows = list(_rows_by_level(self.plan, target.device))
        self._inner = {node + 1: place for place, node in enumerate(self.plan.inner)}  # row -> its adapter row
        self.max_draft, self.taps = self.plan.size, (self.exit_layer,)
        adapter: Any = self.module
        self._adapter = target.runner.part(adapter.layers, leave=target.runner.norm(adapter.norm))
        self.lm_head = self.draft_head(options, getattr(adapter, "lm_head", None))
        check_children(self.plan, self.lm_head.width)
        if options.draft_dtype is not None:
            quantize_layers(self._adapter, options.draft_dtype)
        self._cache = KVCache.nothing()
        self._unread: Tensor  # [1, R, H] accepted exit states that the adapter has not read
        self._nodes_read = 0  # inner nodes of the latest draft that the adapter has read

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        parts = {key: drafter_config.get(key, False) for key in ("ffn", "own_lm_head")}
        return KangarooAdapter(target_config, **parts)

    def drafter_config(self) -> dict[str, Any]:
        given = self.given.model_dump(exclude=set(DraftHeadOptions.model_fields), exclude_defaults=True)
        kept = {"exit_layer": self.exit_layer, "eta": self.given.eta, "max_draft_tokens": self.max_draft_tokens}
        return given | kept | self.lm_head.options()

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        self._cache.release()  # frees the memory before the new cache takes its own
        self._cache = self.target.new_cache(1, state.cache.capacity, layers=1)
        prompt = output.taps[self.exit_layer]
        self._adapt(prompt)
        self._cache.commit_first([prompt.shape[1]])
        self._unread = prompt[:, :0]
        self.lm_head.read(state.tokens)

    def propose(self, state: DecodeState) -> DraftTree:
        self.lm_head.read(state.tokens)
        # The shallow layers read the root; the adapter reads the last accepted exit states, and the root's.
        states = [self.target.shallow(state.roots, state.cache, self.exit_layer, CHAIN)]
        rows = torch.cat([self._unread, states[0]], dim=1)
        adapted = self._adapt(rows)[:, -1:]
        self._cache.commit_first([rows.shape[1]])
        self._nodes_read = 0
        # Draft level by level, until the adapter is uncertain.
        tokens: list[Tensor] = []
        valid: list[Tensor] = []
        q: list[Tensor] = []
        depth = min(self.max_draft_tokens, state.room() - 1)
        for level, shallow_rows in zip(self.plan.levels[:depth], self._rows, strict=False):
            logits = self.lm_head(adapted)  # [1, R, W]
            children, real = children_of(logits, level.children, state.sampling, state.generator, q)
            tokens.append(self.lm_head.tokens(children[:, level.parent_row, level.rank]))
            if real is not None:
                valid.append(real[:, level.parent_row, level.rank])
            states.append(self.target.shallow(tokens[-1], state.cache, self.exit_layer, shallow_rows))
            if len(tokens) == depth or not len(level.inner) or self._uncertain(logits[:, 0]):
                break
            adapted = self._adapt(states[-1][:, level.inner], level.rows)
            self._nodes_read += len(level.inner)
        return self._draft(states, tokens, valid, q)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        accepted = verdict.rows[0][1:]  # the adapter has read the root
        read = [place for row in accepted if (place := self._inner.get(row, self._nodes_read)) < self._nodes_read]
        self._cache.commit([read])
        assert draft.extra.hidden is not None
        self._unread = draft.extra.hidden[:, accepted[len(read) :]]

    def _draft(self, states: list[Tensor], tokens: list[Tensor], valid: list[Tensor], q: list[Tensor]) -> DraftTree:
        """The draft of the levels' tokens; verification resumes from ``states``."""
        whole = torch.cat([*tokens, states[0].new_zeros(1, 0, dtype=torch.long)], 1)
        draft = DraftTree.from_parents(
            whole,
            self.plan.parents[: whole.shape[1]],
            q=self.lm_head.spread(torch.cat(q, 1)) if q else None,
            q_row=self.plan.q_row[: whole.shape[1]],
            valid=torch.cat(valid, 1) if valid else None,
        )
        draft.extra.hidden, draft.extra.resume_layer = torch.cat(states, dim=1), self.exit_layer
        return draft

    def _uncertain(self, logits: Tensor) -> bool:
        """The second early exit. It copies one value per level to the host, because the next level depends on it."""
        if self.given.eta == 0:
            return False
        if self.given.confidence == "top1":
            confidence = logits.float().softmax(-1).amax()
        else:
            log_q = logits.float().log_softmax(-1)
            confidence = (log_q.exp() * log_q).nan_to_num(0.0).sum().exp()  # 0 log 0 is 0
        return confidence.item() <= self.given.eta

    def _adapt(self, states: Tensor, rows: Rows = CHAIN) -> Tensor:
        """Run the adapter over exit states ``[1, R, H]``: states for ``lm_head``, ``[1, R, H]``."""
        return self.target.runner.run(self._adapter, [states], self._cache, rows)[0]


def _rows_by_level(plan: TreePlan, device: torch.device) -> Iterator[Rows]:
    """Per level, mask and positions of its nodes for the shallow layers, which read all nodes."""
    (see, depths), first = tree_mask(plan.parents, device), 1
    for level in plan.levels:
        last = first + len(level.rank)
        yield Rows(offset=first) if plan.is_chain else Rows(see[:, first:last, :last], depths[:, :last], first)
        first = last
