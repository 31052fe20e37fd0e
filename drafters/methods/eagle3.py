"""EAGLE-3: a head that reads three of the target's hidden states and is trained on its own steps (Li et al. 2025).

States after a few, half and nearly all of the target's layers are concatenated, and ``fc`` makes a feature of them. The
draft layer's attention reads cat(norm(embedding of token_{i+1}), norm(feature_i)); its output, about token_{i+2}, goes
through the head's own norm and LM head, and is the feature of the next step (paper, section 3.1, Figure 5). EAGLE-3.1
norms each state before ``fc``, and feeds back the output after the norm. Drafting is EAGLE's: a chain, or a tree.
"""

import warnings
from typing import Any, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.config import DraftLayer, DraftSize, Layers, LayerShape, Length, Vocabulary
from drafters.hub.declared import READERS, Layout, Recipe
from drafters.loop.state import DecodeState
from drafters.methods.eagle import EagleDrafter, TreeOptions
from drafters.model.cache import KVCache
from drafters.model.draft_head import D2T, DraftHead, quantize_layers
from drafters.model.layers import LayerKind, layer_kind, made, rope_of
from drafters.model.runner import Part, identity, model_time
from drafters.model.target import TargetModel


class Eagle3Layer(nn.Module):
    """A Llama or Qwen3 layer whose attention reads an embedding beside the feature: ``[..., 2 H]`` -> ``[..., H]``.

    Attributes:
        norm_before_residual: the residual is the feature after ``hidden_norm``, not before it.
    """

    def __init__(self, kind: LayerKind, norm_before_residual: bool) -> None:
        super().__init__()
        config: Any = kind.config
        layer: Any = made(config, kind.decoder_layer, config, layer_idx=0)
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, nn.Linear(2 * config.hidden_size, outputs, bias=False))
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.hidden_norm = made(config, kind.norm, config.hidden_size, eps=kind.eps)
        self.norm_before_residual = norm_before_residual

    def forward(self, hidden: Tensor, use_cache: bool = False, **given: Any) -> Tensor:
        """The other arguments are those of the decoder layers of transformers."""
        embedding, feature = hidden.chunk(2, dim=-1)
        normed = self.hidden_norm(feature)
        residual = normed if self.norm_before_residual else feature
        both = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        hidden = residual + self.self_attn(hidden_states=both, **given)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(nn.Module):
    """``fc`` over the target's states, a layer that reads embeddings too, a norm, and an LM head.

    Parameter names are those that engines load. The embedding is the target's. The options are ``Eagle3Options``'.

    Raises:
        ValueError: the target has no such layers, or fewer tokens than the draft vocabulary.
    """

    inputs = 2  # hidden states that it takes

    def __init__(self, target_config: PretrainedConfig, options: "Eagle3Options") -> None:
        super().__init__()
        kind = head_kind(target_config, options)
        config: Any = kind.config
        wide, count = config.hidden_size, len(options.taps)
        _check(options, target_config)
        config.num_hidden_layers = options.layers
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * options.layers
        self.config, self.layer, self.hidden_size = config, options.layer, wide
        self.fc_norm = nn.ModuleList(self._norm(kind, wide) for _ in options.taps if options.fc_norm)
        self.input_norm = self._norm(kind, count * wide) if options.norm_before_fc else None
        self.fc = nn.Linear(count * wide, wide, bias=False)
        later = [made(config, kind.decoder_layer, config, layer_idx=index) for index in range(1, options.layers)]
        self.layers = nn.ModuleList([Eagle3Layer(kind, options.norm_before_residual), *later])
        self.window = options.sliding_window
        for layer in cast(Any, self.layers):
            layer.self_attn.window = self.window  # read in training
        self.rotary_emb = kind.rotary(config)  # type: ignore[call-arg, arg-type]
        self.norm, self.norm_output = self._norm(kind, wide), options.norm_output
        rows = options.draft_vocab_size or target_config.vocab_size
        self.lm_head = nn.Linear(wide, rows, bias=False) if options.own_lm_head else None
        if options.draft_vocab_size is not None:  # until training or a checkpoint sets it: the first tokens
            self.register_buffer(D2T, torch.zeros(rows, dtype=torch.int64))
        for weights in self.parameters():
            if weights.dim() == 2:
                nn.init.normal_(weights, std=config.initializer_range)

    @staticmethod
    def _norm(kind: LayerKind, width: int) -> nn.Module:
        return made(kind.config, kind.norm, width, eps=kind.eps)

    def forward(
        self,
        features: Tensor,
        embeddings: Tensor,
        position_ids: Tensor,
        attention_mask: Any = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Predict what is fed back, ``[B, T, H]``; ``scored`` of it enters the LM head.

        Args:
            features: ``[B, T, H]``, ``fused`` states of the target, or what this returned before.
            embeddings: ``[B, T, H]``, of the next tokens.
            attention_mask: bool ``[B, 1, T, S]``; None is causal, with the head's sliding window.
        """
        if attention_mask is None and cache is None and self.window is not None:
            ones = torch.ones(features.shape[1], features.shape[1], dtype=torch.bool, device=features.device)
            attention_mask = ones.tril().triu(1 - self.window)[None, None]
        hidden = torch.cat([embeddings, features], dim=-1)
        angles = self.rotary_emb(features, position_ids)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=attention_mask,
                position_ids=position_ids,
                position_embeddings=angles,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return self.norm(hidden) if self.norm_output else hidden

    def fused(self, states: Tensor) -> Tensor:
        """Make features ``[..., H]`` of the target's states ``[..., taps * H]``."""
        if len(self.fc_norm):
            parts = states.split(self.hidden_size, dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states if self.input_norm is None else self.input_norm(states))

    def scored(self, predicted: Tensor) -> Tensor:
        """Return what enters the LM head, ``[..., H]``."""
        return predicted if self.norm_output else self.norm(predicted)


class Eagle3Options(TreeOptions):
    """Options of the EAGLE-3 drafter; the keys from ``taps`` on describe the head.

    ``draft_dtype``: draft with an int8 copy of the head's layer and LM head.
    ``taps``: the target's states that it reads: 2 is the output of the second layer, the input of layer 2 (counted from
    0), transformers' hidden_states[2]. These are the numbers that EAGLE-3's configs call auxiliary layer ids.
    ``layer``: its decoder layers are Llama's or Qwen3's (with norms of queries and keys). ``layers``: number of them.
    ``own_lm_head``: false: it drafts with the target's LM head. ``draft_vocab_size``: tokens of its own LM head; null:
    all.
    ``norm_before_residual``: the first layer's residual is the feature after its norm, not before it.
    ``norm_before_fc``: one norm over all states before fc. ``fc_norm`` (EAGLE-3.1): a norm for each state before fc.
    ``norm_output`` (EAGLE-3.1): the output after the final norm is fed back; the LM head reads it as it is.
    ``sliding_window``: tokens that its layers attend to, the present one included; null: all.
    ``trained_steps``: steps of its training-time test, as the training records them; a default ``depth`` is no deeper.
    ``shape``: heads, MLP and RoPE of its layers where a released head has others than the target.
    """

    draft_dtype: Literal["int8"] | None = None
    taps: list[Layers] = Field(min_length=1)
    layer: DraftLayer = "llama"
    layers: Layers = Field(default=1, ge=1)
    own_lm_head: bool = True
    draft_vocab_size: Vocabulary | None = Field(default=None, ge=1)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sliding_window: Length | None = Field(default=None, ge=1)
    trained_steps: DraftSize | None = Field(default=None, ge=1)
    shape: LayerShape = LayerShape()

    @model_validator(mode="after")
    def _one_norm(self) -> "Eagle3Options":
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm are both true, two norms in one place; set one to false")
        return self

    @property
    def levels(self) -> int:
        """Levels of a draft: ``depth``, or its default, which is at most ``trained_steps``."""
        usual = super().levels
        return usual if self.depth or self.trained_steps is None else min(usual, self.trained_steps)


def head_kind(target: PretrainedConfig, options: Eagle3Options) -> LayerKind:
    """Return the classes and the configuration of the head's decoder layers."""
    return layer_kind(target, options.layer, options.shape)


def _check(options: Eagle3Options, target: PretrainedConfig) -> None:
    """Raise ValueError unless a target with this configuration has such states and tokens."""
    if (last := max(options.taps)) > target.num_hidden_layers or min(options.taps) < 0:
        raise ValueError(
            f"taps are {options.taps}, and the target has {target.num_hidden_layers} layers: tap {last} is no state of "
            f"it; give numbers from 0 (the embeddings) to {target.num_hidden_layers}"
        )
    size = options.draft_vocab_size
    if size is not None and not options.own_lm_head:
        raise ValueError(f"draft_vocab_size is {size:,}, and own_lm_head is false; leave one of them out")
    if size is not None and size > target.vocab_size:
        raise ValueError(f"draft_vocab_size is {size:,}, and the target's vocabulary has {target.vocab_size:,} tokens")


class Eagle3Drafter(EagleDrafter):
    """Drafts as EAGLE does, with an EAGLE-3 head.

    Raises:
        ValueError: ``paths`` that are no tree, or a d2t that is not increasing or points outside of the vocabulary.
    """

    name = "eagle3"
    options = Eagle3Options
    card_title = "EAGLE-3 head ([EAGLE-3](https://arxiv.org/abs/2503.01840))"
    layout = Layout(
        "an EAGLE-3 head",
        code="EaModel.from_pretrained(base_model_path='{target}', ea_model_path='{out}', use_eagle3=True)",
        note="It reads the embedding from a target in several files (with an index), and fails for a single file.",
        readers=tuple(READERS),
    )
    recipe = Recipe(
        learning_rate=5.0e-5,
        rows={"EAGLE-3, auto": {"tree": "auto"}, "EAGLE-3, chain of 3": {"tree": "chain", "depth": 3}},
        keys={"fc_norm": True, "norm_output": True, "lm_head_start": "target"},
        small={"ttt_steps": 5, "optimizer": "muon"},
        short={"draft_vocab": 4096},
        certified={"tree": "chain", "depth": 3},
    )

    def __init__(self, target: TargetModel, module: nn.Module, options: Eagle3Options) -> None:
        super().__init__(target, module, options)
        self.taps = tuple(options.taps)
        deepest = max(self.plan.above) + 1 if self.tree == "static" else self.depth
        if (trained := options.trained_steps) is not None and deepest > trained:
            less = f"paths of at most {trained}" if self.tree == "static" else f"depth={trained}"
            warnings.warn(
                f"drafts have {deepest} levels, and the head was trained on {trained} steps: later ones are accepted "
                f"less often; compare with {less}",
                stacklevel=2,
            )
        self._layer = cast(Any, module).config

    @classmethod
    def build_module(cls, target_config: PretrainedConfig, drafter_config: dict[str, Any]) -> nn.Module:
        return Eagle3Head(target_config, Eagle3Options(**drafter_config))

    def drafter_config(self) -> dict[str, Any]:
        return self.given.model_dump(exclude_defaults=True) | {"tree": self.tree, "taps": list(self.taps)}

    def draft_head(self, options: Any, own: nn.Linear | None = None) -> DraftHead:
        return self.own_draft_head(options.draft_dtype)

    def _make_head(self, options: Any) -> Part:
        target, head = self.target, cast(Any, self.module)
        runner = target.runner
        norm = runner.norm(head.norm)
        if not head.norm_output:
            self.lm_head.enter = norm

        def enter(features: Tensor, tokens: Tensor) -> Tensor:
            return torch.cat([target.embed(tokens), features], dim=-1)

        leave = norm if head.norm_output else identity
        part = runner.part(head.layers, enter, leave, rope_of(head.config), options.sliding_window)
        if options.draft_dtype is not None:
            quantize_layers(part, options.draft_dtype)
        return part

    def _read(self, features: Tensor, following: list[list[int]], state: DecodeState) -> Tensor:
        with model_time():
            features = cast(Eagle3Head, self.module).fused(features)
        return super()._read(features, following, state)
