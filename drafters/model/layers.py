"""Single layers of a target's own kind, or of Llama's, to build learned heads from, without loading the target."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

from drafters.config import DraftLayer, HeadLayer, LayerShape
from drafters.model.cache import KVCache, config_shapes, head_sizes
from drafters.model.files import SUPPORTED
from drafters.model.runner import Rotary

PROBE = 4  # tokens of a new head's trial
# Families whose own decoder layer vLLM and SGLang have as a draft layer: Llama's (Qwen2: with biases of q, k and v).
SERVED = ("llama", "mistral", "mixtral", "qwen2")
# Kinds of RoPE that transformers and the engines' Llama compute alike, and the keys of each that all of them read.
ROPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
}


@dataclass
class LayerKind:
    """Classes of a model family: call them with (config, layer_idx), (config) and (hidden_size, eps).

    ``decoder_layer`` is dense; ``own_layer`` is the family's, with experts if it has any.
    """

    config: PretrainedConfig
    decoder_layer: type[nn.Module]
    own_layer: type[nn.Module]
    attention: type[nn.Module]
    rotary: type[nn.Module]
    norm: type[nn.Module]
    eps: float


def unserved(config: PretrainedConfig) -> list[str]:
    """Return what keeps vLLM and SGLang from serving the target's own layer in a head, apart from its family."""
    reasons = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    if (activation := getattr(config, "hidden_act", "silu")) != "silu":
        reasons.append(f"hidden_act {activation}")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = (rope.get("full_attention") or rope).get("rope_type", "default")  # some have one for each kind of layer
    return reasons if kind in ROPES else [*reasons, f"RoPE of type {kind}"]


def default_layer(config: PretrainedConfig) -> HeadLayer:
    """Return the default layer of an EAGLE head for a target with this ``config``.

    It is the target's own layer if vLLM and SGLang have it as a draft layer, else Llama's, which all engines have.
    """
    return "target" if config.model_type in SERVED and not unserved(config) else "llama"


def layer_config(config: PretrainedConfig, layer: HeadLayer | DraftLayer) -> PretrainedConfig:
    """The configuration of a head's decoder layer of this kind, for a target with ``config``; raises as
    ``layer_kind``."""
    return config if layer == "target" else layer_kind(config, layer).config


def rope_of(config: PretrainedConfig) -> Rotary:
    """The RoPE of Llama's or Qwen3's layers of this configuration."""
    return Rotary(LlamaRotaryEmbedding(config), config)  # type: ignore[arg-type]


def layer_kind(
    config: PretrainedConfig, layer: HeadLayer | DraftLayer = "target", shape: LayerShape | None = None
) -> LayerKind:
    """Look up the layer classes of ``config``'s family, or for a ``layer`` other than "target" Llama's or Qwen3's.

    Those have the target's widths, except for the values of ``shape``.

    A mixture of experts gets Mistral's dense layer of the same widths: the EAGLE paper's head for Mixtral has 0.28B
    parameters (Table 2), which is one dense layer; eight experts would be 1.4B.

    Raises:
        ValueError: no head can be built of the family's layers, or trained on its embedding and LM head.
    """
    if layer != "target":
        drafts: Any = llama_config(config)
        if layer == "qwen3":
            drafts = Qwen3Config(**{**drafts.to_dict(), "model_type": "qwen3"})
            drafts._attn_implementation = "sdpa"
        for name, value in shape.model_dump(exclude_none=True).items() if shape is not None else ():
            setattr(drafts, name, value)
        llama = layer == "llama"
        return LayerKind(
            config=drafts,
            decoder_layer=LlamaDecoderLayer if llama else Qwen3DecoderLayer,
            own_layer=LlamaDecoderLayer if llama else Qwen3DecoderLayer,
            attention=LlamaAttention if llama else Qwen3Attention,
            rotary=LlamaRotaryEmbedding,
            norm=LlamaRMSNorm,
            eps=drafts.rms_norm_eps,
        )
    one_layer = copy.deepcopy(config)
    one_layer.num_hidden_layers = 1
    one_layer._attn_implementation = "sdpa"
    try:
        if getattr(one_layer, "layer_types", None):
            one_layer.layer_types = ["full_attention"]
        with torch.device("meta"):
            # Another dtype than torch's default would become the default of all threads meanwhile.
            options: Any = {"dtype": torch.get_default_dtype(), "attn_implementation": "sdpa"}
            model: Any = AutoModelForCausalLM.from_config(one_layer, trust_remote_code=False, **options)
        first, norm = model.model.layers[0], model.model.norm
        own_attention, rotary = first.self_attn, model.model.rotary_emb
        if rotary is None:
            raise ValueError("its attention has no RoPE")
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        experts = any("expert" in name for name, _ in first.named_modules()) or any(
            weights.dim() > 2 for weights in first.parameters()
        )
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise no_head(config, error) from error
    return LayerKind(
        config=one_layer,
        decoder_layer=MistralDecoderLayer if experts else type(first),
        own_layer=type(first),
        attention=type(own_attention),
        rotary=type(rotary),
        norm=type(norm),
        eps=eps,
    )


def has_heads(target: PretrainedConfig) -> bool:
    """Return True if a target's attention has heads that a Llama layer can have."""
    return bool(getattr(target, "num_attention_heads", None)) and getattr(target, "kv_lora_rank", None) is None


def llama_config(target: PretrainedConfig) -> LlamaConfig:
    """One Llama layer of the target's width, without biases; what the target has of heads and RoPE, where Llama can.

    Its MLP has the target's ``intermediate_size``. If that of a mixture of experts is below ``2 * hidden_size``, it is
    the size of one expert, and the MLP has ``num_experts_per_tok`` times that size.

    Heads of latent attention (MLA) become heads of 128; so do those of a target without attention (Mamba). Its RoPE
    rotates all dimensions of a head, in two halves.
    Engines compute RoPE that changes with the text's length (dynamic, longrope) differently from transformers; it
    becomes the default RoPE with the same base.
    """
    hidden = target.hidden_size
    inner = getattr(target, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner
    if inner < 2 * hidden and (chosen := getattr(target, "num_experts_per_tok", None)):
        inner *= chosen
    rope = getattr(target, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # some have one for each kind of layer
    kind = rope.get("rope_type") if rope.get("rope_type") in ROPES else "default"
    rope_values = {key: rope[key] for key in ("rope_theta", *ROPES[kind]) if rope.get(key) is not None}
    width = math.gcd(hidden, 128)
    heads, key_heads, head_dim = hidden // width, hidden // width, width
    if has_heads(target):
        heads, (key_heads, head_dim) = target.num_attention_heads, head_sizes(target)
    llama = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        max_position_embeddings=getattr(target, "max_position_embeddings", None) or 131_072,
        initializer_range=getattr(target, "initializer_range", 0.02),
        rms_norm_eps=getattr(target, "rms_norm_eps", None) or 1e-6,
        rope_parameters={"rope_theta": 10000.0, "rope_type": kind, **rope_values},
        tie_word_embeddings=getattr(target, "tie_word_embeddings", False),
        bos_token_id=target.bos_token_id,
        eos_token_id=target.eos_token_id,
        pad_token_id=target.pad_token_id,
    )
    llama._attn_implementation = "sdpa"
    return llama


class AttentionLayer(nn.Module):
    """A decoder layer of a family without its MLP: ``h + attention(norm(h))``."""

    def __init__(self, kind: LayerKind) -> None:
        super().__init__()
        self.input_layernorm = build_module(kind.config, kind.norm, kind.config.hidden_size, eps=kind.eps)
        self.self_attn = build_module(kind.config, kind.attention, kind.config, layer_idx=0)

    def forward(self, hidden: Tensor, use_cache: bool = False, **arguments: Any) -> Tensor:
        """``[B, R, H]`` -> ``[B, R, H]``; the other arguments are those of the family's decoder layers."""
        return hidden + self.self_attn(hidden_states=self.input_layernorm(hidden), **arguments)[0]


def build_module(config: PretrainedConfig, kind: type[nn.Module], *arguments: Any, **named: Any) -> nn.Module:
    """Build a module of a target's family.

    Raises:
        ValueError: the class wants something that the target's configuration does not have.
    """
    try:
        return kind(*arguments, **named)
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        raise no_head(config, f"{kind.__name__}: {error}") from error


def no_head(config: PretrainedConfig, reason: object) -> ValueError:
    """The error for a target that no head can be built for, or whose head would not decode as it was trained."""
    return ValueError(
        f"no learned head can be made for a target of model_type {config.model_type!r}: {str(reason).splitlines()[0]}; "
        f"use {SUPPORTED}, or a drafter that needs no training"
    )


def probe_states(head: Any, width: int) -> list[Tensor]:
    """Return ``head.inputs`` tensors ``[1, PROBE, width]`` to try a new head on.

    They are deterministic, so that the trial uses no random numbers.
    """
    count = head.inputs
    values = torch.arange(count * PROBE * width, dtype=torch.float32).sin().to(next(head.parameters()).dtype)
    return list(values.view(count, 1, PROBE, width))


@torch.no_grad()
def check_head(head: Any, config: PretrainedConfig) -> None:
    """Check that a new head gives the same for one token over a cache (drafting) as for all tokens at once (training).

    ``head.inputs`` says how many hidden states ``[B, T, H]`` it takes, before positions, a mask and a cache.

    Raises:
        ValueError: the family's layers take other arguments, or give something else then.
    """
    positions = torch.arange(PROBE)[None]
    states = probe_states(head, config.hidden_size)
    training = head.training
    head.eval()  # some families drop values out while they train
    try:
        whole = head(*states, positions)
        cache = KVCache(config_shapes(config, 1), 1, PROBE, whole.dtype, whole.device)
        first, last = ([part[:, :-1] for part in states], [part[:, -1:] for part in states])
        head(*first, positions[:, :-1], cache=cache.at(PROBE - 1))
        cache.commit_first([PROBE - 1])
        alone = head(*last, positions[:, -1:], cache=cache.at(1))
    except (AttributeError, TypeError, RuntimeError, ValueError, KeyError) as error:
        raise no_head(config, error) from error
    finally:
        head.train(training)
    differ(config, "one row at a time", alone, whole[:, -1:])


def differ(config: PretrainedConfig, how: str, values: Tensor, expected: Tensor) -> None:
    """Raise ValueError if a head that was run in another way gave something else; tensors without contents agree."""
    if values.is_meta:
        return
    gap, scale = (values - expected).abs().max().item(), expected.abs().max().item()
    if not gap <= max(1e-3, 8 * torch.finfo(values.dtype).eps) * scale:
        raise no_head(config, f"run {how} it gives something else (off by {gap:.2g}, values up to {scale:.2g})")
