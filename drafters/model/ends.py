"""What training a head needs of its target: embedding, LM head and fingerprint, read without loading the rest."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.hub.checkpoint import TargetIdentity
from drafters.model.files import load_config_only, meta_model, resolve_dtype
from drafters.model.loading import BASE, MERGE, config_and_adapter
from drafters.model.stock import LogitChange, final_norm, logit_change
from drafters.model.weights import Weights, open_weights, stored_tensors


class LMHead(nn.Linear):
    """Features -> logits, with the bias ``[V]``, the scale or the cap (``change``) that the target has."""

    def __init__(self, weight: Tensor, change: LogitChange | None = None, bias: Tensor | None = None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.change = change

    @property
    def scaled(self) -> Tensor:
        """The weight with the scale in it, to begin an LM head of a drafter's own with."""
        return self.weight if self.change is None else self.weight * self.change.scale

    def forward(self, features: Tensor) -> Tensor:
        """``[..., H]`` -> ``[..., V]``."""
        return self._changed(super().forward(features))

    def of(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Logits ``[n, k]`` of some ``tokens [n, k]``, for features ``[n, H]``."""
        logits = (self.weight[tokens] @ features[..., None])[..., 0]
        return self._changed(logits if self.bias is None else logits + self.bias[tokens])

    def _changed(self, logits: Tensor) -> Tensor:
        return logits if self.change is None else self.change(logits)


@dataclass
class FrozenEnds:
    """The frozen ends of a target: ``embed`` [V, H], ``lm_head`` [V, H], its config and fingerprint."""

    embed: nn.Embedding
    lm_head: LMHead
    config: PretrainedConfig
    fingerprint: str

    def to(self, device: torch.device) -> None:
        """Move the embedding and the LM head to ``device``, in place; one memory stays one."""
        tied = self.lm_head.weight.data_ptr() == self.embed.weight.data_ptr() and not self.embed.weight.is_meta
        self.embed.to(device)
        if tied:
            self.lm_head.weight = nn.Parameter(self.embed.weight.detach(), requires_grad=False)
        self.lm_head.to(device)

    def identity(self, name: str, revision: str | None = None) -> TargetIdentity:
        """What a checkpoint says of the target, which was read from ``name``."""
        vocab_size, hidden_size = self.lm_head.weight.shape
        return TargetIdentity(
            name=name,
            revision=revision,
            fingerprint=self.fingerprint,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_hidden_layers=self.config.num_hidden_layers,
        )


def load_frozen_ends(
    name: str,
    dtype: str | torch.dtype = "bfloat16",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    download: bool = False,
) -> FrozenEnds:
    """Read only the two ends of a target (a 70B target's are 1 GB) from its safetensors files, and its fingerprint.

    Args:
        device: device of the ends; "meta" reads only their shapes, from the files' headers.
        download: download all weights of a target on the Hub, so that the fingerprint covers all of them.

    Raises:
        ValueError: no such model, or one whose embedding or LM head cannot be found in its files.
    """
    weights = _weights(name, revision)
    config, (embedding_name, head_name) = weights.config, weights.ends
    if missing := [key for key in dict.fromkeys((embedding_name, head_name)) if key not in weights.stored]:
        packed = next((key for key in weights.stored if key.startswith(head_name.removesuffix("weight"))), None)
        also = f" (but {packed}: no head is trained for a quantised LM head)" if packed and head_name in missing else ""
        raise ValueError(f"{name}: no tensors named {missing} in its safetensors files{also}")
    bias_name = f"{head_name.removesuffix('weight')}bias"

    def read(key: str) -> Tensor:
        if str(device) == "meta":
            weights.path(key)  # refuses integers, also where only shapes are wanted
            return torch.empty(weights.stored[key].shape, device="meta")
        return weights.read(key)

    kind = resolve_dtype(dtype)
    embedding = nn.Embedding.from_pretrained(read(embedding_name).to(device, kind), freeze=True)
    weight = embedding.weight if head_name == embedding_name else read(head_name).to(device, kind)
    bias = read(bias_name).to(device, kind) if bias_name in weights.stored else None
    head = LMHead(weight, logit_change(meta_model(config)), bias)
    return FrozenEnds(embedding, head, config, weights.fingerprint(download))


def load_norm(
    name: str, dtype: str | torch.dtype = "bfloat16", device: str | torch.device = "cpu", revision: str | None = None
) -> nn.Module:
    """Read only the norm behind a target's last layer.

    Raises:
        ValueError: no such model, or no norm behind its layers.
    """
    config = load_config_only(name, revision)
    weights = Weights(name, revision, config, stored_tensors(name, revision))
    norm = final_norm(model := meta_model(config))
    names = {id(one): key for key, one in model.named_parameters()}
    tensors = {key: weights.read(weights.stored_name(model, names[id(one)])) for key, one in norm.named_parameters()}
    norm = norm.to_empty(device=device)
    norm.load_state_dict(tensors)
    return norm.to(resolve_dtype(dtype)).requires_grad_(False)


def read_tensors(name: str, revision: str | None, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """The ``wanted`` tensors of a checkpoint, by name, in its dtype; nothing else is read.

    Raises:
        ValueError: no safetensors file there, or a tensor that is no floating point one.
    """
    weights = _weights(name, revision)
    for key in sorted(weights.stored, key=lambda key: (weights.stored[key].file, key)):
        if wanted(key):
            yield key, weights.read(key)


def _weights(name: str, revision: str | None) -> Weights:
    """``open_weights`` of a model that is no adapter: its tensors would not be those that a target decodes with."""
    config, adapter = config_and_adapter(name, revision)
    if adapter is not None:
        raise ValueError(f"{name} is a LoRA adapter of {adapter[BASE]}, whose merged weights are nowhere; {MERGE}")
    return open_weights(name, revision, config)
