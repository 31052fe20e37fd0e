"""REST, retrieval-based speculative decoding (He et al. 2023, section 3): what followed the text's end in a datastore
of other texts, as a tree of what is frequent there. Untrained; ``python -m data_prep.datastore`` makes a datastore.
"""

from collections import defaultdict
from typing import Annotated, Literal

from pydantic import Field

from drafters.config import Amount, Config, DraftSize
from drafters.drafting.datastore import load_datastore
from drafters.drafting.retrieval import NOTHING, Copy, Next, Retrieval, likeliest_tree
from drafters.loop.state import DecodeState
from drafters.model.target import FeatureOutput, TargetModel
from drafters.policy.copies import CopyPolicy

MOST_NODES = 64


class RestOptions(Config):
    """``datastore``: the file. ``max_ngram``, ``min_ngram``: the longest and the shortest match looked for, by default
    the paper's 16 and 2 (auto: 1, for what a match of one is worth is counted). ``depth``: most tokens of a
    continuation. ``nodes``: the tree is of so many, the most frequent; auto: of at most 64, as many as pay on this
    machine by how often copies after such a match are right. ``places``: where the match stands at more places, so many
    of them, evenly spread, are looked at; by default 64 (auto: 16, by which no less is accepted and a third less time
    looked). ``chain``: one path in the place of a tree.
    """

    datastore: str
    max_ngram: int = Field(16, ge=1, le=32)
    min_ngram: int | None = Field(None, ge=1, le=32)
    depth: DraftSize = Field(10, ge=1)
    nodes: Annotated[DraftSize, Field(ge=1)] | Literal["auto"] = MOST_NODES
    places: Amount | None = Field(None, ge=1)
    chain: bool = False


class RestDrafter(Retrieval):
    """Looks for the longest match first; the continuations of one match are merged into a trie.

    Raises:
        ValueError: ``min_ngram`` is above ``max_ngram``; no datastore there, or one of another vocabulary.
    """

    name = "rest"
    options = RestOptions

    def __init__(self, target: TargetModel, options: RestOptions) -> None:
        super().__init__(target, options)
        auto = options.nodes == "auto"
        self.depth, self.places, self.chain = options.depth, options.places or (16 if auto else 64), options.chain
        self.nodes = MOST_NODES if options.nodes == "auto" else options.nodes
        least = options.min_ngram or (1 if auto else 2)
        self.max_draft, self.sizes = self.nodes, (least, options.max_ngram)
        if least > options.max_ngram:
            raise ValueError(
                f"min_ngram is {least} and max_ngram {options.max_ngram}: nothing lies between; swap them?"
            )
        self.store = load_datastore(options.datastore, target)
        self.policy = CopyPolicy() if auto else None
        self.remembers = auto
        self._looked: dict[int, tuple[int, int]] = {}  # by row: the text's tokens at the last look, and its match

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self._looked.clear()

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        super().join(state, rows, part, output)
        for row in rows:
            self._looked.pop(row, None)

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        text, (size, match) = state.tokens[row], self._looked.get(row, (0, 0))
        # What ends with a match ends with a shorter one where it ended earlier.
        longest = min(max(match, self.sizes[0] - 1) + len(text) - size, self.sizes[1])
        match, found = self.store.find(text, self.sizes[0], longest)
        self._looked[row] = len(text), match
        return self._after(match, found, min(self.depth, state.room(row) - 1), state.eos)

    def _after(self, match: int, found: range, depth: int, stop: frozenset[int]) -> Copy:
        """What follows a match in the datastore, up to ``depth`` tokens."""
        if not match or depth < 1:
            return NOTHING
        chosen = found[:: -(-len(found) // self.places)]
        places = [int(self.store.suffixes[place]) + match for place in chosen]
        texts = [self.store.tokens[place : place + depth].tolist() for place in places]

        def after(at: tuple[int, list[list[int]]]) -> list[Next]:
            size, texts = at
            going: dict[int, list[list[int]]] = defaultdict(list)
            for text in texts:
                if len(text) > size:
                    going[text[size]].append(text)
            return [Next(token, len(some), 0, (size + 1, some)) for token, some in going.items()]

        return likeliest_tree(after, (0, texts), match, self.nodes, 0.01 if self.policy else 0.0, stop, self.chain)[1]
