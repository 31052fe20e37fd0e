"""Ouroboros: longer drafts, phrase by phrase (Zhao et al. 2024, sections 3.1 to 3.4). Untrained.

The draft model drafts whole phrases from a pool (3.1), further phrases are appended to its draft (3.2), and the pool
learns from verification (3.3) and from earlier prompts (3.4).
"""

from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from drafters.config import DraftSize
from drafters.drafting.draft_model import DraftModelDrafter, DraftModelOptions
from drafters.drafting.phrase_pool import PhraseWindow, first_pool, save_pool
from drafters.drafting.trie import Trie
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree, tree_mask
from drafters.model.backend import most_likely
from drafters.model.rows import Rows
from drafters.model.target import FeatureOutput, TargetModel


class OuroborosOptions(DraftModelOptions):
    """Options.

    ``gamma``: tokens that are drafted before the target verifies; the draft model's last forward may add a few.
    ``window``: W, phrases that each forward of the draft model guesses.
    ``beta``: tokens of a phrase, the first included.
    ``k``: most phrases appended to the draft.
    ``guesses``: most phrases that the draft model verifies in one forward.
    ``accelerate``: the draft model guesses phrases and drafts whole ones (3.1).
    ``lengthen``: append phrases that begin with the last draft token (3.2).
    ``from_verification``: tokens that the target agrees with or corrects become phrases (3.3).
    ``from_history``: keep the pool from prompt to prompt (3.4).
    ``pool``: file of a saved pool that the first prompt begins with, or every prompt without ``from_history``.

    The defaults suit small models on a CPU, where every token costs time. For billions of parameters on a GPU, Table 10
    recommends gamma 7 to 14 for code and 2 to 6 elsewhere, window 15 to 20, beta 5 to 7, and k 3.
    """

    gamma: DraftSize = Field(3, ge=1)
    window: int = Field(4, ge=1, le=64)
    beta: int = Field(4, ge=2, le=32)
    k: DraftSize = Field(3, ge=1)
    guesses: DraftSize = Field(3, ge=1)
    accelerate: bool = True
    lengthen: bool = True
    from_verification: bool = True
    from_history: bool = True
    pool: str | None = None


class OuroborosDrafter(DraftModelDrafter):
    """A chain drafted with the draft model, and a tree of phrases after its last token.

    Tokens of the chain are samples of the draft model's distribution q, or its argmaxes when greedy. Phrases are
    deterministic nodes. So it is lossless.

    Raises:
        ValueError: the draft model, or ``pool``, belongs to another tokenizer than the target's.
    """

    name = "ouroboros"
    options = OuroborosOptions
    trees = True
    draft_trees = True

    def __init__(self, target: TargetModel, options: OuroborosOptions) -> None:
        super().__init__(target, options)
        self.gamma, self.beta, self.k, self.guesses = options.gamma, options.beta, options.k, options.guesses
        self.accelerate, self.lengthen = options.accelerate, options.lengthen
        self.from_verification, self.remembers = options.from_verification, options.from_history
        # The last forward of the draft model, after gamma - 1 tokens, adds at most a phrase and one token.
        self.max_draft = self.gamma - 1 + self.beta + self.k * (self.beta - 1)
        self._first_pool = first_pool(options.pool, target, self.beta - 1, 2 * max(self.k, self.guesses))
        self.pool = self._first_pool.copy()
        self.window = PhraseWindow(options.window, self.beta - 1)
        self.more_rows = self.guesses * (self.beta - 1) + self.window.most_tokens
        self._drafted: list[int] = []  # the chain
        self._tails: list[tuple[int, ...]] = []  # of the phrases appended to it
        self._trie = Trie()  # of these tails
        self._choice = torch.zeros(0)  # the target's argmax after each token

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        if not self.remembers:
            self.pool = self._first_pool.copy()
        self.window.start(state.tokens[0])
        super().begin(state, output)

    def propose(self, state: DecodeState) -> DraftTree:
        room = state.room() - 1
        self._drafted, self._tails, self._trie = [], [], Trie()
        if room < 1:
            return state.nothing
        # Draft a chain of at least gamma tokens with the draft model.
        self.lm_head.read(state.tokens)
        pending = state.tokens[0][self._cache.lengths[0] :]
        q: list[Tensor] = []
        while len(self._drafted) < min(self.gamma, room) and pending[-1] not in state.eos:
            new = self._advance(pending, room - len(self._drafted), state, q)
            self._drafted += new
            pending = new[-1:]
        # Append phrases that begin with its last token.
        last, drafted = self._drafted[-1], len(self._drafted)
        if self.lengthen and last not in state.eos:
            self._tails = self.pool.get(last, self.k)
            self._trie = Trie(self._tails, room - drafted, state.eos)
        return DraftTree.from_parents(
            torch.tensor([self._drafted + self._trie.tokens], device=self.target.device),
            [*range(-1, drafted - 1), *(drafted + p if p >= 0 else drafted - 1 for p in self._trie.parents)],
            q=self.lm_head.spread(torch.cat(q))[None] if q else None,
            q_row=[*range(drafted), *[-1] * len(self._trie.tokens)],
        )

    def while_verifying(self, state: DecodeState, draft: DraftTree, output: FeatureOutput) -> None:
        if self.from_verification:
            # The copy overlaps with verification, whose own copy waits for it.
            assert output.logits is not None
            self._choice = most_likely(output.logits[0]).to("cpu", non_blocking=True)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        self._cache.crop([min(self._cache.lengths[0], len(state.tokens[0]) - 1)])
        if not self.from_verification or not self._drafted:
            return
        choice = self._choice.tolist()
        accepted = [row - 1 for row in verdict.rows[0][1:]]
        if len(accepted) < len(self._drafted):
            self._learn_agreements(len(accepted), choice, state)
        else:
            self._learn_corrections(accepted[len(self._drafted) :], choice, state)

    def save_pool(self, path: str | Path) -> None:
        """Write the pool to a file for the option ``pool``; raises OSError if it cannot be written."""
        save_pool(path, self.pool, self.target)

    def _advance(self, pending: list[int], longest: int, state: DecodeState, q: list[Tensor]) -> list[int]:
        """One forward of the draft model: return 1 to ``min(beta, longest)`` new draft tokens, each a sample of its q.

        Args:
            pending: tokens without a slot in the draft model's cache: committed ones, or the last draft token.
            q: when sampling, the distribution ``[1, W]`` of each new token is appended to it.
        """
        if not self.accelerate:
            logits = self.lm_head(self._read(pending))
            return self.lm_head.tokens(state.sampling.pick(logits, state.generator, q)).tolist()
        # One forward over the pending tokens, phrases that begin with the last of them, and the window.
        tails = self.pool.get(pending[-1], self.guesses)
        trie = Trie(tails, longest - 1, state.eos)
        root, inner = len(pending) - 1, len(trie.tokens)
        logits = self._forward(pending, trie)
        choice = self.lm_head.tokens(most_likely(logits)).tolist()

        def pick(row: int) -> int:
            # A phrase's token is accepted if it equals the sample, so that every token is an exact sample of q.
            if state.sampling.greedy:
                return choice[row]
            return int(self.lm_head.tokens(state.sampling.pick(logits[row : row + 1], state.generator, q)))

        # Walk down the trie while the draft model's samples follow one of the phrases.
        at, new, path = -1, [pick(0)], []
        while (node := trie.children.get((at, new[-1]))) is not None and new[-1] not in state.eos:
            at = node
            path.append(node)
            new.append(pick(node + 1))
        self._cache.commit([[*range(root + 1), *(root + 1 + node for node in path)]])
        # Update the pool: phrases just used, and those that the window completed.
        for tail, nodes in zip(tails, trie.paths, strict=True):
            if path and nodes[: len(path)] == path:
                self.pool.add(pending[-1], tail, state.eos)
        for first, tail in self.window.advance(pending[-1], choice[0], choice[1 + inner :]):
            self.pool.add(first, tail, state.eos)
        return new

    def _forward(self, pending: list[int], trie: Trie) -> Tensor:
        """Logits of the draft model after [the last pending token, the trie's nodes, the window's last tokens]."""
        last = len(pending) - 2  # node of the last pending token; the first one is the root
        parents = [*range(-1, last), *(last + 1 + p if p >= 0 else last for p in trie.parents)]
        parents += self.window.parents(last, len(parents))
        see, depths = tree_mask(tuple(parents), self.target.device)
        rows = torch.tensor([pending + trie.tokens + self.window.tokens], device=self.target.device)
        features = self.draft_model.run(rows, self._cache, Rows(see, depths)).features[0]  # [R, H]
        first, end = last + 1, last + 2 + len(trie.tokens)
        return self.lm_head(torch.cat([features[first:end], features[len(features) - self.window.outputs :]]))

    def _learn_agreements(self, accepted: int, choice: list[int], state: DecodeState) -> None:
        """Runs of rejected draft tokens that equal the target's argmaxes become phrases (3.3, Figure 4)."""
        run: list[int] = []
        for node in range(accepted, len(self._drafted) + 1):
            if node < len(self._drafted) and self._drafted[node] == choice[node]:
                run.append(self._drafted[node])
                continue
            # In reverse, so that of phrases with the same first token the earliest is the most recently used.
            for start in reversed(range(len(run) - 1)):
                self.pool.add(run[start], run[start + 1 : start + self.beta], state.eos)
            run = []

    def _learn_corrections(self, chosen: list[int], choice: list[int], state: DecodeState) -> None:
        """After full acceptance of the chain, replace the rejected phrases by the target's argmaxes (3.3)."""
        drafted, last = len(self._drafted), self._drafted[-1]
        winner, nodes = -1, [node - drafted for node in chosen]
        if chosen:
            winner = next(n for n, path in enumerate(self._trie.paths) if path[: len(nodes)] == nodes)
        for index in reversed(range(len(self._tails))):
            tail, path = self._tails[index], self._trie.paths[index]
            if index == winner or len(path) < len(tail):  # skip phrases that were cut and so not verified whole
                continue
            rows = [drafted, *(drafted + node + 1 for node in path[:-1])]
            self.pool.replace(last, tail, [choice[row] for row in rows], state.eos)
        if winner >= 0:
            self.pool.add(last, self._tails[winner], state.eos)
