"""Ouroboros: longer drafts, phrase by phrase (Zhao et al. 2024, sections 3.1 to 3.4). Needs no training."""

from pathlib import Path

import torch
from pydantic import Field
from torch import Tensor

from drafters.config import DraftSize
from drafters.drafting.draft_model import DraftModelDrafter, DraftModelOptions
from drafters.drafting.phrase_pool import PhraseWindow
from drafters.drafting.pool_file import first_pool, save_pool
from drafters.drafting.trie import Trie
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import DraftTree, tree_mask
from drafters.model.backend import most_likely
from drafters.model.rows import Rows
from drafters.model.target import FeatureOutput, TargetModel


class OuroborosOptions(DraftModelOptions):
    """Options.

    ``gamma``: tokens the draft model drafts before the target verifies (its last forward may add a few more).
    ``window``: W, phrases guessed by each of its forwards. ``beta``: tokens of a phrase, the first included. ``k``:
    phrases tried after the last draft token. ``guesses``: phrases that the draft model itself verifies at once.

    Four switch the components of Table 4. ``accelerate``: the draft model guesses phrases and accepts whole ones (3.1).
    ``lengthen``: phrases that start with the last draft token are appended (3.2). ``from_verification``: what the
    target's verification agreed on or corrected becomes phrases (3.3). ``from_history``: the pool persists from prompt
    to prompt (3.4). ``pool``: file of a saved pool to begin with; without ``from_history``, every prompt begins with it
    alone.

    The defaults suit small models on a CPU, where every row costs time. For billions of parameters on a GPU the paper
    recommends gamma 7 to 14 where the models agree much (code) and 2 to 6 elsewhere, window 15 to 20, beta 5 to 7, k 3
    (Table 10).
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
    """A draft model that drafts by phrases, phrases appended to its draft, and a pool that learns from verification.

    Drafted tokens are samples of the draft model's own distribution q (its argmaxes when greedy) and verified as such;
    appended phrases are deterministic nodes. So the output is the target's own, greedy or sampled.

    Raises:
        ValueError: the draft model has another tokenizer than the target, or the phrases in ``pool``.
    """

    name = "ouroboros"
    options = OuroborosOptions

    def __init__(self, target: TargetModel, options: OuroborosOptions) -> None:
        super().__init__(target, options)
        self.gamma, self.beta, self.k, self.guesses = options.gamma, options.beta, options.k, options.guesses
        self.accelerate, self.lengthen = options.accelerate, options.lengthen
        self.from_verification, self.remembers = options.from_verification, options.from_history
        # The forward that reaches gamma may accept a whole phrase and always adds one token of its own.
        self.max_draft = self.gamma - 1 + self.beta + self.k * (self.beta - 1)
        self._first_pool = first_pool(options.pool, target, self.beta - 1, 2 * max(self.k, self.guesses))
        self.pool = self._first_pool.copy()
        self.window = PhraseWindow(options.window, self.beta - 1)
        self.more_rows = self.guesses * (self.beta - 1) + self.window.most_tokens
        self._drafted: list[int] = []
        self._tails: list[tuple[int, ...]] = []  # of the phrases appended to the draft
        self._trie = Trie()
        self._choice = torch.zeros(0)

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
        self.lm_head.read(state.tokens)
        pending = state.tokens[0][self._cache.lengths[0] :]
        q: list[Tensor] = []
        while len(self._drafted) < min(self.gamma, room) and pending[-1] not in state.eos:
            new = self._advance(pending, room - len(self._drafted), state, q)
            self._drafted += new
            pending = new[-1:]
        last = self._drafted[-1]
        if self.lengthen and last not in state.eos:
            self._tails = self.pool.get(last, self.k)
            self._trie = Trie.of(self._tails, room - len(self._drafted), state.eos)
        return self._tree(q)

    def while_verifying(self, state: DecodeState, draft: DraftTree, output: FeatureOutput) -> None:
        if self.from_verification:
            # What the target says after every row: phrases, not output. There with the verdict, without another wait.
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
        """Write the pool as it stands, for the option ``pool``.

        Raises:
            OSError: it cannot be written.
        """
        save_pool(path, self.pool, self.target)

    def _advance(self, pending: list[int], longest: int, state: DecodeState, q: list[Tensor]) -> list[int]:
        """One forward of the draft model: 1 to ``min(beta, longest)`` new draft tokens, each a sample of its q.

        Args:
            pending: committed tokens without a row in the draft model's cache, then what was drafted last.
            q: gets the distribution ``[1, width]`` of each new token, when sampling.
        """
        if not self.accelerate:
            logits = self.lm_head(self._read(pending))
            return self.lm_head.tokens(state.sampling.pick(logits, state.generator, q)).tolist()
        tails = self.pool.get(pending[-1], self.guesses)
        trie = Trie.of(tails, longest - 1, state.eos)
        root, inner = len(pending) - 1, len(trie.tokens)
        logits = self._forward(pending, trie)
        choice = self.lm_head.tokens(most_likely(logits)).tolist()

        def pick(row: int) -> int:
            # A sample of q: a phrase's token is accepted where the sample happens to equal it, which leaves every token
            # an exact sample.
            if state.sampling.greedy:
                return choice[row]
            return int(self.lm_head.tokens(state.sampling.pick(logits[row : row + 1], state.generator, q)))

        # Down the trie for as long as the draft model itself goes on as one of the phrases does.
        at, new, path = -1, [pick(0)], []
        while (node := trie.children.get((at, new[-1]))) is not None and new[-1] not in state.eos:
            at = node
            path.append(node)
            new.append(pick(node + 1))
        self._cache.commit([[*range(root + 1), *(root + 1 + node for node in path)]])
        for tail, nodes in zip(tails, trie.paths, strict=True):
            if path and nodes[: len(path)] == path:
                self.pool.add(pending[-1], tail, state.eos)  # used just now
        for first, tail in self.window.advance(pending[-1], choice[0], choice[1 + inner :]):
            self.pool.add(first, tail, state.eos)
        return new

    def _forward(self, pending: list[int], trie: Trie) -> Tensor:
        """Logits of the draft model after [the last pending token, the trie's nodes, the window's last rows]."""
        last = len(pending) - 2  # node of the last pending token: rows are [root, nodes], the root being the first one
        parents = [*range(-1, last), *(last + 1 + p if p >= 0 else last for p in trie.parents)]
        parents += self.window.parents(last, len(parents))
        see, depths = tree_mask(tuple(parents), self.target.device)
        rows = self._ids(pending + trie.tokens + self.window.tokens)
        features = self.draft_model.run(rows, self._cache, Rows(see, depths)).features[0]
        first, end = last + 1, last + 2 + len(trie.tokens)
        wanted = torch.cat([features[first:end], features[len(features) - self.window.outputs :]])
        return self.lm_head(wanted)

    def _tree(self, q: list[Tensor]) -> DraftTree:
        """The drafted chain with the phrases' trie hanging from its end."""
        drafted = len(self._drafted)
        return DraftTree.from_parents(
            self._ids(self._drafted + self._trie.tokens),
            [*range(-1, drafted - 1), *(drafted + p if p >= 0 else drafted - 1 for p in self._trie.parents)],
            q=self.lm_head.spread(torch.cat(q))[None] if q else None,
            q_row=[*range(drafted), *[-1] * len(self._trie.tokens)],
        )

    def _learn_agreements(self, accepted: int, choice: list[int], state: DecodeState) -> None:
        """Runs of discarded draft tokens that the target would have said too become phrases (3.3, Figure 4)."""
        run: list[int] = []
        for node in range(accepted, len(self._drafted) + 1):
            if node < len(self._drafted) and self._drafted[node] == choice[node]:
                run.append(self._drafted[node])
                continue
            # Oldest first, so that of phrases with the same first token the one from the front counts as newest.
            for start in reversed(range(len(run) - 1)):
                self.pool.add(run[start], run[start + 1 : start + self.beta], state.eos)
            run = []

    def _learn_corrections(self, chosen: list[int], choice: list[int], state: DecodeState) -> None:
        """The draft was accepted: phrases not chosen are overwritten with what the target said in their place (3.3)."""
        drafted, last = len(self._drafted), self._drafted[-1]
        winner = -1
        for index, path in enumerate(self._trie.paths):
            if chosen and [drafted + node for node in path[: len(chosen)]] == chosen:
                winner = index
                break
        for index in reversed(range(len(self._tails))):
            tail, path = self._tails[index], self._trie.paths[index]
            if index == winner or len(path) < len(tail):  # cut at the limit: not all of it was verified
                continue
            rows = [drafted, *(drafted + node + 1 for node in path[:-1])]
            self.pool.replace(last, tail, [choice[row] for row in rows], state.eos)
        if winner >= 0:
            self.pool.add(last, self._tails[winner], state.eos)

    def _ids(self, tokens: list[int]) -> Tensor:
        return torch.tensor([tokens], device=self.target.device)
