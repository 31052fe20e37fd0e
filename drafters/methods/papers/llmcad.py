"""LLMCad (Xu et al. 2023): a draft model grows a token tree by its own confidence. Lossless: nodes are deterministic.

The paper's three parts: branches get tokens in proportion to their confidence (``TokenTree``). Drafting ends when the
likeliest branch falls below a threshold, which adapts after each verification (``next_alpha``). Drafting continues
while the target verifies (``LLMCadDrafter.while_verifying``).
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

    ``nodes``: M, most tokens of a tree.
    ``branches``: N, most branches that grow at the same time.
    ``alpha``: fallback threshold at the beginning of each prompt.
    ``overlap``: continue drafting while the target verifies; null does so on CUDA only, because a CPU gains nothing.
    """

    nodes: DraftSize = Field(16, ge=1)
    branches: DraftSize = Field(4, ge=1)
    alpha: float = Field(0.01, gt=0.0, le=1.0)
    overlap: bool | None = None


class TokenTree:
    """A token tree under construction, on the host.

    C_x, the confidence of branch x, is the product of the draft model's probabilities of its tokens, and T_x is its
    length. Of the N likeliest branches, those with a remaining budget continue:

        f(x) = M * C_x / sum(C_i) - T_x >= 0

    (The product M * C_x / sum(C_i) * T_x, which is also in print, would favour branches that are already long; max-min
    fairness asks for the difference.) The likeliest branch always continues: only the threshold alpha ends it. All
    branches that continue have the same length, so that one forward of the draft model extends them all.

    Attributes:
        nodes, branches, alpha: M, N and the threshold.
        depth: most tokens of a branch.
        tokens, parents, lengths: token and parent of each node, and number of tokens from the root to it.
        level: last nodes of the branches that continue, likeliest first.
        confidence: C_x of each of them.
        features: ``[R, H]`` of the draft model after each of them (at first after the root), while drafting continues.
        done: True if drafting has ended.
        see: ``[M + 1, M + 1]`` ancestor mask over [root, nodes].
    """

    def __init__(self, nodes: int, branches: int, alpha: float, depth: int, features: Tensor) -> None:
        self.nodes, self.branches, self.alpha, self.depth = nodes, branches, alpha, depth
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.lengths: list[int] = []
        self.level, self.confidence = [ROOT], [1.0]
        self.done = depth < 1
        self.features = features
        self.see = np.eye(nodes + 1, dtype=bool)
        self.see[:, 0] = True

    def extend(self, q: list[list[float]], tokens: list[list[int]]) -> None:
        """Extend the branches by one token, given the likeliest ``tokens`` after each of ``level`` and their ``q``."""
        candidates = [
            (confidence * chance, parent, token)
            for parent, confidence, chances, choices in zip(self.level, self.confidence, q, tokens, strict=True)
            for chance, token in zip(chances, choices, strict=True)
        ]
        candidates = sorted(candidates, key=lambda branch: -branch[0])[: self.branches]
        length = 1 + (self.lengths[self.level[0]] if self.tokens else 0)
        total = sum(branch[0] for branch in candidates)
        others = [branch for branch in candidates[1:] if self.nodes * branch[0] >= length * total]  # f(x) >= 0
        chosen = [candidates[0], *others][: self.nodes - len(self.tokens)]
        first = len(self.tokens)
        self.level = list(range(first, first + len(chosen)))
        self.confidence = [confidence for confidence, _, _ in chosen]
        self.tokens += [token for _, _, token in chosen]
        self.parents += [parent for _, parent, _ in chosen]
        self.lengths += [length] * len(chosen)
        see_ancestors(self.see, self.parents, first)
        self.done = self.confidence[0] < self.alpha or len(self.tokens) == self.nodes or length == self.depth

    def branch_length(self, node: int) -> int:
        """Number of tokens of the longest branch through a node or ROOT."""
        through = self.see[1 : len(self.tokens) + 1, node + 1]
        return max(length for length, included in zip(self.lengths, through.tolist(), strict=True) if included)

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child down to ``node``."""
        return np.flatnonzero(self.see[node + 1, 1:]).tolist()


def next_alpha(alpha: float, correct: int, total: int, confidence: float) -> float:
    """Return the fallback threshold after a verification, in (0, 1].

    If all tokens of the matching branch were right, alpha is halved and drafts get longer. Otherwise it is divided by
    T_c ** ((N_all - N_correct) / N_all), and drafts get shorter. (The exponent is missing in one print. Without it, the
    first mistake would end all drafts: drafting ends at T_c < alpha, so alpha / T_c > 1.)

    Args:
        alpha: threshold of the verified tree.
        correct: N_correct, accepted tokens.
        total: N_all, tokens of the longest branch through the last accepted token.
        confidence: T_c, confidence of the likeliest branch when drafting ended.
    """
    alpha = alpha * 0.5 if correct == total else alpha / confidence ** ((total - correct) / total)
    return min(max(alpha, sys.float_info.min), 1.0)


@dataclass
class Ahead:
    """A tree drafted during verification, valid if the target accepts ``path`` with the bonus ``guess``.

    Attributes:
        path: the likeliest branch of the tree under verification, as nodes.
        guess: the draft model's choice after it.
        tree: the tree after ``guess``.
    """

    path: list[int]
    guess: int
    tree: TokenTree


class LLMCadDrafter(DraftModelDrafter):
    """Grows a token tree level by level, with one copy to the host per level, since the next level depends on it."""

    name = "llmcad"
    options = LLMCadOptions

    def __init__(self, target: TargetModel, options: LLMCadOptions) -> None:
        super().__init__(target, options)
        self.nodes, self.branches, self.first_alpha = options.nodes, options.branches, options.alpha
        self.max_draft = self.nodes
        on_cuda = target.device.type == "cuda"
        self.overlap = on_cuda if options.overlap is None else options.overlap
        self._side = torch.cuda.Stream(target.device) if on_cuda and self.overlap else None  # for drafting ahead
        self._drafted: torch.cuda.Event | None = None
        self.more_rows = 2 * self.nodes + 2  # two trees in one cache; between them the end of a branch and the guess
        self._tree: TokenTree | None = None
        self._ahead: Ahead | None = None
        self.alpha = self.first_alpha

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        if self._side is not None:  # the side stream may still write to the old cache
            torch.cuda.current_stream(self.target.device).wait_stream(self._side)
        super().begin(state, output)
        if self._side is not None:
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
        # Adapt the threshold to the outcome.
        path = [row - 1 for row in verdict.rows[0][1:]]
        total = tree.branch_length(path[-1] if path else ROOT)
        self.alpha = next_alpha(self.alpha, len(path), total, tree.confidence[0])
        # Commit the cache slots of the accepted nodes. Nodes of the last level have none.
        inner = tree.level[0]
        if ahead is None or path != ahead.path or verdict.tokens[0][-1] != ahead.guess:
            self._cache.commit([[node for node in path if node < inner]])
            return
        # Right guess: move the slots drafted ahead behind the accepted ones, then uncommit them.
        known = self._cache.lengths[0] + len(path) + 1
        rows = len(ahead.tree.tokens) if not ahead.tree.done else ahead.tree.level[0]
        self._cache.commit([[*path[:-1], *range(inner, inner + 2 + rows)]])
        self._cache.crop([known])
        self._ahead = ahead

    @contextmanager
    def _beside(self) -> Iterator[Callable[[], bool]]:
        """Run the block in parallel to the target's forward; yields a function: does that forward still run?"""
        if self._side is None:
            yield lambda: True
            return
        assert self._drafted is not None
        verified = torch.cuda.current_stream(self.target.device).record_event()
        self._side.wait_event(self._drafted)  # waiting for the whole main stream would include the target's forward
        with torch.cuda.stream(self._side):
            yield lambda: not verified.query()

    def _draft_ahead(self, tree: TokenTree, room: int, verifying: Callable[[], bool]) -> Ahead | None:
        """Draft the next tree under the guess that the likeliest branch and the draft model's next token are accepted.

        None if the limit leaves no room for it.
        """
        path, length = tree.path(tree.level[0]), tree.lengths[-1]
        if room - length - 1 < 2:
            return None
        # Forward the end of the branch, which gives the guess, and then the guess.
        inner = tree.level[0]
        see = [node in path for node in range(inner)] + [True]
        depths = [length - 1 for length in tree.lengths[: inner + 1]]
        end = self._run([tree.tokens[inner]], np.array([see]), depths, inner)
        guess = int(self.lm_head.tokens(most_likely(self.lm_head(end))))
        see, depths = [*see, True], [*depths, length]
        features = self._run([guess], np.array([see]), depths, inner + 1)
        # Grow the next tree with the threshold that follows from a right draft.
        alpha = next_alpha(self.alpha, length, length, tree.confidence[0])
        follows = TokenTree(self.nodes, self.branches, alpha, room - length - 2, features)
        self._grow(follows, see, depths, verifying)
        return Ahead(path, guess, follows)

    def _grow(
        self, tree: TokenTree, see: list[bool], depths: list[int], more: Callable[[], bool] = lambda: True
    ) -> None:
        """Grow a tree until it is done or ``more`` returns False.

        Args:
            see: True for each uncommitted token before the tree that its nodes attend to.
            depths: depths of these tokens.
        """
        base = depths[-1] if depths else -1
        while not tree.done and more():
            # The likeliest tokens after each branch, in one copy to the host.
            logits = self.lm_head(tree.features)  # [R, W]
            q, places = logits.softmax(-1, dtype=torch.float32).topk(min(self.branches, logits.shape[-1]), -1)
            tokens = self.lm_head.tokens(places)
            both = torch.stack([q.double(), tokens.double()]).tolist()
            tree.extend(both[0], [[int(token) for token in row] for row in both[1]])
            if tree.done:
                break
            # Forward the new level: each node attends to ``see`` and to its ancestors.
            first, last = tree.level[0], tree.level[-1] + 1
            before = np.tile(np.array(see, dtype=bool), (last - first, 1))
            seen = np.concatenate([before, tree.see[first + 1 : last + 1, 1 : last + 1]], 1)
            positions = depths + [base + length for length in tree.lengths]
            tree.features = self._run(tree.tokens[first:], seen, positions, len(see) + first)

    def _run(self, tokens: list[int], see: np.ndarray, depths: list[int], offset: int) -> Tensor:
        """Features ``[R, H]`` of the draft model after R uncommitted tokens; see ``Rows`` for the last three."""
        ids, positions, seen = to_device(self.target.device, tokens, depths, see.ravel().tolist())
        rows = Rows(seen.view(1, *see.shape).bool(), positions[None], offset)
        return self.draft_model.run(ids[None], self._cache, rows).features[0]
