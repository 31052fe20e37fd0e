"""TargetModel: a Hugging Face causal LM run whole or by layer range, over rows of a tree, with one KV cache.

Draft models are TargetModels too. The weights are transformers' own. The engine "stock" calls the model itself; "fused"
runs layers rewritten for decoding; "graphs" captures either, "compiled" fused layers with compiled elementwise
operations. Loading checks once that what runs here is the model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from drafters.common.paths import hub_names, is_hub_id
from drafters.config import Engine, Quantization
from drafters.model.cache import KVCache, config_shapes
from drafters.model.check import check_target
from drafters.model.files import rope_depends_on_length, sliding_windows
from drafters.model.fingerprint import of_model
from drafters.model.fused import FusedLayer, FusedNorm, why_not
from drafters.model.graphs import CompiledRunner, GraphRunner, StockGraphRunner, differs_from_layers
from drafters.model.linear import Product, quantize_linears
from drafters.model.loading import DeviceMap, has_hooks, layer_devices, load_model
from drafters.model.quantised import quantisation, unpack
from drafters.model.rows import CHAIN, Rows, Scope
from drafters.model.runner import Part, PartLayer, Runner, identity, model_time
from drafters.model.running import RunningCache
from drafters.model.stock import ModelPart, StockRunner, body_of, decoder_layers, logit_change, scopes


@dataclass
class FeatureOutput:
    """Features ``[B, R, H]`` (hidden states after the final norm) and taps.

    ``taps[l]``: ``[B, R, H]``, the hidden states after the first ``l`` decoder layers. Of a verification, too:
    ``logits``, ``[B, N + 1, V]`` of [root, nodes]; ``scratch``, ``[B, S, V]`` of the draft's scratch rows, where it
    wants them.
    """

    features: Tensor
    taps: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None
    scratch: Tensor | None = None


class TargetModel:
    """A frozen causal LM.

    Args:
        model: a transformers causal LM; it is put into eval mode and frozen.
        name: name in checkpoints and messages; by default its ``name_or_path``.
        revision: the Hub revision it was loaded from.
        engine: "fused" runs layers rewritten for decoding, "stock" the model's own forward, "graphs" one of them on
            fixed shapes, captured as CUDA graphs, "compiled" fused layers with compiled elementwise operations,
            captured. None takes fused layers if the model has them, else stock, and on CUDA captures them. All the same
            up to rounding; but only "stock" calls hooks set on the model's modules later, and on a CPU fused layers
            copy the weights, which must not change any more.
        quantize: keeps the layers' projections as "int8" (a scale an output) or "int4" (scale and zero point for each
            group of 32 inputs), and nothing else of them: other outputs than the model's own, half or a
            quarter of the bytes a step reads. The embedding stays as it is; so does the LM head but on a CPU with
            AVX-512, where the engine "fused" reads it as int8: of a small model it is half of what is left. A mixture
            of experts is refused.
        capture_only: load also a model that cannot verify drafts, for ``features`` alone.
        fingerprint: fingerprint of the files that the model comes from; None: computed of the model when needed.

    Attributes:
        on_hub: True if it was loaded from the Hub, False for a folder.
        hidden_size: H, the width of a feature. vocab_size: V, rows of the LM head. num_layers: decoder layers.

    Raises:
        ValueError: the model cannot verify a tree of tokens, what runs here does not give its own output, or its layers
            cannot be fused though that was asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str | None = None,
        revision: str | None = None,
        engine: Engine | None = None,
        quantize: Quantization | None = None,
        capture_only: bool = False,
        fingerprint: str | None = None,
    ) -> None:
        self.name = name or model.config.name_or_path or type(model).__name__
        self.revision = revision
        self.on_hub = is_hub_id(self.name)  # by its form, because the caller loaded it
        self.source: str | None = None  # folder or Hub repository, where a tokenizer would lie too
        self._fingerprint, self.quantize = fingerprint, quantize
        self._products: list[Product] = []  # quantised linear layers
        self._read(model)
        self.runner = choose_runner(model, self.name, engine, capture_only)
        self._rewrite_layers()
        self._check(capture_only)
        self.runner = self._captured(engine)
        if quantize is not None:
            self._quantize(quantize)

    def _read(self, model: PreTrainedModel) -> None:
        """Freeze the model, let its attention take a mask, unpack its weights, and note its parts."""
        self.model: Any = model.eval().requires_grad_(False)
        self.config: PretrainedConfig = model.config
        if self.config._attn_implementation not in ("sdpa", "eager"):  # others take no tree mask
            self.model.set_attn_implementation("sdpa")
        if self.config._attn_implementation == "eager":
            logging.getLogger(__name__).info("%s has no SDPA: its attention is transformers' eager one", self.name)
        if quantisation(self.config):
            unpack(self.model)
        self.body: Any = body_of(model)
        self._stock_layers = decoder_layers(self.body)
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().out_features
        self.num_layers = len(self._stock_layers)
        self.parameters = sum(weights.numel() for weights in model.parameters())
        self.logit_change = logit_change(model)
        self._devices = layer_devices(self.model, self._stock_layers)

    def _rewrite_layers(self) -> None:
        """Make the engine's own of LM head, layers and norm; "stock" has no layers of its own."""
        self._lm_head: Any = self.runner.linear(self.model.get_output_embeddings())
        self._parts: dict[tuple[int, int | None], Part] = {}
        self.layers: list[FusedLayer] = []
        if self.runner.rewrites:
            self.windows = sliding_windows(self.config)
            self.layers = [FusedLayer(layer) for layer in self._stock_layers]
            self.norm = FusedNorm(self.body.norm)

    def _check(self, capture_only: bool) -> None:
        """Compare what runs here with the model's own forward; a model that fails may still be captured."""
        try:
            check_target(self)
        except ValueError:
            if self.layers or not capture_only:
                raise
            self.runner = StockRunner(self.model, {})

    def _quantize(self, kind: Quantization) -> None:
        self.fingerprint()  # the weights', not their roundings': drafters trained for them fit
        if self.layers:
            for fused, layer in zip(self.layers, self._stock_layers, strict=True):
                fused.quantize(layer, kind)
                self._products += fused.products
        else:
            self._products = quantize_linears(self._stock_layers, kind)
        if isinstance(self._lm_head, Product) and self._lm_head.cpu_weight is not None:
            self._lm_head.quantize("int8")

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        engine: Engine | None = None,
        quantize: Quantization | None = None,
        device_map: DeviceMap | None = None,
        cache_tokens: tuple[int, int] = (0, 0),
        capture_only: bool = False,
    ) -> "TargetModel":
        """Load a local folder or a Hub repository (weights in safetensors; remote code is never run).

        Args:
            dtype: dtype of weights and hidden states; "auto": bf16 where the device has instructions for it, else
                float32 on a CPU and float16 on a GPU.
            device_map: accelerate's map of the layers to several GPUs ("auto", or module -> device).
            cache_tokens: sequences of a batch, and tokens of each, that must fit into memory beside the weights.

        Raises:
            ValueError: nothing loadable there, an unsupported model, an engine that cannot run it, or too little memory
                (found before the weights are read).
        """
        model, fingerprint = load_model(name, dtype, device, revision, device_map, cache_tokens)
        target = cls(model, str(name), revision, engine, quantize, capture_only, fingerprint)
        target.source, target.on_hub = str(name), bool(hub_names(name))
        return target

    @property
    def engine(self) -> Engine:
        """The engine that runs the decoder layers."""
        return self.runner.engine

    @property
    def device(self) -> torch.device:
        """Where token ids go in and logits come out."""
        return self.embedding.device

    @property
    def chains_only(self) -> bool:
        """True if it verifies chains only: some layers keep a running state (``drafters/model/running.py``)."""
        return bool(self.runner.mixers)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and hidden states."""
        return self.embedding.dtype

    @property
    def max_context(self) -> int:
        """Positions the model was made for.

        Where RoPE's frequencies switch beyond a length (longrope), that length: past it a block of tokens and one token
        at a time would not get the same angles.
        """
        longest = getattr(self.config, "max_position_embeddings", None) or 1 << 30
        if getattr(self.config, "attn_temperature_tuning", False):
            # Llama 4 scales attention from there on, by the slots of a cache and not by the positions that it is given.
            longest = min(longest, int(self.config.floor_scale) - 1)
        if rope_depends_on_length(self.config):
            original = self.config.rope_parameters.get("original_max_position_embeddings")
            return min(longest, original or longest)
        return longest

    def bytes_read(self) -> int:
        """Bytes of weights that decoding one token reads: not other tokens' embeddings, nor experts not chosen."""
        total = 0
        # Packed weights are buffers.
        packed = self.model.named_buffers() if quantisation(self.config) else ()
        for name, weights in chain(self.model.named_parameters(), packed):
            if weights is self.embedding and weights is not self.model.get_output_embeddings().weight:
                continue
            chosen = 1.0
            if ".experts." in name:
                names = ("num_local_experts", "num_experts", "n_routed_experts")
                experts = next((count for name in names if (count := getattr(self.config, name, None))), 1)
                chosen = min(1.0, getattr(self.config, "num_experts_per_tok", experts) / experts)
            total += round(weights.nbytes * chosen)
        if self.quantize is not None:
            total += sum(product.nbytes for product in self._products)
            if isinstance(self._lm_head, Product) and self._lm_head.quantized is not None:
                total += self._lm_head.nbytes - self.model.get_output_embeddings().weight.nbytes
        return total

    def fingerprint(self) -> str:
        """Return a hash of the shape and of all weights, which tells targets apart (``drafters/model/fingerprint.py``).

        Weights stored in bf16 or fp16 give the same fingerprint in every dtype they are loaded in.
        """
        if self._fingerprint is None:
            self._fingerprint = of_model(self.model)
        return self._fingerprint

    def embed(self, tokens: Tensor) -> Tensor:
        """``[...]`` ids -> the rows of the embedding ``[..., H]``, without the scale that some families give them."""
        return nn.functional.embedding(tokens, self.embedding)

    def lm_head(self, features: Tensor) -> Tensor:
        """Features ``[..., H]`` -> logits ``[..., V]``."""
        with model_time():
            if self._devices is not None:  # whose last is not the first
                head = self.model.get_output_embeddings().weight.device
                features = features.to(head)
            logits = self._lm_head(features).to(self.device)
            return logits if self.logit_change is None else self.logit_change(logits)

    @property
    def lm_product(self) -> Product | None:
        """``lm_head`` as a product of this package; None where it is not one."""
        if self.logit_change is not None or "lm_head" in vars(self):  # another one was put into a copy
            return None
        return self._lm_head if isinstance(self._lm_head, Product) else None

    def new_cache(
        self, batch: int, capacity: int, layers: int | None = None, config: PretrainedConfig | None = None
    ) -> KVCache:
        """Return an empty KV cache of ``capacity`` slots per sequence.

        It is for the target's layers, or for ``layers`` layers of ``config`` (None: the target's).

        Raises:
            ValueError: the memory does not suffice.
        """
        if layers is None:
            shapes, place = self.runner.shapes(), self._devices or self.device
            if self.chains_only:
                return RunningCache(self.runner.mixers, shapes, batch, capacity, self.dtype, place)
        else:
            shapes, place = config_shapes(config or self.config, layers), self.device
        return self.runner.new_cache(shapes, batch, capacity, self.dtype, place)

    def features(
        self, input_ids: Tensor, lengths: list[int] | None = None, taps: tuple[int, ...] = ()
    ) -> FeatureOutput:
        """Features and taps of whole sequences ``[B, T]``, without a cache.

        Sequences may be padded on the right: attention is causal, so tokens before the padding are unaffected
        (``lengths`` only documents where it starts; values beyond it are meaningless).
        """
        assert lengths is None or max(lengths) <= input_ids.shape[1]
        return self.run(input_ids, None, taps=taps)

    def run(
        self, inputs: Tensor, cache: KVCache | None, rows: Rows = CHAIN, *, start: int = 0, taps: tuple[int, ...] = ()
    ) -> FeatureOutput:
        """Run the layers from ``start`` on, and the final norm, over R new tokens after the cache's committed ones.

        Args:
            inputs: ``[B, R]`` ids; or ``[B, R, H]``, the hidden states that enter layer ``start``.
            cache: cache for the tokens' keys and values; None attends within the R tokens only.
            rows: mask and positions of the tokens; by default a chain.
            taps: hidden states to hand out, by the number of layers before them.
        """
        return FeatureOutput(*self.runner.forward(self, inputs, cache, rows, taps, start))

    def shallow(self, tokens: Tensor, cache: KVCache | None, stop: int, rows: Rows = CHAIN) -> Tensor:
        """Hidden states ``[B, R, H]`` after the first ``stop`` layers alone, from where ``run`` can go on."""
        return self.runner.forward(self, tokens, cache, rows, stop=stop)[0]

    def part(self, start: int, stop: int | None) -> Part:
        """Layers ``start..stop``; from the embedding if there is no layer before, through the norm if none follows."""
        part = self._parts.get((start, stop))
        if part is not None:
            return part
        if not self.runner.rewrites:
            part = ModelPart(start=start, stop=stop)
        else:
            enter, leave = self.embed if start == 0 else identity, self._leave if stop is None else identity
            devices: Sequence[torch.device | None] = self._devices or [None] * self.num_layers
            layers = map(PartLayer, self.layers, range(self.num_layers), map(Scope, self.windows), devices)
            part = Part(list(layers)[start:stop], enter, leave)
        self._parts[start, stop] = part
        return part

    def _leave(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden if self._devices is None else hidden.to(self.body.norm.weight.device))

    def _captured(self, engine: Engine | None) -> Runner:
        """Return a runner that captures graphs if it was asked for, or on a GPU if it passes the trial; else the
        present one."""
        asked, present = engine in ("compiled", "graphs"), self.runner
        scopes = present.scopes if isinstance(present, StockRunner) else None
        if scopes == {} or not asked and (engine is not None or self.device.type != "cuda"):
            return present
        reason = self._why_uncaptured()
        if engine == "compiled" and scopes is not None:
            reason = "its layers are not rewritten for decoding"
        if reason is None:
            kind = CompiledRunner if engine == "compiled" else GraphRunner
            runner = kind(self.model) if scopes is None else StockGraphRunner(self.model, scopes)
            reason = differs_from_layers(self, runner)
            if reason is None:
                runner.free()  # no later cache uses the trial's
                runner.on_trial = False
                return runner
        if asked:
            raise ValueError(
                f"engine {engine!r} cannot run {self.name}: {reason}; use engine {present.engine!r}, or none"
            )
        logging.getLogger(__name__).warning("%s runs without graphs: %s", self.name, reason)
        return present

    def _why_uncaptured(self) -> str | None:
        """Return why no trial is needed to know that nothing can be captured; None if it may."""
        if rope_depends_on_length(self.config):
            return "its RoPE changes with the length"
        if self._devices is not None:
            return "it spans several devices"
        if not self.layers and has_hooks(self.model):
            return "hooks are set on its modules, and no replay calls them"
        return "some of its layers keep a running state" if self.chains_only else None


def choose_runner(model: PreTrainedModel, name: str, engine: Engine | None, capture_only: bool) -> Runner:
    """Choose what runs a model; graphs are captured of it later.

    Raises:
        ValueError: unknown engine; its layers cannot be fused though that was asked for, or cannot verify a tree.
    """
    if engine not in (None, "compiled", "graphs", "fused", "stock"):
        raise ValueError(f"engine is {engine!r}; give compiled, graphs, fused or stock")
    if engine != "stock":
        reasons = [reason for layer in decoder_layers(body_of(model)) if (reason := why_not(layer, model.config))]
        if method := quantisation(model.config):
            reasons.insert(0, f"its weights are quantised ({method})")
        if not reasons:
            return Runner(model)
        if engine == "fused":
            raise ValueError(f"engine 'fused' cannot run {name}: {reasons[0]}; use engine 'stock', or none")
        logging.getLogger(__name__).warning("%s runs on its own forward, more slowly: %s", name, reasons[0])
    try:
        return StockRunner(model, scopes(model.config))
    except ValueError as error:
        if capture_only:
            return StockRunner(model, {})
        raise ValueError(
            f"{name} ({type(model).__name__}) cannot verify drafts: {error}; its states can be captured and "
            "drafters trained from them"
        ) from None
