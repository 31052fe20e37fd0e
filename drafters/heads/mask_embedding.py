"""A block head's own embedding of the mask token: a tensor of our checkpoints, a torch file in engines' folders.

The file holds the embedding ``[H]``, or ``{"embedding": [H], "mask_token_id": id}``. vLLM reads both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafters.common.files import replacing
from drafters.common.wording import shortened
from drafters.heads.forms import Stored, load_pickled

MASK_EMBEDDING, MASK_FILE = "mask_embedding", "mask_embedding.pt"


def with_mask_embedding(stored: Stored, flat: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors, with the embedding of the folder's file in their dtype; ``flat``: keys of its ``config.json``.

    Raises:
        ValueError: a file that holds more than tensors and numbers, an embedding of another width or token, or two.
    """
    path, weights = stored.folder / MASK_FILE, dict(stored.weights)
    if not path.is_file():
        return weights
    if MASK_EMBEDDING in weights:
        raise ValueError(f"{stored.source} has {MASK_FILE} and a tensor {MASK_EMBEDDING}; remove the wrong one")
    content = load_pickled(path, stored.source)
    token = content.get("mask_token_id") if isinstance(content, dict) else None
    embedding = content.get("embedding") if isinstance(content, dict) else content
    width = flat["hidden_size"]
    if not isinstance(embedding, Tensor) or embedding.numel() != width or not embedding.is_floating_point():
        found = list(embedding.shape) if isinstance(embedding, Tensor) else shortened(content)
        raise ValueError(
            f"{stored.source}: {MASK_FILE} must hold the mask token's embedding of {width:,} numbers, found {found}"
        )
    if token not in (None, flat.get("mask_token_id")):
        raise ValueError(
            f"{stored.source}: {MASK_FILE} is for the token {shortened(token)}, and mask_token_id is "
            f"{shortened(flat.get('mask_token_id'))}; correct one of them"
        )
    like = next((value.dtype for value in weights.values() if value.is_floating_point()), embedding.dtype)
    return weights | {MASK_EMBEDDING: embedding.reshape(-1).to(like)}


def write_mask_embedding(embedding: Tensor, folder: Path) -> None:
    """Write the file for vLLM."""
    with replacing(folder / MASK_FILE) as path:
        torch.save(embedding.clone(), path)
