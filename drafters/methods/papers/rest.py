"""REST, retrieval-based speculative decoding (He et al. 2023, section 3): copy from a datastore of other texts.

The draft is a tree of the tokens that most often followed the text's last tokens there. Untrained; ``python -m
data_prep.datastore`` makes a datastore.
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
    """Options.

    ``datastore``: path of the datastore.
    ``max_ngram``: tokens of the longest match (16 in the paper).
    ``min_ngram``: tokens of the shortest match; by default 2 (the paper's), or 1 with ``nodes: auto``.
    ``depth``: most tokens of a path.
    ``nodes``: most nodes of the tree, the most frequent; auto drafts as many as are profitable by step costs and
    acceptance, at most 64.
    ``places``: most occurrences of the match that are read, evenly spread; by default 64, or 16 with ``nodes: auto``.
    ``chain``: draft one path instead of a tree.
    """

    datastore: str
    max_ngram: int = Field(16, ge=1, le=32)
    min_ngram: int | None = Field(None, ge=1, le=32)
    depth: DraftSize = Field(10, ge=1)
    nodes: Annotated[DraftSize, Field(ge=1)] | Literal["auto"] = MOST_NODES
    places: Amount | None = Field(None, ge=1)
    chain: bool = False


class RestDrafter(Retrieval):
    """Finds the longest match in the datastore and merges its continuations into a tree.

    Raises:
        ValueError: ``min_ngram`` is above ``max_ngram``; no datastore, or one of another vocabulary.
    """

    name = "rest"
    options = RestOptions

    def __init__(self, target: TargetModel, options: RestOptions) -> None:
        super().__init__(target, options)
        if not options.chain:
            self.needs_trees("set chain: true")
        auto = options.nodes == "auto"
        self.depth, self.places, self.chain = options.depth, options.places or (16 if auto else 64), options.chain
        self.nodes = MOST_NODES if options.nodes == "auto" else options.nodes
        shortest = options.min_ngram or (1 if auto else 2)
        self.max_draft, self.sizes = self.nodes, (shortest, options.max_ngram)
        if shortest > options.max_ngram:
            raise ValueError(f"min_ngram is {shortest} and max_ngram {options.max_ngram}; swap them")
        self.store = load_datastore(options.datastore, target)
        self.policy = CopyPolicy() if auto else None
        self._last: dict[int, tuple[int, int]] = {}  # sequence -> tokens of it at the last lookup, and its match

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self._last.clear()

    def join(self, state: DecodeState, rows: list[int], part: DecodeState, output: FeatureOutput) -> None:
        super().join(state, rows, part, output)
        for row in rows:
            self._last.pop(row, None)

    def retrieve(self, state: DecodeState, row: int = 0) -> Copy:
        text, (size, match) = state.tokens[row], self._last.get(row, (0, 0))
        # A match grows by at most one token per new token of the text.
        longest = min(max(match, self.sizes[0] - 1) + len(text) - size, self.sizes[1])
        match, suffixes = self.store.find(text, self.sizes[0], longest)
        self._last[row] = len(text), match
        return self._after(match, suffixes, min(self.depth, state.room(row) - 1), state.eos)

    def _after(self, match: int, suffixes: range, depth: int, stop: frozenset[int]) -> Copy:
        """The copy of up to ``depth`` tokens after a match of ``match`` tokens, which begins these ``suffixes``."""
        if not match or depth < 1:
            return NOTHING
        chosen = suffixes[:: -(-len(suffixes) // self.places)]
        places = [int(self.store.suffixes[place]) + match for place in chosen]
        texts = [self.store.tokens[place : place + depth].tolist() for place in places]

        def after(at: tuple[int, list[list[int]]]) -> list[Next]:
            size, texts = at
            by_token: dict[int, list[list[int]]] = defaultdict(list)
            for text in texts:
                if len(text) > size:
                    by_token[text[size]].append(text)
            return [Next(token, len(some), 0, (size + 1, some)) for token, some in by_token.items()]

        return likeliest_tree(after, (0, texts), match, self.nodes, 0.01 if self.policy else 0.0, stop, self.chain)[1]
