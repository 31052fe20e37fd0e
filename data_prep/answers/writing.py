"""How answers are written, whoever writes them."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Writing:
    """How answers are written; ``max_context`` is in tokens of prompt and answer, ``keep_truncated`` for cut ones."""

    max_new_tokens: int
    max_context: int
    keep_truncated: bool = True
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def derived_seed(seed: int, asked: list[tuple[int, int]]) -> int:
    """The seed of a batch of (dialogue, turn): the same for the same ones, whatever was answered before."""
    digest = hashlib.sha256(f"{seed} {asked}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # 31 bits: servers, too, take it
