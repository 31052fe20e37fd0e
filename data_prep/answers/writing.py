"""How answers are written, whoever writes them."""

import hashlib
from typing import Literal

from pydantic import Field

from drafters.config import Config, Length, Seed, Vocabulary


class Writing(Config):
    """What a target and an endpoint are told alike, except ``max_context``: an endpoint knows its own."""

    max_new_tokens: Length = Field(1024, ge=1)  # of one answer
    max_context: Length | None = Field(None, ge=2)  # tokens of prompt and answer; default: the target's context
    truncated: Literal["keep", "drop"] = "keep"  # answers cut there; drop: the dialogue ends before such an answer
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)  # 0: greedy
    top_k: Vocabulary = Field(0, ge=0)  # 0: off
    top_p: float = Field(1.0, gt=0, le=1)  # 1: off
    seed: Seed = 0


def derived_seed(seed: int, asked: list[tuple[int, int]]) -> int:
    """The seed of a batch of (dialogue, turn): the same for the same ones, whatever was answered before."""
    digest = hashlib.sha256(f"{seed} {asked}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1  # 31 bits: servers, too, take it
