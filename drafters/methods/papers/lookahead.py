"""Lookahead decoding: one forward of the target both guesses n-grams and verifies them (Fu et al. 2024). Untrained."""

from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from drafters.base import Drafter
from drafters.config import Config, DraftSize
from drafters.drafting.phrase_pool import PhraseWindow, first_pool, save_pool
from drafters.drafting.trie import Trie
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree, Extra
from drafters.model.backend import most_likely
from drafters.model.target import FeatureOutput, TargetModel


class LookaheadOptions(Config):
    """Options.

    ``window``: W, columns of the two-dimensional window.
    ``ngram``: N, tokens of an n-gram, the first included; the window has N - 1 levels.
    ``guesses``: G, most n-grams verified in one forward.
    ``from_prompt``: add the prompt's n-grams to the pool.
    ``from_output``: add the output's n-grams to the pool (not in the paper).
    ``from_history``: keep the pool from prompt to prompt.
    ``pool``: file of a saved pool that the first prompt begins with, or every prompt without ``from_history``.

    The defaults suit small models on a CPU, where each of (N - 1)(W + G) tokens costs time. On a GPU, the authors use
    window, ngram and guesses of 15, 5, 15 for 7B parameters, 10, 5, 10 for 13B and 7, 5, 7 for 33B.
    """

    window: int = Field(4, ge=1, le=64)
    ngram: int = Field(3, ge=2, le=32)
    guesses: DraftSize = Field(3, ge=1)
    from_prompt: bool = True
    from_output: bool = False
    from_history: bool = False
    pool: str | None = None


class LookaheadDrafter(Drafter):
    """One forward of the target verifies up to G n-grams and computes a new level of the window of Jacobi iterations.

    The n-grams begin with the last committed token. They are deterministic nodes, so the output distribution is the
    target's. The window's guesses are argmaxes at any temperature and scratch nodes of the forward, never committed.
    Every forward completes one n-gram per column for the pool.

    Raises:
        ValueError: ``pool`` is no pool of this target's vocabulary.
    """

    name = "lookahead"
    options = LookaheadOptions
    trees = True
    rewinds = True

    def __init__(self, target: TargetModel, options: LookaheadOptions) -> None:
        super().__init__(target, options)
        self.guesses, self.remembers = options.guesses, options.from_history
        self.from_prompt, self.from_output = options.from_prompt, options.from_output
        self._first_pool = first_pool(options.pool, target, tail=options.ngram - 1, per_token=2 * options.guesses)
        self.pool = self._first_pool.copy()
        self.window = PhraseWindow(options.window, options.ngram - 1)
        self.max_draft = self.guesses * self.pool.tail + self.window.most_tokens
        self._read = 0  # start of the first n-gram of the text that is not in the pool
        self._tails: list[tuple[int, ...]] = []  # of the n-grams under verification
        self._trie = Trie()
        self._predictions: Tensor  # argmaxes after the window's last level, on the host

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        if not self.remembers:
            self.pool = self._first_pool.copy()
        self.window.start(state.tokens[0])
        self._read = 0 if self.from_prompt else len(state.tokens[0]) - 1
        self._read_text(state)

    def propose(self, state: DecodeState) -> DraftTree:
        room = state.room() - 1
        self._tails, self._trie = [], Trie()
        if room < 1:  # the last token: no later forward can use new guesses
            return state.nothing
        self._tails = self.pool.get(state.tokens[0][-1], self.guesses)
        self._trie = trie = Trie(self._tails, room, state.eos)
        guessed = self.window.tokens
        return DraftTree.from_parents(
            torch.tensor([trie.tokens + guessed], dtype=torch.long, device=self.target.device),
            [*trie.parents, *self.window.parents(-1, len(trie.tokens))],
            extra=Extra(scratch=len(guessed), scratch_outputs=self.window.outputs),
        )

    def while_verifying(self, state: DecodeState, draft: DraftTree, output: FeatureOutput) -> None:
        if output.scratch is not None:  # the copy overlaps with verification, whose own copy waits for it
            self._predictions = most_likely(output.scratch[0]).to("cpu", non_blocking=True)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        tokens, accepted = verdict.tokens[0], [row - 1 for row in verdict.rows[0][1:]]
        root = state.tokens[0][-1 - len(tokens)]
        for tail, path in zip(self._tails, self._trie.paths, strict=True):
            if accepted and path[: len(accepted)] == accepted:
                self.pool.add(root, tail)  # marks it as used
        predictions = self._predictions.tolist() if output.scratch is not None else []
        for first, tail in self.window.advance(root, tokens[0], predictions):
            self.pool.add(first, tail, state.eos)
        if self.from_output:
            self._read_text(state)

    def rewind(self, state: DecodeState, length: int) -> None:
        # Pool and window hold only guesses and can stay. N-grams that extended beyond ``length`` are read again.
        self._read = min(self._read, max(length - self.pool.tail, 0))

    def save_pool(self, path: str | Path) -> None:
        """Write the pool to a file for the option ``pool``; raises OSError if it cannot be written."""
        save_pool(path, self.pool, self.target)

    def _read_text(self, state: DecodeState) -> None:
        """Add the text's n-grams that have not been read."""
        tokens, tail = state.tokens[0], self.pool.tail
        for start in range(self._read, len(tokens) - tail):
            self.pool.add(tokens[start], tokens[start + 1 : start + 1 + tail], state.eos)
        self._read = max(self._read, len(tokens) - tail)
