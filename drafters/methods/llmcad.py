"""LLMCad (Xu et al. 2023): one draft model grows a token tree by its own confidence.

The paper's three parts: branches get tokens in proportion to their confidence (``TokenTree``), verification begins when
the best branch is no longer trusted, by a threshold that learns from every outcome (``next_alpha``), and drafting goes
on while the target verifies (``LLMCadDrafter.while_verifying``). Lossless: nodes are deterministic, verified as such.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from drafters.config import DraftSize
from drafters.drafting.draft_model import DraftModelDrafter, DraftModelOptions
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT, DraftTree, see_ancestors, to_device
from drafters.model.backend import most_likely
from drafters.model.rows import Rows
from drafters.model.target import FeatureOutput, TargetModel


class LLMCadOptions(DraftModelOptions):
    """Options.

    ``nodes``: M, most tokens a tree. ``branches``: N, most branches that grow at a time. ``alpha``: the fallback
    threshold that each prompt begins with. ``overlap``: draft on while the target verifies; None does so where the
    target is on CUDA (a CPU gains nothing).
    """

    nodes: DraftSize = Field(16, ge=1)
    branches: DraftSize = Field(4, ge=1)
    alpha: float = Field(0.01, gt=0.0, le=1.0)
    overlap: bool | None = None


class TokenTree:
    """A token tree under construction, on the host.

    C_x, the confidence of branch x, is the product of the draft model's probabilities of its tokens. Of the N likeliest
    branches x that hold T_x tokens goes on who is still due some:

        f(x) = M * C_x / sum(C_i) - T_x >= 0

    (The product M * C_x / sum(C_i) * T_x, as it is also found printed, would give the more to a branch the more it had
    already. A share of M tokens less the tokens held is what max-min fairness asks for.) The likeliest branch always
    goes on, until its confidence T_c falls below alpha: that, not its due, ends drafting.

    All branches that go on have the same length, so that one forward of the draft model serves them all.

    Args:
        nodes: M.
        branches: N.
        alpha: the fallback threshold.
        depth: most tokens a branch.

    Attributes:
        tokens, parents, lengths: of each node; its token, its parent's index or ROOT, and T_x of the branch up to it.
        level: the nodes at the ends of the branches that go on, the likeliest first.
        confidence: C_x of each of those.
        done: whether drafting ended.
        features: ``[R, H]`` of the draft model after each of those (or after the root); not yet where drafting ended.
    """

    def __init__(self, nodes: int, branches: int, alpha: float, depth: int, features: Tensor) -> None:
        self.nodes, self.branches, self.alpha, self.depth = nodes, branches, alpha, depth
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.lengths: list[int] = []
        self.level, self.confidence = [ROOT], [1.0]
        self.done = depth < 1
        self.features = features
        self.see = np.eye(nodes + 1, dtype=bool)  # of [root, nodes]; the rows of ancestors, copied down
        self.see[:, 0] = True

    def extend(self, q: list[list[float]], tokens: list[list[int]]) -> None:
        """One more token a branch: ``q`` and ``tokens`` are the likeliest after each of ``level``."""
        found = [
            (confidence * chance, parent, token)
            for parent, confidence, chances, choices in zip(self.level, self.confidence, q, tokens, strict=True)
            for chance, token in zip(chances, choices, strict=True)
        ]
        found = sorted(found, key=lambda branch: -branch[0])[: self.branches]
        length = 1 + (self.lengths[self.level[0]] if self.tokens else 0)
        total = sum(branch[0] for branch in found)
        due = [branch for branch in found[1:] if self.nodes * branch[0] >= length * total]
        kept = [found[0], *due][: self.nodes - len(self.tokens)]
        first = len(self.tokens)
        self.level = list(range(first, first + len(kept)))
        self.confidence = [confidence for confidence, _, _ in kept]
        self.tokens += [token for _, _, token in kept]
        self.parents += [parent for _, parent, _ in kept]
        self.lengths += [length] * len(kept)
        see_ancestors(self.see, self.parents, first)
        self.done = self.confidence[0] < self.alpha or len(self.tokens) == self.nodes or length == self.depth

    def branch_length(self, node: int) -> int:
        """Tokens of the longest branch through a node (or ROOT)."""
        through = self.see[1 : len(self.tokens) + 1, node + 1]
        return max(length for length, included in zip(self.lengths, through.tolist(), strict=True) if included)

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to ``node``."""
        return (np.flatnonzero(self.see[node + 1, 1:])).tolist()


def next_alpha(alpha: float, correct: int, total: int, confidence: float) -> float:
    """The fallback threshold after a verification, in (0, 1].

    Where all tokens of the best matching branch were right, it halves: draft longer. Else it is divided by T_c to the
    power of the wrong share (N_all - N_correct) / N_all: draft shorter, the more so the sooner it went wrong. (It is
    also found printed without the power. But drafting ends where T_c < alpha, and alpha / T_c is then above 1: the
    first mistake would end all trees.)

    Args:
        correct: N_correct, accepted tokens. total: N_all, tokens of the longest branch through the last of them.
        confidence: T_c, that of the likeliest branch when drafting ended.
    """
    alpha = alpha * 0.5 if correct == total else alpha / confidence ** ((total - correct) / total)
    return min(max(alpha, sys.float_info.min), 1.0)


@dataclass
class Ahead:
    """What was drafted while the target verified, for the case that it accepts ``path`` and goes on with ``guess``.

    Attributes:
        path: nodes of the verified tree, down to its likeliest end.
        guess: the token expected after them.
        tree: what would be drafted then.
    """

    path: list[int]
    guess: int
    tree: TokenTree


class LLMCadDrafter(DraftModelDrafter):
    """Grows a token tree level by level, with one copy to the host a level: what is drafted next depends on it.

    Raises:
        ValueError: the draft model has another tokenizer than the target.
    """

    name = "llmcad"
    options = LLMCadOptions

    def __init__(self, target: TargetModel, options: LLMCadOptions) -> None:
        super().__init__(target, options)
        self.nodes, self.branches, self.first_alpha = options.nodes, options.branches, options.alpha
        self.max_draft = self.nodes
        on_cuda = target.device.type == "cuda"
        self.overlap = on_cuda if options.overlap is None else options.overlap
        self._side = torch.cuda.Stream(target.device) if on_cuda and self.overlap else None
        self._drafted: torch.cuda.Event | None = None
        self.more_rows = 2 * self.nodes + 2  # two trees, side by side in one cache, and what lies between them
        self._tree: TokenTree | None = None
        self._ahead: Ahead | None = None
        self.alpha = self.first_alpha

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        if self._side is not None:  # which may still write to the cache that is given up now
            torch.cuda.current_stream(self.target.device).wait_stream(self._side)
        super().begin(state, output)
        if self._side is not None:  # not to be reused while the side stream may still write there
            self._cache.record_stream(self._side)
        self._tree, self._ahead, self.alpha = None, None, self.first_alpha

    def propose(self, state: DecodeState) -> DraftTree:
        if state.room() < 2:
            return state.nothing
        if self._ahead is None:
            features = self._catch_up(state)
            self._tree = TokenTree(self.nodes, self.branches, self.alpha, state.room() - 1, features)
        else:
            self._tree, self._ahead = self._ahead.tree, None
        self._grow(self._tree, [], [])
        if self._side is not None:
            self._drafted = torch.cuda.current_stream(self.target.device).record_event()
        return DraftTree.from_parents(torch.tensor([self._tree.tokens], device=self.target.device), self._tree.parents)

    def while_verifying(self, state: DecodeState, draft: DraftTree, output: FeatureOutput) -> None:
        if self.overlap and self._tree is not None and draft.size:
            with self._beside() as verifying:
                self._ahead = self._draft_ahead(self._tree, state.room(), verifying)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        tree, ahead, self._ahead = self._tree, self._ahead, None
        assert tree is not None
        if self._side is not None:
            main = torch.cuda.current_stream(self.target.device)
            main.wait_stream(self._side)
            if ahead is not None:
                ahead.tree.features.record_stream(main)
        path = [row - 1 for row in verdict.rows[0][1:]]
        total = tree.branch_length(path[-1] if path else ROOT)
        self.alpha = next_alpha(self.alpha, len(path), total, tree.confidence[0])
        inner = tree.level[0]  # nodes before the last level have rows, by their number
        if ahead is None or path != ahead.path or verdict.tokens[0][-1] != ahead.guess:
            self._cache.commit([[node for node in path if node < inner]])
            return
        # Everything drafted ahead moves up behind the accepted rows; only these are committed.
        known = self._cache.lengths[0] + len(path) + 1
        rows = len(ahead.tree.tokens) if not ahead.tree.done else ahead.tree.level[0]
        self._cache.commit([[*path[:-1], *range(inner, inner + 2 + rows)]])
        self._cache.crop([known])
        self._ahead = ahead

    @contextmanager
    def _beside(self) -> Iterator[Callable[[], bool]]:
        """Queue what runs inside beside the target's forward; yields a function that says whether that still runs."""
        if self._side is None:
            yield lambda: True
            return
        assert self._drafted is not None
        verified = torch.cuda.current_stream(self.target.device).record_event()
        self._side.wait_event(self._drafted)  # waiting for the whole main stream would be waiting for the target
        with torch.cuda.stream(self._side):
            yield lambda: not verified.query()

    def _draft_ahead(self, tree: TokenTree, room: int, verifying: Callable[[], bool]) -> Ahead | None:
        """Guess that the likeliest branch is accepted, and what follows it; draft on from there."""
        path, length = tree.path(tree.level[0]), tree.lengths[-1]
        if room - length - 1 < 2:
            return None
        inner = tree.level[0]
        see = [node in path for node in range(inner)] + [True]
        depths = [length - 1 for length in tree.lengths[: inner + 1]]
        end = self._run([tree.tokens[inner]], np.array([see]), depths, inner)
        guess = int(self.lm_head.tokens(most_likely(self.lm_head(end))))
        # What its nodes attend to, and where that stands: the likeliest branch and the guess, no other branch.
        see, depths = [*see, True], [*depths, length]
        features = self._run([guess], np.array([see]), depths, inner + 1)
        # Were it so, the threshold would be what it is after a draft that was right.
        alpha = next_alpha(self.alpha, length, length, tree.confidence[0])
        follows = TokenTree(self.nodes, self.branches, alpha, room - length - 2, features)
        self._grow(follows, see, depths, verifying)
        return Ahead(path, guess, follows)

    def _grow(
        self, tree: TokenTree, see: list[bool], depths: list[int], going: Callable[[], bool] = lambda: True
    ) -> None:
        """Draft until the tree is done, or for as long as ``going`` says.

        Args:
            see, depths: of the uncommitted rows before the tree's own: which of them its nodes attend to, where they
                stand.
        """
        while not tree.done and going():
            logits = self.lm_head(tree.features)
            q, places = logits.softmax(-1, dtype=torch.float32).topk(min(self.branches, logits.shape[-1]), -1)
            tokens = self.lm_head.tokens(places)
            both = torch.cat([q.double(), tokens.double()], 1).tolist()  # one copy to the host
            half = q.shape[1]
            tree.extend([row[:half] for row in both], [[int(token) for token in row[half:]] for row in both])
            if not tree.done:
                first, last = tree.level[0], tree.level[-1] + 1
                own = tree.see[first + 1 : last + 1, 1 : last + 1]
                seen = np.concatenate([np.broadcast_to(np.array(see, dtype=bool), (last - first, len(see))), own], 1)
                base = depths[-1] if depths else -1
                stands = depths + [base + length for length in tree.lengths]
                tree.features = self._run(tree.tokens[first:], seen, stands, len(see) + first)

    def _run(self, tokens: list[int], see: np.ndarray, depths: list[int], offset: int) -> Tensor:
        """Features ``[R, H]`` of the draft model after R more uncommitted rows; see ``TargetModel.run``."""
        ids, stands, seen = to_device(self.target.device, tokens, depths, see.ravel().tolist())
        rows = Rows(seen.view(1, *see.shape).bool(), stands[None], offset)
        return self.draft_model.run(ids[None], self._cache, rows).features[0]
