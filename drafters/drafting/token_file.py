"""Files of token ids (phrase pools, datastores): int32 arrays in one safetensors file, with the vocabulary's facts."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from drafters.common.files import replacing, save_tensors
from drafters.common.paths import readable
from drafters.drafting.draft_model import vocabulary
from drafters.model.target import TargetModel

FORMAT_VERSION = "1"


def vocabulary_facts(name: str, size: int, tokens: dict[str, int] | None) -> dict[str, str]:
    """A model's name, its vocabulary size, and a hash of its tokenizer's vocabulary; empty without a tokenizer."""
    digest = hashlib.sha256(json.dumps(sorted(tokens.items())).encode()).hexdigest() if tokens is not None else ""
    return {"model": name, "vocab_size": str(size), "vocabulary": digest}


def model_facts(model: TargetModel) -> dict[str, str]:
    """``vocabulary_facts`` of a loaded model."""
    return vocabulary_facts(model.name, model.vocab_size, vocabulary(model))


def save_tokens(path: Path, content: str, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write arrays of ``content``, for example "phrase pool". The file is replaced atomically.

    Args:
        metadata: ``vocabulary_facts`` of the model that the token ids belong to, and more.

    Raises:
        OSError: the file cannot be written; the old one is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"content": content, "format_version": FORMAT_VERSION, **metadata}
    with replacing(path) as temporary:
        save_tensors({name: torch.from_numpy(array) for name, array in arrays.items()}, temporary, facts)


def load_tokens(path: Path, content: str, names: tuple[str, ...], model: TargetModel, remedy: str) -> list[np.ndarray]:
    """Map the arrays ``names`` of ``content`` into memory.

    Args:
        remedy: how such a file is made, for the messages.

    Raises:
        ValueError: no such file, an incomplete or other file, or one of another vocabulary than the model's.
    """
    if not path.is_file():
        raise ValueError(f"there is no {content} at {path}: {remedy}")
    try:
        with safe_open(readable(path), framework="pt") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is no {content}, or only part of one ({error}): {remedy}") from error
    if (metadata.get("content"), metadata.get("format_version")) != (content, FORMAT_VERSION):
        raise ValueError(f"{path} is a safetensors file but no {content} of version {FORMAT_VERSION}: {remedy}")
    maker, facts = metadata.get("model"), model_facts(model)
    theirs, ours = metadata.get("vocabulary"), facts["vocabulary"]  # each is empty without a tokenizer
    if theirs and ours and theirs != ours:
        raise ValueError(f"{path} is of {maker}, whose tokenizer is not {model.name}'s: use a {content} of this target")
    # Models of one tokenizer may be padded to different sizes.
    if metadata.get("vocab_size") != facts["vocab_size"] and not (ours and ours == theirs):
        raise ValueError(
            f"{path} is of {maker}, whose vocabulary has {metadata.get('vocab_size')} tokens; use one of {model.name}"
        )
    contents = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
    if set(contents) != set(names) or any(array.dtype != np.int32 or array.ndim != 1 for array in arrays.values()):
        raise ValueError(f"{path} is damaged: it must hold flat int32 {', '.join(names)}, found {contents}; {remedy}")
    return [arrays[name] for name in names]


def check_range(path: Path, name: str, array: np.ndarray, least: int, most: int, remedy: str) -> None:
    """Raise ValueError if the ``array`` called ``name`` has values outside of ``least`` to ``most``."""
    if len(array) and not least <= array.min() <= array.max() <= most:
        problem = f"{name} run from {array.min()} to {array.max()}, not from {least} to {most}"
        raise ValueError(f"{path} is damaged: {problem}; {remedy}")
