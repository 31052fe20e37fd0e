"""What training a head needs of its target: embedding, LM head and fingerprint, read without loading the rest."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from drafters.checkpoint import TargetIdentity
from drafters.paths import readable

from .files import load_config_only, model_fingerprint, refuse_integers, resolve_dtype, weight_map
from .layers import layer_kind, made

EMBEDDING, LM_HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass
class FrozenEnds:
    """The frozen ends of a target: ``embed`` [V, H], ``lm_head`` [V, H], its config and fingerprint."""

    embed: nn.Embedding
    lm_head: nn.Linear
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
    name: str, dtype: str | torch.dtype = "bfloat16", device: str | torch.device = "cpu", revision: str | None = None
) -> FrozenEnds:
    """Read only the two ends of a target (a 70B target's are 1 GB) from its safetensors files.

    ``device="meta"``: only their shapes, from the files' headers; the fingerprint all the same.

    Raises:
        ValueError: no such model, or its tensors have other names than Llama's.
    """
    config = load_config_only(name, revision)
    files = _tensor_files(name, revision)
    projection = f"model.layers.{config.num_hidden_layers - 1}.self_attn.o_proj.weight"
    head_name = LM_HEAD if LM_HEAD in files and not config.tie_word_embeddings else EMBEDDING
    missing = [key for key in (EMBEDDING, head_name, NORM, projection) if key not in files]
    if missing:
        raise ValueError(f"{name}: no tensors named {missing} in its safetensors files; its names must be Llama's")

    def read(key: str) -> Tensor:
        path = fetch(name, files[key], revision)
        with safe_open(path, framework="pt") as file:
            refuse_integers(path, key, file.get_slice(key).get_dtype())
            if str(device) == "meta" and key != NORM:
                return torch.empty(file.get_slice(key).get_shape(), device="meta")
            return file.get_tensor(key)

    with safe_open(fetch(name, files[projection], revision), framework="pt") as file:
        projection_row = file.get_slice(projection)[0:1][0]
    kind = resolve_dtype(dtype)
    embedding = nn.Embedding.from_pretrained(read(EMBEDDING).to(device, kind), freeze=True)
    vocab, hidden = embedding.weight.shape
    lm_head = nn.Linear(hidden, vocab, bias=False, device="meta")
    weight = embedding.weight if head_name == EMBEDDING else read(LM_HEAD).to(device, kind)
    lm_head.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return FrozenEnds(embedding, lm_head, config, model_fingerprint(config, read(NORM), projection_row))


def load_norm(
    name: str, dtype: str | torch.dtype = "bfloat16", device: str | torch.device = "cpu", revision: str | None = None
) -> nn.Module:
    """Read only the norm behind a target's last layer.

    Raises:
        ValueError: no such model, or its tensors have other names than Llama's.
    """
    kind = layer_kind(load_config_only(name, revision))
    files = _tensor_files(name, revision)
    if NORM not in files:
        raise ValueError(f"{name}: no tensor named {NORM} in its safetensors files; its names must be Llama's")
    with safe_open(fetch(name, files[NORM], revision), framework="pt") as file:
        weight = file.get_tensor(NORM)
    norm = made(kind.config, kind.norm, kind.config.hidden_size, eps=kind.eps)
    norm.load_state_dict({"weight": weight})
    return norm.to(device, resolve_dtype(dtype)).requires_grad_(False)


def read_tensors(name: str, revision: str | None, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """The ``wanted`` tensors of a checkpoint, by name, in its dtype; nothing else is read.

    Raises:
        ValueError: no safetensors file there, or a tensor that is no floating point one.
    """
    files = _tensor_files(name, revision)
    for shard in sorted(set(files.values())):
        keys = sorted(key for key, file in files.items() if file == shard and wanted(key))
        if not keys:
            continue
        path = fetch(name, shard, revision)
        with safe_open(path, framework="pt") as file:
            for key in keys:
                refuse_integers(path, key, file.get_slice(key).get_dtype())
                yield key, file.get_tensor(key)


def _tensor_files(name: str, revision: str | None) -> dict[str, str]:
    """Which file of the checkpoint holds each tensor."""
    try:
        return weight_map(Path(fetch(name, "model.safetensors.index.json", revision)))
    except EntryNotFoundError:
        pass
    try:
        single = fetch(name, "model.safetensors", revision)
    except (EntryNotFoundError, RepositoryNotFoundError, HfHubHTTPError) as error:
        raise ValueError(f"{name}: no model.safetensors (nor its index) found there: {error}") from error
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def fetch(name: str, file: str, revision: str | None) -> str:
    """The local path of one file of a model, downloaded if it is on the Hub."""
    if Path(name).is_dir():
        path = Path(name) / file
        if not path.is_file():
            raise EntryNotFoundError(f"{path} does not exist")
        return str(readable(path))
    return hf_hub_download(name, file, revision=revision)
