"""Plain decoding: no draft, one token a target forward. The baseline of every speedup."""

from drafters.base import Drafter
from drafters.loop.state import DecodeState
from drafters.model.target import FeatureOutput


class AutoregressiveDrafter(Drafter):
    """Proposes nothing; tau is 1.0 by definition."""

    name = "autoregressive"
    max_batch = None
    rewinds = True

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        pass

    def rewind(self, state: DecodeState, length: int) -> None:
        pass
