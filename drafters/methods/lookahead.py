"""Lookahead decoding: the target guesses n-grams and verifies them in one forward (Fu et al. 2024). Untrained."""

from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from drafters.base import Drafter
from drafters.config import Config, DraftSize
from drafters.drafting.phrase_pool import PhraseWindow
from drafters.drafting.pool_file import first_pool, save_pool
from drafters.drafting.trie import Trie
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree, Extra
from drafters.model.backend import most_likely
from drafters.model.target import FeatureOutput, TargetModel


class LookaheadOptions(Config):
    """Options.

    ``window``: W, columns of the two-dimensional window. ``ngram``: N, tokens of an n-gram, the first included; the
    window has N - 1 levels. ``guesses``: G, n-grams verified at once. ``from_prompt``: the prompt's own n-grams are
    taken into the pool; ``from_output``: the output's too (not in the paper). ``from_history``: the pool persists from
    prompt to prompt. ``pool``: file of a saved pool to begin with; without ``from_history``, every prompt begins with
    it alone.

    The defaults suit small models on a CPU, where each of the (N - 1)(W + G) rows costs time. For 7B parameters on a
    GPU the authors take window 15, ngram 5, guesses 15, and less where a row costs more: 10, 5, 10 for 13B and 7, 5, 7
    for 33B.
    """

    window: int = Field(4, ge=1, le=64)
    ngram: int = Field(3, ge=2, le=32)
    guesses: DraftSize = Field(3, ge=1)
    from_prompt: bool = True
    from_output: bool = False
    from_history: bool = False
    pool: str | None = None


class LookaheadDrafter(Drafter):
    """One forward of the target verifies up to G n-grams and moves the window of Jacobi iterations on by one level.

    The n-grams follow the last committed token and are verified as deterministic nodes, so that sampled output is the
    target's own; the window's guesses are argmaxes at any temperature, ride along as scratch rows and are never
    committed. Every forward completes one n-gram a column; the pool keeps, by first token, those used last.

    Raises:
        ValueError: ``pool`` holds no phrases of this target's vocabulary.
    """

    name = "lookahead"
    options = LookaheadOptions
    rewinds = True

    def __init__(self, target: TargetModel, options: LookaheadOptions) -> None:
        super().__init__(target, options)
        self.guesses, self.remembers = options.guesses, options.from_history
        self.from_prompt, self.from_output = options.from_prompt, options.from_output
        self._first_pool = first_pool(options.pool, target, tail=options.ngram - 1, per_token=2 * options.guesses)
        self.pool = self._first_pool.copy()
        self.window = PhraseWindow(options.window, options.ngram - 1)
        self.max_draft = self.guesses * self.pool.tail + self.window.most_tokens
        self._read = 0  # where the first n-gram starts that was not read off the text
        self._tails: list[tuple[int, ...]] = []  # of the n-grams being verified
        self._trie = Trie()
        self._predictions: Tensor  # of the window, on the host

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        if not self.remembers:
            self.pool = self._first_pool.copy()
        self.window.start(state.tokens[0])
        self._read = 0 if self.from_prompt else len(state.tokens[0]) - 1
        self._read_text(state)

    def propose(self, state: DecodeState) -> DraftTree:
        room = state.room() - 1
        self._tails, self._trie = [], Trie()
        if room < 1:  # the last token: there will be no forward to use new guesses in
            return state.nothing
        self._tails = self.pool.get(state.tokens[0][-1], self.guesses)
        self._trie = trie = Trie.of(self._tails, room, state.eos)
        guessed = self.window.tokens
        return DraftTree.from_parents(
            torch.tensor([trie.tokens + guessed], dtype=torch.long, device=self.target.device),
            [*trie.parents, *self.window.parents(-1, len(trie.tokens))],
            extra=Extra(scratch=len(guessed), scratch_outputs=self.window.outputs),
        )

    def while_verifying(self, state: DecodeState, draft: DraftTree, output: FeatureOutput) -> None:
        if output.scratch is not None:  # under way now, there with the verdict: read by itself it would be another wait
            self._predictions = most_likely(output.scratch[0]).to("cpu", non_blocking=True)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        tokens, accepted = verdict.tokens[0], [row - 1 for row in verdict.rows[0][1:]]
        root = state.tokens[0][-1 - len(tokens)]
        for tail, path in zip(self._tails, self._trie.paths, strict=True):
            if accepted and path[: len(accepted)] == accepted:
                self.pool.add(root, tail)  # used just now
        predictions = self._predictions.tolist() if output.scratch is not None else []
        for first, tail in self.window.advance(root, tokens[0], predictions):
            self.pool.add(first, tail, state.eos)
        if self.from_output:
            self._read_text(state)

    def rewind(self, state: DecodeState, kept: int) -> None:
        # Pool and window are guesses, wherever in the text they came from. N-grams that ran past ``kept`` read on now.
        self._read = min(self._read, max(kept - self.pool.tail, 0))

    def save_pool(self, path: str | Path) -> None:
        """Write the pool as it stands, for the option ``pool``.

        Raises:
            OSError: it cannot be written.
        """
        save_pool(path, self.pool, self.target)

    def _read_text(self, state: DecodeState) -> None:
        """Add the text's own n-grams that were not read before."""
        tokens, tail = state.tokens[0], self.pool.tail
        for start in range(self._read, len(tokens) - tail):
            self.pool.add(tokens[start], tokens[start + 1 : start + 1 + tail], state.eos)
        self._read = max(self._read, len(tokens) - tail)
