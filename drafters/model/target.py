"""TargetModel: a stock Hugging Face causal LM run whole or by layer range, over rows of a tree, with one KV cache.

Draft models are TargetModels too. The weights are transformers' own, and so are the decoder layers of the engine
"eager", the reference; those of the engine "fused" are rewritten for decoding. Loading checks once that what runs here
agrees with the model's own forward.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from drafters.choices import Engine, Quantization

from .clock import model_time
from .files import SUPPORTED, model_fingerprint, rope_depends_on_length, sliding_windows
from .fused import FusedLayer, FusedNorm, signed, why_not
from .graphs import MOST_ROWS, Graphs, same
from .kv_cache import KVCache
from .linear import Product
from .loading import DeviceMap, layer_devices, load_model
from .rows import attention_bias, attention_mask, row_positions, uniform
from .self_check import check_layers_agree, graphs_agree


@dataclass
class FeatureOutput:
    """Features ``[B, R, H]`` (hidden states after the final norm; empty where the last layers did not run) and taps.

    ``taps[l]``: ``[B, R, H]``, the hidden states after the first ``l`` decoder layers. ``scratch``: ``[B, S, V]``, the
    logits of a draft's scratch rows, where it wants them.
    """

    features: torch.Tensor
    taps: dict[int, torch.Tensor] = field(default_factory=dict)
    scratch: torch.Tensor | None = None


class TargetModel:
    """A frozen causal LM.

    Args:
        model: a transformers causal LM; it is put into eval mode and frozen.
        name: what checkpoints and messages call it; default its ``name_or_path``.
        revision: the Hub revision it was loaded from.
        engine: "fused" runs layers rewritten for decoding, "graphs" the same on fixed shapes, captured as CUDA graphs,
            "eager" transformers' own. None takes the first of graphs (on CUDA), fused and eager that runs the model
            right. All the same up to rounding; but only "eager" calls the model's modules (and hooks set on them
            later), and on a CPU the others copy the weights, which must not change any more.
        quantize: keeps the layers' projections as "int8" (a scale an output) or "int4" (scale and zero point for each
            group of 128, 64 or 32 inputs), and nothing else of them: other outputs than the model's own, half or a
            quarter of the bytes a step reads. Embedding and LM head stay as they are.

    Raises:
        ValueError: the model is not built of decoder layers that can be run one by one, running them so does not give
            its own output, or they cannot be fused though that was asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str | None = None,
        revision: str | None = None,
        engine: Engine | None = None,
        quantize: Quantization | None = None,
    ) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self.config: PretrainedConfig = model.config
        self.name = name or model.config.name_or_path or type(model).__name__
        self.revision = revision
        self.source: str | None = None  # folder or Hub repository, where a tokenizer would lie too
        self.body: Any = getattr(model, "model", None)
        body: Any = self.body
        parts = ("embed_tokens", "layers", "norm", "rotary_emb")
        missing = [part for part in parts if not hasattr(body, part)]
        if not missing and not hasattr(getattr(body.layers[-1], "self_attn", None), "o_proj"):
            missing = ["self_attn.o_proj in its layers"]
        if missing or not isinstance(model.get_output_embeddings(), nn.Linear):
            raise ValueError(f"{self.name} ({type(model).__name__}) has no {missing or 'LM head'}; use {SUPPORTED}")
        if getattr(self.config, "final_logit_softcapping", None):  # small logits would hide it from the check below
            raise ValueError(f"{self.name} ({type(model).__name__}) caps its logits after the LM head; use {SUPPORTED}")
        if self.config._attn_implementation not in ("sdpa", "eager"):  # others take no tree mask
            self.model.set_attn_implementation("sdpa")
        self._windows = sliding_windows(self.config)
        # Looked up once: an attribute of a config costs a microsecond or more, and these are wanted in every forward.
        self._eager = self.config._attn_implementation == "eager"
        self._rope_by_length = rope_depends_on_length(self.config)
        self._rope_table: tuple[torch.Tensor, torch.Tensor] | None = None
        self._fused = self._fuse(engine)
        self._devices = layer_devices(self.model)
        self._graphs: Graphs | None = None
        bounds = check_layers_agree(self)
        self._graphs = self._capture(engine, bounds)
        self.parameters = sum(weights.numel() for weights in model.parameters())
        self._fingerprint: str | None = None
        self.quantize = quantize
        if quantize is not None:
            self._quantize(quantize)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        dtype: str | torch.dtype = "bfloat16",
        device: str | torch.device | None = None,
        revision: str | None = None,
        engine: Engine | None = None,
        quantize: Quantization | None = None,
        device_map: DeviceMap | None = None,
        cache_tokens: tuple[int, int] = (0, 0),
    ) -> "TargetModel":
        """Load a local folder or a Hub repository (weights in safetensors; remote code is never run).

        Args:
            device_map: how accelerate spreads the layers over several GPUs ("auto", or module -> device).
            cache_tokens: rows of a batch, and tokens of each, that the memory has to suffice for beside the weights.

        Raises:
            ValueError: nothing loadable there, an unsupported model, an engine that cannot run it, or too little memory
                (found before the weights are read).
        """
        model = load_model(name, dtype, device, revision, device_map, cache_tokens)
        target = cls(model, name=str(name), revision=revision, engine=engine, quantize=quantize)
        target.source = str(name)
        return target

    @property
    def engine(self) -> Engine:
        """What runs the decoder layers."""
        if self._fused is None:
            return "eager"
        return "fused" if self._graphs is None else "graphs"

    @property
    def device(self) -> torch.device:
        """Where token ids go in and logits come out."""
        return self.body.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and hidden states."""
        return self.body.norm.weight.dtype

    @property
    def hidden_size(self) -> int:
        """H, the width of a feature."""
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        """V, rows of the LM head."""
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.body.layers)

    @property
    def max_context(self) -> int:
        """Positions the model was made for.

        Where RoPE's frequencies switch beyond a length (longrope), that length: past it a block of rows and one row at
        a time would not get the same angles.
        """
        longest = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        if rope_depends_on_length(self.config):
            original = self.config.rope_parameters.get("original_max_position_embeddings")
            return min(longest, original or longest)
        return longest

    def bytes_read(self) -> int:
        """Bytes of weights that decoding one token reads: not other tokens' embeddings, nor experts not chosen."""
        total = 0
        for name, weights in self.model.named_parameters():
            if weights is self.body.embed_tokens.weight and weights is not self.model.get_output_embeddings().weight:
                continue
            chosen = 1.0
            if ".experts." in name:
                experts = getattr(self.config, "num_local_experts", None) or self.config.num_experts
                chosen = self.config.num_experts_per_tok / experts
            total += round(weights.nbytes * chosen)
        if self.quantize is not None and self._fused is not None:
            total += sum(product.nbytes for layer in self._fused for product in layer.products)
        return total

    def fingerprint(self) -> str:
        """Tells targets apart: a hash of the architecture and of sampled weights, rounded to bf16.

        Weights stored in bf16 or fp16 give one fingerprint in whatever dtype they are loaded.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        last = self.body.layers[-1].self_attn.o_proj.weight
        return model_fingerprint(self.config, self.body.norm.weight, last[0])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[...]`` ids -> ``[..., H]``."""
        return self.body.embed_tokens(tokens)

    def lm_head(self, features: torch.Tensor) -> torch.Tensor:
        """Features ``[..., H]`` -> logits ``[..., V]``."""
        with model_time():
            if self._devices is not None:  # whose last is not the first
                head = self.model.get_output_embeddings().weight.device
                return self._lm_head(features.to(head)).to(self.device)
            return self._lm_head(features)

    def new_cache(self, batch: int, capacity: int, layers: int | None = None) -> KVCache:
        """An empty cache for ``capacity`` rows of each batch row, of the target's layers or of so many like them.

        Raises:
            ValueError: the memory does not suffice.
        """
        if self._graphs is not None:
            rows = capacity + MOST_ROWS  # which padding may write
            return self._graphs.caches.take(
                self.config, batch, rows, self.dtype, self.device, layers or self.num_layers
            )
        where = self._devices if self._devices is not None and layers is None else self.device
        return KVCache.for_config(self.config, batch, capacity, self.dtype, where, layers)

    def rope(self, positions: torch.Tensor, upto: int, consecutive: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[B, R, head_dim]`` of ``positions [B, R]``, all below ``upto`` (a host-side bound).

        ``consecutive``: every batch row has the last R positions below ``upto``, in order; a view is given then.
        """
        if self._rope_by_length:
            return self.body.rotary_emb(self.body.norm.weight, position_ids=positions)
        cos, sin = self.rope_table(upto)
        if consecutive:
            first = upto - positions.shape[1]
            return cos[first:upto][None], sin[first:upto][None]
        return cos[positions], sin[positions]

    def rope_table(self, upto: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[N, head_dim]`` of positions 0 to N - 1, N at least ``upto``."""
        if self._rope_table is None or self._rope_table[0].shape[0] < upto:
            rows = 1 << max(upto - 1, 255).bit_length()
            every = torch.arange(rows, device=self.device)[None]
            cos, sin = self.body.rotary_emb(self.body.norm.weight, position_ids=every)
            self._rope_table = (cos[0].clone(), sin[0].clone())
        return self._rope_table

    def features(
        self, input_ids: torch.Tensor, lengths: list[int] | None = None, taps: tuple[int, ...] = ()
    ) -> FeatureOutput:
        """Features and taps of whole sequences ``[B, T]``, without a cache.

        Rows may be padded on the right: attention is causal, so what stands left of the padding is unaffected
        (``lengths`` only documents where it starts; values beyond it are meaningless).
        """
        assert lengths is None or max(lengths) <= input_ids.shape[1]
        return self.run(input_ids, cache=None, taps=taps)

    def run(
        self,
        tokens: torch.Tensor | None,
        cache: KVCache | None,
        *,
        hidden: torch.Tensor | None = None,
        see: torch.Tensor | None = None,
        depths: torch.Tensor | None = None,
        offset: int = 0,
        start: int = 0,
        stop: int | None = None,
        taps: tuple[int, ...] = (),
    ) -> FeatureOutput:
        """Run layers ``start..stop`` over R new rows that follow the cache's committed rows.

        Args:
            tokens: ``[B, R]`` ids; or None with ``hidden`` ``[B, R, H]``, the hidden states that enter layer ``start``.
            cache: where the rows' keys and values go, at slot ``length + offset`` on; None attends within the R rows
            only.
            see: bool ``[B, R, offset + R]``: which of the uncommitted rows each new row attends to, itself included
                (every row sees all committed ones); None: a chain.
            depths: ``[B, offset + R]``: positions of the uncommitted rows, counted from the cache's length; None: a
            chain.
            offset: uncommitted rows that earlier calls of this step wrote.
            stop: layer to stop before; None runs all, and the final norm.
            taps: hidden states to hand out, by the number of layers before them.

        Returns:
            features ``[B, R, H]``, or, with ``stop``, the hidden states that leave the last layer run; and the taps.
        """
        given = hidden if hidden is not None else tokens
        assert given is not None
        batch, rows = given.shape[:2]
        lengths = cache.lengths if cache is not None else [0] * batch
        last = self.num_layers if stop is None else stop
        collected: dict[int, torch.Tensor] = {}
        if self._graphs is not None and cache is not None and self._graphs.usable(cache, rows, offset):
            assert self._fused is not None
            layers = [(index, self._fused[index], self._windows[index]) for index in range(start, last)]
            with model_time():
                found = self._graphs.run(
                    f"{start} to {last} of {'tokens' if hidden is None else 'states'}",
                    layers,
                    self.embed if hidden is None else same,
                    self._norm if stop is None else same,
                    [given],
                    cache,
                    self.rope_table,
                    self._fused[0].attention.groups,
                    see,
                    depths,
                    offset,
                    taps,
                )
            return FeatureOutput(*found)
        with model_time():
            positions, upto = row_positions(lengths, depths, offset, rows, given.device)
            dtype = self.dtype if hidden is None else hidden.dtype
            masks = self._masks(lengths, see, depths, positions, offset, rows, dtype)
            rope = self.rope(positions, upto, consecutive=depths is None and uniform(lengths))
            if self._fused is not None:
                rope = signed(rope)
            if cache is not None:
                cache.at(rows, offset)
            if hidden is None:
                hidden = self.embed(given)
            for index in range(start, last):
                if index in taps:
                    collected[index] = hidden
                if self._devices is not None and hidden.device != (place := self._devices[index]):
                    hidden, rope = hidden.to(place), (rope[0].to(place), rope[1].to(place))
                    masks = {window: None if mask is None else mask.to(place) for window, mask in masks.items()}
                mask = masks[self._windows[index]]
                if self._fused is not None:
                    hidden = self._fused[index](hidden, rope, mask, cache, index)
                    continue
                hidden = self.body.layers[index](
                    hidden,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=cache is not None,
                    position_embeddings=rope,
                )
            if last in taps:
                collected[last] = hidden
            if stop is None:
                if self._devices is not None:
                    hidden = hidden.to(self.body.norm.weight.device)
                hidden = self._norm(hidden)
            if self._devices is not None:  # what leaves the target lies where its tokens do
                hidden = hidden.to(given.device)
                collected = {index: tap.to(given.device) for index, tap in collected.items()}
            return FeatureOutput(hidden, collected)

    def _masks(
        self,
        lengths: list[int],
        see: torch.Tensor | None,
        depths: torch.Tensor | None,
        positions: torch.Tensor,
        offset: int,
        rows: int,
        dtype: torch.dtype,
    ) -> dict[int | None, torch.Tensor | None]:
        """What each layer's attention is given, for each sliding-window size in use (None: full attention)."""
        masks: dict[int | None, torch.Tensor | None] = {}
        for window in set(self._windows):
            seen = window is None or max(lengths) + offset + rows <= window
            limit = None if seen else window
            if self._fused is not None:
                groups = self._fused[0].attention.groups
                masks[window] = attention_bias(lengths, see, depths, positions, offset, rows, limit, groups, dtype)
                continue
            mask = attention_mask(lengths, see, depths, positions, offset, rows, limit, self._eager)
            # Under SDPA a bool mask is right and a float one is added; under eager attention only addition exists.
            if mask is not None and self._eager:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
            masks[window] = mask
        return masks

    def _fuse(self, engine: Engine | None) -> list[FusedLayer] | None:
        """The layers of the engine "fused"; None for "eager"."""
        self._norm: Any = self.body.norm
        self._lm_head: Any = self.model.get_output_embeddings()
        if engine == "eager":
            return None
        reasons = (why_not(layer, self.config) for layer in self.body.layers)
        reason = next((reason for reason in reasons if reason), None)
        if reason is None:
            self._norm = FusedNorm(self.body.norm)
            self._lm_head = Product(self._lm_head.weight, self._lm_head.bias)
            return [FusedLayer(layer) for layer in self.body.layers]
        if engine is not None:
            raise ValueError(f"engine {engine!r} cannot run {self.name}: {reason}; use engine 'eager', or none")
        logging.getLogger(__name__).warning("%s runs on transformers' own layers, more slowly: %s", self.name, reason)
        return None

    def _capture(self, engine: Engine | None, bounds: list[float]) -> Graphs | None:
        """What captures forwards as graphs, where they are asked for, or there is a GPU and they prove right on it.

        ``bounds``: of each layer, as ``check_layers_agree`` found them.
        """
        asked = engine == "graphs"
        if not asked and (engine is not None or self.device.type != "cuda"):
            return None
        reason = None
        if self._fused is None:
            reason = "its layers are transformers' own"
        elif self._rope_by_length:
            reason = "its RoPE changes with the length"
        elif self._devices is not None:
            reason = "it spans several devices"
        else:
            reason = graphs_agree(self, Graphs(self.device), bounds)
            if reason is None:
                return Graphs(self.device)  # another: the trial's caches are no use to anybody
            if asked:
                raise ValueError(f"engine 'graphs' cannot run {self.name}: {reason}; use engine 'fused', or none")
        if asked or self._fused is not None:
            logging.getLogger(__name__).warning("%s runs without graphs: %s", self.name, reason)
        return None

    @torch.no_grad()
    def _quantize(self, kind: Quantization) -> None:
        self._fingerprint = self.fingerprint()  # the weights', not their roundings': drafters trained for them fit
        if self._fused is None:
            raise ValueError(f"{self.name} cannot be quantised: that needs engine 'fused', and it runs on 'eager'")
        for fused, layer in zip(self._fused, self.body.layers, strict=True):
            fused.quantize(layer, kind)
