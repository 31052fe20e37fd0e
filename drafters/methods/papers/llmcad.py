"""LLMCad (Xu et al. 2023): a draft model grows a token tree by its own confidence. Lossless: nodes are deterministic.

Branches get tokens in proportion to their confidence (``TokenTree``). Drafting ends when the likeliest branch falls
below a threshold, which adapts after each verification (``next_alpha``). The paper's third part, drafting while the
target verifies, is left out.
"""

import sys

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from drafters.config import DraftSize
from drafters.drafting.draft_model import DraftModelDrafter, DraftModelOptions
from drafters.loop.acceptance import Verdict
from drafters.loop.state import DecodeState
from drafters.loop.tree import ROOT, DraftTree, see_ancestors, to_device
from drafters.model.rows import Rows
from drafters.model.target import FeatureOutput, TargetModel


class LLMCadOptions(DraftModelOptions):
    """Options.

    ``nodes``: M, most tokens of a tree.
    ``branches``: N, most branches that grow at the same time.
    ``alpha``: fallback threshold at the beginning of each prompt.
    """

    nodes: DraftSize = Field(16, ge=1)
    branches: DraftSize = Field(4, ge=1)
    alpha: float = Field(0.01, gt=0.0, le=1.0)


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


class LLMCadDrafter(DraftModelDrafter):
    """Grows a token tree level by level, with one copy to the host per level, since the next level depends on it."""

    name = "llmcad"
    options = LLMCadOptions
    trees = True
    draft_trees = True

    def __init__(self, target: TargetModel, options: LLMCadOptions) -> None:
        super().__init__(target, options)
        self.nodes, self.branches, self.first_alpha = options.nodes, options.branches, options.alpha
        self.max_draft = self.nodes
        self.more_rows = self.nodes
        self._tree: TokenTree | None = None
        self.alpha = self.first_alpha

    def begin(self, state: DecodeState, output: FeatureOutput) -> None:
        super().begin(state, output)
        self._tree, self.alpha = None, self.first_alpha

    def propose(self, state: DecodeState) -> DraftTree:
        if state.room() < 2:
            return state.nothing
        features = self._catch_up(state)
        self._tree = tree = TokenTree(self.nodes, self.branches, self.alpha, state.room() - 1, features)
        while not tree.done:
            # The likeliest tokens after each branch, in one copy to the host.
            logits = self.lm_head(tree.features)  # [R, W]
            q, places = logits.softmax(-1, dtype=torch.float32).topk(min(self.branches, logits.shape[-1]), -1)
            tokens = self.lm_head.tokens(places)
            both = torch.stack([q.double(), tokens.double()]).tolist()
            tree.extend(both[0], [[int(token) for token in row] for row in both[1]])
            if not tree.done:
                tree.features = self._forward_level(tree)
        return DraftTree.from_parents(torch.tensor([tree.tokens], device=self.target.device), tree.parents)

    def observe(self, state: DecodeState, draft: DraftTree, output: FeatureOutput, verdict: Verdict) -> None:
        tree = self._tree
        assert tree is not None
        path = [row - 1 for row in verdict.rows[0][1:]]
        total = tree.branch_length(path[-1] if path else ROOT)
        self.alpha = next_alpha(self.alpha, len(path), total, tree.confidence[0])
        # Nodes of the last level have no cache slots.
        self._cache.commit([[node for node in path if node < tree.level[0]]])

    def _forward_level(self, tree: TokenTree) -> Tensor:
        """Features ``[R, H]`` of the draft model after the R nodes of the last level."""
        first, last = tree.level[0], tree.level[-1] + 1
        seen = tree.see[first + 1 : last + 1, 1 : last + 1]
        depths = [length - 1 for length in tree.lengths]
        ids, positions, see = to_device(self.target.device, tree.tokens[first:], depths, seen.ravel().tolist())
        rows = Rows(see.view(1, *seen.shape).bool(), positions[None], first)
        return self.draft_model.run(ids[None], self._cache, rows).features[0]
