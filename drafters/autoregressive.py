"""Plain decoding: no draft, one token a target forward. The baseline of every speedup."""

from .base import Drafter
from .decoding.loop import DecodeState


class AutoregressiveDrafter(Drafter):
    """Proposes nothing; tau is 1.0 by definition."""

    name = "autoregressive"
    max_batch = None
    rewinds = True

    def rewind(self, state: DecodeState, kept: int) -> None:
        pass
