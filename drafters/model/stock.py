"""The engine "stock": the model's own forward over a tree of new tokens.

transformers' models take a mask, positions and a cache from their caller. Nothing else is needed to verify a draft, so
scaled embeddings, capped logits, norms in any order, sinks, latent attention and routers need no code here.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from drafters.config import Engine
from drafters.model.cache import KVCache, Shape, StorageRows
from drafters.model.mixers import Mixer, cache_argument, probe
from drafters.model.rows import BufferedRows, Placed, Scope
from drafters.model.runner import Part, PartLayer, Runner, Taps, Transform, identity
from drafters.model.running import CHAINS_ONLY, LayerCache, RunningCache
from drafters.model.variants import StandIn, variant

# Layers that cannot verify a draft, and why.
WITHOUT_ROWS = {
    "indexed_attention": "choose the tokens that they attend to by an index of their own, which takes no tree"
}
RUNNING = {"linear_attention", "mamba", "conv", "hybrid"}  # layers with a running state
# Models whose scan over several tokens begins without a state in transformers (Mamba 1).
FROM_ZERO = {"falcon_mamba", "jamba", "mamba", "zamba"}


def body_of(model: PreTrainedModel) -> Any:
    """Return what a causal LM has below its LM head."""
    return getattr(model, "model", None) or model.base_model


def decoder_layers(body: Any) -> nn.ModuleList:
    """Return the decoder layers: the longest list of modules."""
    return max((part for part in body.modules() if isinstance(part, nn.ModuleList)), key=len)


def final_norm(model: PreTrainedModel) -> nn.Module:
    """Return the norm behind the decoder layers; raises ValueError if there is none."""
    body = body_of(model)
    parts = list(body.children())
    last = next((at for at, part in enumerate(parts) if part is decoder_layers(body)), len(parts))
    if norms := [part for part in parts[last:] if "norm" in type(part).__name__.lower()]:
        return norms[0]
    raise ValueError(f"no norm found behind the layers of a {type(model).__name__}")


def scopes(config: PretrainedConfig) -> dict[str, Scope | None]:
    """Return which earlier tokens each type of layer attends to; None for a type without attention.

    Raises:
        ValueError: a type that cannot verify a tree.
    """
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    known: dict[str, Scope | None] = dict.fromkeys(("linear_attention", "mamba", "conv", "moe", "mlp"))
    known |= {
        "full_attention": Scope(),
        "hybrid": Scope(),
        "sliding_attention": Scope(window=window),
        "chunked_attention": Scope(chunk=chunk),
    }
    types = getattr(config, "layer_types", None)
    if types is None:
        return {"": Scope(window=window)}
    for kind in types:
        if kind not in known:
            raise ValueError(f"its layers of type {kind} {WITHOUT_ROWS.get(kind, 'are not known to take a tree')}")
    return {kind: known[kind] for kind in dict.fromkeys(types)}


@dataclass(eq=False)
class ModelPart(Part):
    """The model's own forward through its layers ``start..stop``; with ``stop``, without the final norm."""

    layers: list[PartLayer] = field(default_factory=list)
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        """Nothing to derive: the model makes its own of masks and positions."""


class StockRunner(Runner):
    """The engine "stock".

    Args:
        scopes: by the type of layer, which tokens it attends to, None without attention; empty for a model that can
            only be captured.
    """

    engine: Engine = "stock"
    rewrites: ClassVar[bool] = False
    norm: Callable[[Any], Transform] = staticmethod(identity)
    linear: Callable[[Any], Transform] = staticmethod(identity)

    def __init__(self, model: PreTrainedModel, scopes: dict[str, Scope | None]) -> None:
        super().__init__(model)
        self.scopes, self.body = scopes, body_of(model)
        self.layers = decoder_layers(self.body)
        self._shapes: list[Shape] = []
        if RUNNING & scopes.keys():
            found, self._shapes = probe(self.body, len(self.layers), model.device)
            self.mixers = list(found)
            from_zero = model.config.model_type in FROM_ZERO
            self.body = variant(self.body, {id(part): Mixer(part, layer, from_zero) for layer, part in found.items()})
            self.layers = decoder_layers(self.body)
        self._vocab = len(model.get_input_embeddings().weight)
        # Near the end of the context drafts reach beyond it, with tokens that can never be accepted. A table of
        # learned positions has no entry for them.
        self._last_position = (getattr(model.config, "max_position_embeddings", None) or 1 << 30) - 1
        self._cache_name = cache_argument(self.body)
        self._bodies: dict[tuple[int, int | None, tuple[int, ...]], Any] = {}  # variants of the body, as forwards need
        self._noted = _Noted()

    @torch.no_grad()
    def shapes(self) -> list[Shape]:
        """What each layer keeps of a token: key heads, the width of a key and of a value; zeros where nothing.

        Raises:
            ValueError: the model can only be captured.
        """
        if not self.scopes:
            name = self.model.name_or_path or type(self.model).__name__
            raise ValueError(
                f"{name} can only be captured, not decoded with drafts; with features, set heldout_answers: given"
            )
        if self._shapes:
            return self._shapes
        seen, tokens = DynamicCache(), torch.zeros(1, 2, dtype=torch.long, device=self.model.device)
        self.body(input_ids=tokens, past_key_values=seen, use_cache=True)
        self._shapes = [(0, 0, 0)] * len(self.layers)
        for index, layer in enumerate(seen.layers):
            if layer.keys is not None and layer.values is not None:
                self._shapes[index] = (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        return self._shapes

    def operations(
        self,
        part: Part,
        inputs: Sequence[Tensor],
        cache: KVCache | StorageRows | None,
        rows: Placed | BufferedRows,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Taps]:
        """Run the model itself over the new tokens, or a learned head's part."""
        if not isinstance(part, ModelPart):
            return super().operations(part, inputs, cache, rows, taps)
        (given,) = inputs
        if self.mixers:
            self._check_running(cache, rows)
        # A draft model may be given ids of its target that it does not have.
        ids = given.dim() == 2
        named: dict[str, Any] = {"input_ids": given.clamp_max(self._vocab - 1)} if ids else {"inputs_embeds": given}
        if not rows.is_prompt:  # the model's own causal mask needs no memory
            scopes = {kind: scope for kind, scope in self.scopes.items() if scope is not None}
            masks = {kind: self._mask(rows, scope, self.model.dtype, True) for kind, scope in scopes.items()}
            # One mask, or one for each type of layer. Of one mask, transformers passes nothing to layers with a state.
            named["attention_mask"] = masks.get("", masks) if not self.mixers else next(iter(masks.values()), None)
        if self._cache_name != "cache_params" and (cache is not None or not rows.is_prompt):  # Mamba has no positions
            named["position_ids"] = rows.positions().clamp_max(self._last_position)
        if cache is not None:
            named[self._cache_name] = cache.for_layers() if isinstance(cache, RunningCache) else LayerCache(cache)
        named["use_cache"] = cache is not None and not self.mixers  # MiniMax would ask for a cache of its own class
        states = self._noted.states = {part.start: given} if part.start else {}
        try:
            hidden = self._between(part.start, part.stop, taps)(**named).last_hidden_state
        finally:
            self._noted.states = {}
        return hidden, {tap: states[tap] for tap in taps}

    def _check_running(self, cache: Any, rows: Placed | BufferedRows) -> None:
        name = self.model.name_or_path or type(self.model).__name__
        if rows.see is not None:
            raise ValueError(f"{name} {CHAINS_ONLY}; draft a chain")
        if cache is not None and not isinstance(cache, RunningCache):
            raise ValueError(f"{name} needs a RunningCache, found a {type(cache).__name__}; use target.new_cache(...)")

    def _between(self, start: int, stop: int | None, taps: tuple[int, ...]) -> Any:
        """Return the body with the layers from ``start`` to ``stop`` only, which notes the states at ``taps``.

        With ``stop``, it has no final norm.
        """
        if start == 0 and stop is None and not taps:
            return self.body
        key = start, stop, taps
        if key not in self._bodies:
            layers = list(self.layers)
            for tap in taps:
                at, note = (tap - 1, partial(self._noted.output, tap)) if tap else (0, self._noted.entry)
                layers[at] = StandIn(layers[at], note)
            parts: dict[int, Any] = {id(self.layers): nn.ModuleList(layers[start:stop])}
            if start and getattr(config := self.body.config, "layer_types", None):  # looked up by the place in the list
                parts[id(config)] = copy.copy(config)
                parts[id(config)].layer_types = config.layer_types[start:stop]
            if stop is not None:
                parts[id(self.body.norm)] = nn.Identity()
            self._bodies[key] = variant(self.body, parts)
        return self._bodies[key]


class _Noted(threading.local):
    """Hidden states that the present forward of a thread has noted, by the number of layers before them."""

    def __init__(self) -> None:
        self.states: Taps = {}

    def output(self, tap: int, output: Any, *arguments: Any, **named: Any) -> Any:
        self.states[tap] = output[0] if isinstance(output, tuple) else output
        return output

    def entry(self, output: Any, *arguments: Any, **named: Any) -> Any:
        self.states[0] = arguments[0] if arguments else named["hidden_states"]
        return output


class _PassThrough(nn.Module):
    """Takes the place of a model's body, or of its LM head: its output is what it was given."""

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.replaced = (replaced,)  # in a tuple, so that it is no part
        self.weight = torch.empty(0, device="cpu")  # its dtype and device are asked for

    def __getattr__(self, name: str) -> Any:
        return getattr(self.replaced[0], name)

    def forward(self, states: Tensor | None = None, *args: Any, **named: Any) -> Any:
        if "inputs_embeds" in named:
            return _Output(last_hidden_state=named["inputs_embeds"])
        return states


class _Output(BaseModelOutputWithPast):
    """Without what else some families' bodies return (router logits, shared states)."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class LogitChange(NamedTuple):
    """What a model makes of its LM head's output z: ``cap * tanh(scale * z / cap)``; without a cap ``scale * z``."""

    scale: float
    cap: float | None

    def __call__(self, logits: Tensor) -> Tensor:
        """``[..., V]`` -> ``[..., V]``."""
        logits = logits if self.scale == 1 else logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@torch.no_grad()
def logit_change(model: PreTrainedModel) -> LogitChange | None:
    """Return what a model makes of its LM head's output; None where nothing. No weight is read.

    Found by the model's own forward, with its body and its LM head replaced by modules that hand on what they get.

    Raises:
        ValueError: neither a scale nor a cap gives what it makes, or it cannot be found.
    """
    bare = copy.copy(model)
    bare._modules = dict(model._modules)
    bare.__dict__.pop("forward", None)  # which accelerate binds to the whole model
    head, body = model.get_output_embeddings(), body_of(model)
    names = {id(part): name for name, part in model._modules.items()}
    if id(head) not in names or id(body) not in names:
        return None
    for part in (head, body):
        bare._modules[names[id(part)]] = _PassThrough(part)
    with torch.device("cpu"):  # a model without contents is asked, too
        sizes = torch.tensor([1e-3, 30.0, 1e6], dtype=torch.float32)
        values = torch.linspace(-1, 1, 257, dtype=torch.float32).repeat(3) * sizes.repeat_interleave(257)
        try:
            logits = bare(inputs_embeds=values[None, None], use_cache=False).logits[0, 0].float()
        except (RuntimeError, AttributeError, TypeError) as error:
            raise ValueError(f"{type(model).__name__} does not take states in place of tokens: {error}") from error
        scale, cap = (logits[256] / values[256]).item(), None
        if logits[-1] < 0.9 * scale * values[-1]:
            cap = logits[-1].item()
        change = LogitChange(float(f"{scale:.6g}"), cap)
        if change == (1.0, None):
            return None
        if not torch.allclose(change(values), logits, rtol=1e-3):
            raise ValueError(f"{type(model).__name__} changes its logits by more than a scale and a cap")
        return change
